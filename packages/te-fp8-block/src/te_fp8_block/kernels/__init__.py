# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of block-scaled FP8, imported at their first launch."""
