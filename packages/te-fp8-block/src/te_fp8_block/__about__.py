# SPDX-License-Identifier: Apache-2.0
"""The version of te-fp8-block, the one place it is written."""

__version__ = "0.1.0"
