# SPDX-License-Identifier: Apache-2.0
"""The version of te-nvfp4, the one place it is written."""

__version__ = "0.1.0"
