# SPDX-License-Identifier: Apache-2.0
"""The 16-point Hadamard transform with fixed random signs, in plain torch and in one fixed order.

``y[c] = sum over r of x[r] * T[r, c]`` with ``T = diag(signs) * H / 4``, which is orthogonal. The
sum is four rounds of additions and subtractions in float32, in the order written here; the kernels
keep it. A sum of 16 bfloat16 numbers is exact in float32 unless their magnitudes spread over more
than 2**12, so another order would seldom give other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_nvfp4.layout import BLOCK
from te_proto.numerics import materialize

SIGN_MASK = 0xD7E8
"""Bit ``r`` is set if sign ``r`` is -1. The signs are constants of the format, not random."""


def transform(x: Tensor, *, signs: bool) -> Tensor:
    """Return the transform of each 16 entries of axis -2, rounded to bfloat16.

    Args:
        x: ``[..., 16, K]``, bfloat16.
        signs: False takes all signs as +1.

    Returns:
        bfloat16 of the shape of ``x``.

    Source:
        ``get_rht_matrix`` of TransformerEngine; Sylvester's order of ``H``.
    """
    # the quarter first, as the entries of T have it: the sum then overflows where theirs does
    # stored: Inductor leaves a rounding out where it fuses with what reads the result
    return materialize(_butterfly(x.float() * (_signs(x, signs) * 0.25)).bfloat16())


def inverse(y: Tensor, *, signs: bool) -> Tensor:
    """Return the values whose transform is ``y``, in float32: ``x[r] = sum of y[c] * T[r, c]``.

    Args:
        y: ``[..., 16, K]``, float32.
        signs: as for :func:`transform`.
    """
    return _butterfly(y * 0.25) * _signs(y, signs)


def _signs(like: Tensor, signs: bool) -> Tensor:
    """Return the signs as float32 ``[16, 1]``."""
    # computed: a constant tensor is lost in a nested_compile_region (torch 2.13)
    bit = torch.arange(BLOCK, dtype=torch.int32, device=like.device).unsqueeze(1)
    return (1 - 2 * ((SIGN_MASK if signs else 0) >> bit & 1)).float()


def _butterfly(x: Tensor) -> Tensor:
    """Return ``sum over r of (-1)**popcount(r & c) * x[r]`` for each ``c`` of axis -2.

    Two rounds at a time: Inductor stores what comes out of a stack, and compiles one of 16 slowly.
    """
    fours: Tensor = x.unflatten(-2, (4, 4))
    for axis in (-2, -3):
        a, b, c, d = fours.unbind(axis)
        a, b, c, d = a + b, a - b, c + d, c - d
        fours = torch.stack((a + c, b + d, a - c, b - d), axis)
    return fours.flatten(-3, -2)
