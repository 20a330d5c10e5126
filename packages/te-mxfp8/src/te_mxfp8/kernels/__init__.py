# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of MXFP8, imported at their first launch."""
