# SPDX-License-Identifier: Apache-2.0
"""EXAMPLE in plain torch: the definition of the format, which kernels obey bit for bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SMALLEST_SCALE = 2.0**-100
"""Keeps the quotient finite for a row of zeros or of subnormals."""


def quantize(x: Tensor, *, levels: int, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and ``scale_inv`` of one plane.

    Args:
        x: ``[..., K]``, seen as a matrix ``[M, K]``.
        levels: largest code; the largest magnitude of a row becomes it.
        columnwise: one scale a column, ``[1, K]``, instead of one a row, ``[M, 1]``.
    """
    matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
    axis = 0 if columnwise else 1
    # the zeros give an empty axis a maximum
    zeros = matrix.new_zeros([1 if d == axis else n for d, n in enumerate(matrix.shape)])
    amax = torch.cat([matrix.abs(), zeros], axis).amax(axis, keepdim=True)
    scale_inv = (amax / levels).clamp_min(SMALLEST_SCALE)
    codes = (matrix / scale_inv).round().to(torch.int8)
    return codes.reshape(x.shape).contiguous(), scale_inv


def dequantize(
    codes: Tensor, scale_inv: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return ``codes * scale_inv``, computed in float32, in ``shape`` and ``dtype``."""
    matrix = codes.reshape(math.prod(shape[:-1]), shape[-1]).float() * scale_inv
    return matrix.to(dtype).reshape(tuple(shape))
