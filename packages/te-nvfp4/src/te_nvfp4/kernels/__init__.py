# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of NVFP4, imported at their first launch."""
