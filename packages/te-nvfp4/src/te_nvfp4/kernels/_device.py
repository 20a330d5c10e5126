# SPDX-License-Identifier: Apache-2.0
"""Device functions of several kernels of this folder.

Blocks ``[R, C]`` are tiles of a plane: the axis that is cut into blocks of 16 is the last one, so a
columnwise plane is worked on transposed. Arithmetic is that of ``te_nvfp4.reference``, one rounding
an operation; the launchers turn contraction off.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def magnitude(x):
    """Magnitudes without NaN, which the maximum with 0 drops."""
    return tl.maximum(tl.abs(x), 0.0)


@triton.jit
def _signs(C: tl.constexpr, MASK: tl.constexpr):
    bit = tl.full((C,), MASK, tl.int32) >> (tl.arange(0, C) & 15)
    return (1 - 2 * (bit & 1)).to(tl.float32)[None, :]


@triton.jit
def _round(x, H: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (R * C // (2 * H), 2, H)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (R, C))


@triton.jit
def _butterfly(x, R: tl.constexpr, C: tl.constexpr):
    x = _round(_round(x, 1, R, C), 2, R, C)
    return _round(_round(x, 4, R, C), 8, R, C)


@triton.jit
def transform(x, R: tl.constexpr, C: tl.constexpr, MASK: tl.constexpr):
    """The Hadamard transform of each 16 of a line of float32, rounded to bfloat16, in float32."""
    y = _butterfly(x * (_signs(C, MASK) * 0.25), R, C)
    return y.to(tl.bfloat16).to(tl.float32)


@triton.jit
def transform_back(y, R: tl.constexpr, C: tl.constexpr, MASK: tl.constexpr):
    """The inverse of ``transform``, but for its rounding."""
    return _butterfly(y * 0.25, R, C) * _signs(C, MASK)
