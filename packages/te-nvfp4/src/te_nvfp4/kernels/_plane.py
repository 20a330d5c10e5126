# SPDX-License-Identifier: Apache-2.0
"""One tile of one NVFP4 plane: from values to codes and scales.

Computes  what te_nvfp4.reference._encode does, bit for bit.
Takes     ``x`` float32 ``[R, C]``, ``amax`` float32 ``[R, 1]`` or ``[1, 1]``.
Gives     E4M3 codes ``[R, C // 16]`` and packed E2M1 codes ``[R, C // 2]``, uint8.
FLOAT8    float32 is converted to E4M3 by the instruction of sm_89 and later.
FLOAT4    to E2M1 by that of sm_100 and later; both give the bits of the integer code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_nvfp4.kernels._device import FLT_MAX, magnitude
from te_proto.numerics.device import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    encode_pack_e2m1,
    pack_e2m1,
)


@triton.jit
def tensor_scales(amax, SIX_E: tl.constexpr):
    """What maps ``amax`` to 6 * e4m3_max, and its inverse."""
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, SIX_E, tl.float32), amax), FLT_MAX)
    encode = tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)
    return encode, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)


@triton.jit
def block_amax(x, R: tl.constexpr, C: tl.constexpr, TWO_D: tl.constexpr):
    """The largest magnitude of each block; of a 16x16 block once a line."""
    amax = tl.max(tl.reshape(magnitude(x), (R, C // 16, 16)), axis=2)
    if TWO_D:
        lines = tl.reshape(amax, (R // 16, 16, C // 16))
        tiles = tl.max(lines, axis=1)[:, None, :]
        amax = tl.reshape(tl.broadcast_to(tiles, (R // 16, 16, C // 16)), (R, C // 16))
    return amax


@triton.jit
def scale_blocks(scale_inv, decode, FLOAT8: tl.constexpr):
    """E4M3 codes and what multiplies the elements under each."""
    code = encode_e4m3(scale_inv, FLOAT8)
    product = decode_e4m3(code) * decode
    inverse = tl.div_rn(tl.full(product.shape, 1.0, tl.float32), product)
    return code, tl.minimum(inverse, FLT_MAX)


@triton.jit
def nearest(
    x,
    amax,
    R: tl.constexpr,
    C: tl.constexpr,
    SIX_E: tl.constexpr,
    TWO_D: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Scale codes, and the elements as E2M1 has to round them, ``[R, C // 16, 16]``."""
    encode, decode = tensor_scales(amax, SIX_E)
    SIXTH: tl.constexpr = 1.0 / 6.0
    code, multiplier = scale_blocks(block_amax(x, R, C, TWO_D) * (encode * SIXTH), decode, FLOAT8)
    return code, tl.reshape(x, (R, C // 16, 16)) * multiplier[:, :, None]


@triton.jit
def pack_nearest(values, R: tl.constexpr, C: tl.constexpr, FLOAT4: tl.constexpr):
    even, odd = tl.split(tl.reshape(values, (R, C // 2, 2)))
    return encode_pack_e2m1(even, odd, FLOAT4)


# -- stochastic rounding ---------------------------------------------------------------------------


@triton.jit
def random_bytes(rng_ptr, number, R: tl.constexpr, C: tl.constexpr, PLANE: tl.constexpr):
    """16 bytes of one Philox draw for each block, int32 ``[R, C // 16, 16]``."""
    seed = tl.load(rng_ptr)
    offset = tl.load(rng_ptr + 1)
    zero = (number * 0).to(tl.int32)
    c0 = zero + (offset & 0xFFFFFFFF).to(tl.int32)
    c1 = zero + (offset >> 32).to(tl.int32)
    c3 = (number >> 32).to(tl.int32)
    if PLANE:
        c3 = c3 | -0x80000000
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, number.to(tl.int32), c3)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (R, C // 16, 4, 1))
    shift = tl.reshape(tl.arange(0, 4) * 8, (1, 1, 1, 4)).to(tl.uint32)
    return tl.reshape(((words >> shift) & 0xFF).to(tl.int32), (R, C // 16, 16))


@triton.jit
def pack_stochastic(values, bits, R: tl.constexpr, C: tl.constexpr):
    amount = tl.abs(values)
    step = tl.where(amount >= 4.0, 2.0, tl.where(amount >= 2.0, 1.0, 0.5))
    # beyond 6 all is one code, and an infinity is no integer
    moved = tl.minimum(amount + bits.to(tl.float32) * (1.0 / 256.0) * step, 8.0)
    # each of the three is the code in its own range and above it in the others
    code = tl.minimum((moved * 2.0).to(tl.int32), moved.to(tl.int32) + 2)
    code = tl.minimum(tl.minimum(code, (moved * 0.5).to(tl.int32) + 4), 7)
    code = code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)
    code = tl.where(values != values, 7, code).to(tl.uint8)
    even, odd = tl.split(tl.reshape(code, (R, C // 2, 2)))
    return pack_e2m1(even, odd)


# -- 4over6 ----------------------------------------------------------------------------------------


@triton.jit
def _sum_in_order(e, R: tl.constexpr, B: tl.constexpr):
    """The sum over 16 elements, one after the other."""
    a, b = tl.split(tl.reshape(e, (R, B, 8, 2)))  # even, odd
    aa, ab = tl.split(tl.reshape(a, (R, B, 4, 2)))
    ba, bb = tl.split(tl.reshape(b, (R, B, 4, 2)))
    aaa, aab = tl.split(tl.reshape(aa, (R, B, 2, 2)))
    aba, abb = tl.split(tl.reshape(ab, (R, B, 2, 2)))
    baa, bab = tl.split(tl.reshape(ba, (R, B, 2, 2)))
    bba, bbb = tl.split(tl.reshape(bb, (R, B, 2, 2)))
    e0, e8 = tl.split(aaa)
    e4, e12 = tl.split(aab)
    e2, e10 = tl.split(aba)
    e6, e14 = tl.split(abb)
    e1, e9 = tl.split(baa)
    e5, e13 = tl.split(bab)
    e3, e11 = tl.split(bba)
    e7, e15 = tl.split(bbb)
    total = e0 + e1 + e2 + e3 + e4 + e5 + e6 + e7
    return total + e8 + e9 + e10 + e11 + e12 + e13 + e14 + e15


@triton.jit
def _line(lines, number):
    """One of the lines of each 16x16 block, by a sum in which all others are zero."""
    here = tl.arange(0, 16)[None, :, None] == number
    return tl.sum(tl.where(here, lines, 0.0), axis=1)


@triton.jit
def _sum_of_lines(e, R: tl.constexpr, B: tl.constexpr):
    """The sum over the 16 lines of each 16x16 block, 8, 4, 2 and 1 apart, once a line.

    Not by splits: they would spread their layout over all that comes before, and spill it.
    """
    x = tl.reshape(e, (R // 16, 16, B))
    s0 = (_line(x, 0) + _line(x, 8)) + (_line(x, 4) + _line(x, 12))
    s1 = (_line(x, 1) + _line(x, 9)) + (_line(x, 5) + _line(x, 13))
    s2 = (_line(x, 2) + _line(x, 10)) + (_line(x, 6) + _line(x, 14))
    s3 = (_line(x, 3) + _line(x, 11)) + (_line(x, 7) + _line(x, 15))
    e = (s0 + s2) + (s1 + s3)
    tiles = tl.reshape(e, (R // 16, 1, B))
    return tl.reshape(tl.broadcast_to(tiles, (R // 16, 16, B)), (R, B))


@triton.jit
def _candidate(
    x,
    scale_inv,
    amax,
    encode,
    decode,
    R: tl.constexpr,
    C: tl.constexpr,
    SIX_E: tl.constexpr,
    TWO_D: tl.constexpr,
    SQUARED: tl.constexpr,
    FAST: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    scale, multiplier = scale_blocks(scale_inv, decode, FLOAT8)
    elements = encode_e2m1(x * multiplier[:, :, None])
    product = decode_e2m1(elements) * decode_e4m3(scale)[:, :, None]
    if FAST:
        difference = product - x * encode[:, :, None]
    else:
        value = product * amax[:, :, None]
        difference = tl.div_rn(value, tl.full(value.shape, SIX_E, tl.float32)) - x
    error = _sum_in_order(difference * difference if SQUARED else tl.abs(difference), R, C // 16)
    if TWO_D:
        error = _sum_of_lines(error, R, C // 16)
    return scale, elements, error


@triton.jit
def four_over_six(
    x,
    amax,
    R: tl.constexpr,
    C: tl.constexpr,
    SIX_E: tl.constexpr,
    TWO_D: tl.constexpr,
    SQUARED: tl.constexpr,
    FAST: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Scale codes and packed element codes, of the scale that gives the smaller error."""
    encode, decode = tensor_scales(amax, SIX_E)
    largest = block_amax(x, R, C, TWO_D)
    base = tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)) * encode
    blocks = tl.reshape(x, (R, C // 16, 16))
    scale6, elements6, error6 = _candidate(
        blocks, base, amax, encode, decode, R, C, SIX_E, TWO_D, SQUARED, FAST, FLOAT8
    )
    scale4, elements4, error4 = _candidate(
        blocks, base * 1.5, amax, encode, decode, R, C, SIX_E, TWO_D, SQUARED, FAST, FLOAT8
    )
    better = error4 < error6
    elements = tl.where(better[:, :, None], elements4, elements6)
    even, odd = tl.split(tl.reshape(elements, (R, C // 2, 2)))
    return tl.where(better, scale4, scale6), pack_e2m1(even, odd)
