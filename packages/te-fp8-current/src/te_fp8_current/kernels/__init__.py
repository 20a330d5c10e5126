# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of FP8 with current scaling, imported at their first launch."""
