# SPDX-License-Identifier: Apache-2.0
"""The functions of ``te_proto.numerics`` for Triton kernels.

Computes  the same codes and values as the torch functions of the same names, bit for bit.
Takes     blocks of float32 (bfloat16 and float16 are converted, exactly) or of uint8 codes.
Gives     blocks of uint8 codes or float32.
HARDWARE  False: integers and one exact float add, for every target and the interpreter.
          True: the conversion instruction; from sm_89 for E4M3 and E5M2, from sm_100 for E2M1 and
          E8M0. The kernel's launcher decides, as a device function cannot ask for its target.
Numerics  no division, no exp2, no clamp of floats. The add in ``_encode`` takes an absolute value,
          so it is not contracted with a product of the caller.
Checked   tests/test_numerics_device.py, against the torch functions, and the PTX ahead of time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _encode(
    x,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
):
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    SIGN_BIT: tl.constexpr = EXPONENT_BITS + MANTISSA_BITS
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    NAN_CODE: tl.constexpr = (1 << SIGN_BIT) - 1
    MIN_NORMAL_BITS: tl.constexpr = (128 - BIAS) << 23
    # a power of two whose ulp is the format's smallest subnormal: adding it rounds to that grid
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA_BITS)
    MAGIC_BITS: tl.constexpr = (151 - BIAS - MANTISSA_BITS) << 23

    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF

    normal = (magnitude + ((1 << (SHIFT - 1)) - 1 - REBIAS) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    subnormal = (tl.abs(x) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS

    code = tl.where(magnitude < MIN_NORMAL_BITS, subnormal, normal)
    code = tl.minimum(code, MAX_CODE) | ((bits >> (31 - SIGN_BIT)) & (1 << SIGN_BIT))
    return tl.where(magnitude > 0x7F800000, NAN_CODE, code).to(tl.uint8)


@triton.jit
def _decode(
    codes,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
):
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    SIGN_BIT: tl.constexpr = EXPONENT_BITS + MANTISSA_BITS
    MAGNITUDE_MASK: tl.constexpr = (1 << SIGN_BIT) - 1
    MIN_SUBNORMAL: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA_BITS)

    wide = codes.to(tl.int32)
    magnitude = wide & MAGNITUDE_MASK

    normal = (magnitude << SHIFT) + ((127 - BIAS) << 23)
    subnormal = (magnitude.to(tl.float32) * MIN_SUBNORMAL).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < (1 << MANTISSA_BITS), subnormal, normal)
    if MAX_CODE != MAGNITUDE_MASK:
        # a zero mantissa above the largest finite code is E5M2's infinity, any other is a NaN
        special = ((magnitude << SHIFT) & 0x7FFFFF) | 0x7F800000
        bits = tl.where(magnitude > MAX_CODE, special, bits)

    sign = (wide >> SIGN_BIT) << 31
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x, HARDWARE: tl.constexpr = False):
    """E4M3 codes; from sm_89 HARDWARE converts two values at once."""
    if HARDWARE:
        # Not Triton's own cast: on sm_89 it goes through float16 before 3.9 and rounds twice.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,r,r,r,r",
            [x.to(tl.float32)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return _encode(x, EXPONENT_BITS=4, MANTISSA_BITS=3, BIAS=7, MAX_CODE=0x7E)


@triton.jit
def encode_e5m2(x, HARDWARE: tl.constexpr = False):
    """E5M2 codes, never an infinity; from sm_89 HARDWARE converts two values at once."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,r,r,r,r",
            [x.to(tl.float32)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return _encode(x, EXPONENT_BITS=5, MANTISSA_BITS=2, BIAS=15, MAX_CODE=0x7B)


@triton.jit
def encode(x, NAME: tl.constexpr, HARDWARE: tl.constexpr = False):
    """Codes of the eight-bit format NAME, "e4m3" or "e5m2"."""
    tl.static_assert(NAME == "e4m3" or NAME == "e5m2", "NAME must be 'e4m3' or 'e5m2'")
    if NAME == "e4m3":
        return encode_e4m3(x, HARDWARE)
    else:  # noqa: RET505
        return encode_e5m2(x, HARDWARE)


@triton.jit
def decode_e4m3(codes, HARDWARE: tl.constexpr = False):
    """Values of E4M3 codes; from sm_89 HARDWARE converts two codes at once."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return _decode(codes, EXPONENT_BITS=4, MANTISSA_BITS=3, BIAS=7, MAX_CODE=0x7E)


@triton.jit
def decode_e5m2(codes, HARDWARE: tl.constexpr = False):
    """Values of E5M2 codes; from sm_89 HARDWARE converts two codes at once."""
    if HARDWARE:
        return codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    return _decode(codes, EXPONENT_BITS=5, MANTISSA_BITS=2, BIAS=15, MAX_CODE=0x7B)


@triton.jit
def decode(codes, NAME: tl.constexpr, HARDWARE: tl.constexpr = False):
    """Values of codes of the eight-bit format NAME, "e4m3" or "e5m2"."""
    tl.static_assert(NAME == "e4m3" or NAME == "e5m2", "NAME must be 'e4m3' or 'e5m2'")
    if NAME == "e4m3":
        return decode_e4m3(codes, HARDWARE)
    else:  # noqa: RET505
        return decode_e5m2(codes, HARDWARE)


@triton.jit
def encode_e2m1(x):
    """E2M1 codes, one a byte; ``encode_pack_e2m1`` uses the instruction, which makes pairs."""
    return _encode(x, EXPONENT_BITS=2, MANTISSA_BITS=1, BIAS=1, MAX_CODE=7)


@triton.jit
def decode_e2m1(codes):
    """Values of E2M1 codes, one of 0 to 15 in each byte."""
    return _decode(codes, EXPONENT_BITS=2, MANTISSA_BITS=1, BIAS=1, MAX_CODE=7)


@triton.jit
def pack_e2m1(even, odd):
    """Bytes of two E2M1 codes: those of even index in the low half."""
    return even | (odd << 4)


@triton.jit
def unpack_e2m1(packed):
    """Codes of even and of odd index, as ``pack_e2m1`` took them."""
    return packed & 0xF, packed >> 4


@triton.jit
def encode_pack_e2m1(even, odd, HARDWARE: tl.constexpr = False):
    """Bytes of two E2M1 codes of the values ``even`` (low half) and ``odd``; HARDWARE: sm_100."""
    if HARDWARE:
        # cvt puts its first operand into the high half
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b8 byte0, byte1, byte2, byte3;
            cvt.rn.satfinite.e2m1x2.f32 byte0, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 byte1, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 byte2, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 byte3, $8, $4;
            mov.b32 $0, {byte0, byte1, byte2, byte3};
            }
            """,
            "=r,r,r,r,r,r,r,r,r",
            [even.to(tl.float32), odd.to(tl.float32)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return pack_e2m1(encode_e2m1(even), encode_e2m1(odd))


@triton.jit
def _encode_e8m0_hardware(x):
    # The second operand fills the low half. Nothing says what becomes of a sign: take it off.
    pair = tl.inline_asm_elementwise(
        "cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;",
        "=h,r",
        [tl.abs(x)],
        dtype=tl.int16,
        is_pure=True,
        pack=1,
    )
    return pair.to(tl.uint8)


@triton.jit
def encode_e8m0(x, HARDWARE: tl.constexpr = False):
    """Codes of the smallest power of two that is at least ``|x|``; HARDWARE: sm_100."""
    x = x.to(tl.float32)
    if HARDWARE:
        return _encode_e8m0_hardware(x)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = bits >> 23
    spill = tl.where(exponent > 0, bits & 0x7FFFFF, bits - 0x400000) > 0
    code = tl.minimum(exponent + spill.to(tl.int32), 254)
    return tl.where(bits > 0x7F800000, 255, code).to(tl.uint8)


@triton.jit
def e8m0_from_amax(amax, NAME: tl.constexpr, HARDWARE: tl.constexpr = False):
    """Codes of ``scale_inv`` for blocks of format NAME, "e4m3" or "e5m2"; HARDWARE: sm_100."""
    tl.static_assert(NAME == "e4m3" or NAME == "e5m2", "NAME must be 'e4m3' or 'e5m2'")
    MAX_EXPONENT: tl.constexpr = 8 if NAME == "e4m3" else 15
    amax = amax.to(tl.float32)
    if HARDWARE:
        # fl32(1/448) and fl32(1/57344), which differ by 2**-7
        RECIPROCAL: tl.constexpr = 0x924925 * 2.0 ** (-24 - MAX_EXPONENT)
        return _encode_e8m0_hardware(amax * RECIPROCAL)
    DROP: tl.constexpr = MAX_EXPONENT << 23
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = (bits + (0x1FFFFF - DROP)) >> 23
    # the one amax whose product lies above 2**-127 and rounds down to it, being subnormal there
    code = code - (bits == DROP + 0x600001).to(tl.int32)
    special = tl.where(bits > 0x7F800000, 255, 254)
    return tl.where(bits >= 0x7F800000, special, tl.maximum(code, 0)).to(tl.uint8)


@triton.jit
def _power_of_two(code):
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(codes):
    """Values ``2**(code - 127)``; 255 is NaN."""
    return _power_of_two(codes.to(tl.int32))


@triton.jit
def e8m0_reciprocal(codes):
    """Values ``2**(127 - code)``; 255 is NaN."""
    wide = codes.to(tl.int32)
    return _power_of_two(tl.where(wide == 255, 255, 254 - wide))


@triton.jit
def rowwise_scale_offset(row, block, blocks, SWIZZLED: tl.constexpr):
    """Byte offset of scale ``[row, block]``, int64; ``blocks`` is the padded count a row."""
    return _tiled(row, block, blocks // 4) if SWIZZLED else row * blocks + block


@triton.jit
def columnwise_scale_offset(block, col, blocks, cols, SWIZZLED: tl.constexpr):
    """Byte offset of scale ``[block, col]``, int64; ``blocks`` and ``cols`` are padded counts."""
    return _tiled(col, block, blocks // 4) if SWIZZLED else block * cols + col


@triton.jit
def _tiled(i, j, tiles):
    tile = (i // 128) * tiles + j // 4
    return tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
