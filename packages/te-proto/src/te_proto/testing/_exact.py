# SPDX-License-Identifier: Apache-2.0
"""Small float formats in numpy, with the rounding and the NaN rules of NVIDIA hardware.

Values are float32 or float64 arrays, codes are unsigned integers of the format's width. Every
encode rounds once, from the exact value it is given. NaN becomes the one NaN the hardware writes,
whatever its sign and payload. Overflow saturates in the 4-, 6- and 8-bit formats and gives infinity
in fp16 and bf16.

This is the arithmetic under the interpreter and the PTX emulator; it imports neither torch nor
triton.

Source: PTX ISA, ``cvt``, ``fma``, ``max``; OCP OFP8 v1.0; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

Array = NDArray[Any]

F32_NAN = np.uint32(0x7FFFFFFF)
"""The NaN that every float32 instruction of the GPU returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFloat:
    """A sign, exponent and mantissa format of at most 16 bits.

    Attributes:
        bits: width of a code.
        mantissa: stored mantissa bits.
        bias: exponent bias; ``1 - bias`` is the exponent of the smallest normal number.
        largest: code of the largest finite number.
        overflow: code that a larger magnitude becomes: ``largest``, or infinity.
        nan: code of NaN, without a sign.
    """

    bits: int
    mantissa: int
    bias: int
    largest: int
    overflow: int
    nan: int

    @property
    def emin(self) -> int:
        return 1 - self.bias


FP16 = SmallFloat(bits=16, mantissa=10, bias=15, largest=0x7BFF, overflow=0x7C00, nan=0x7FFF)
BF16 = SmallFloat(bits=16, mantissa=7, bias=127, largest=0x7F7F, overflow=0x7F80, nan=0x7FFF)
E4M3 = SmallFloat(bits=8, mantissa=3, bias=7, largest=0x7E, overflow=0x7E, nan=0x7F)
E5M2 = SmallFloat(bits=8, mantissa=2, bias=15, largest=0x7B, overflow=0x7B, nan=0x7F)
# E2M1 has no NaN: the hardware writes +6
E2M1 = SmallFloat(bits=4, mantissa=1, bias=1, largest=0x7, overflow=0x7, nan=0x7)


def encode(value: Array, to: SmallFloat, *, toward_zero: bool = False) -> Array:
    """Return the codes of ``value``, rounded to nearest even, or toward zero.

    Args:
        value: float32 or float64, any shape.
        to: the format of the codes.
        toward_zero: truncate; a finite overflow then becomes the largest finite number.

    Returns:
        uint8 or uint16 of the shape of ``value``; E2M1 uses the low four bits.
    """
    if to is BF16 and value.dtype == np.float32 and not toward_zero:
        return _encode_bf16(value)
    wide = np.asarray(value, np.float64)
    magnitude = np.abs(wide)
    nan, infinite = np.isnan(wide), np.isinf(wide)
    finite = np.where(nan | infinite, 0.0, magnitude)

    # 2**exponent <= finite < 2**(exponent + 1); below the smallest normal the step stops shrinking
    exponent = np.maximum(np.frexp(finite)[1] - 1, to.emin)
    exponent = np.where(finite == 0, to.emin, exponent)  # frexp gives 0 for 0
    steps = np.ldexp(finite, to.mantissa - exponent)
    steps = np.floor(steps) if toward_zero else np.rint(steps)

    # codes are consecutive: one step is one code, one binade is 2**mantissa codes, and a carry out
    # of the mantissa lands on the next binade by itself; the subnormals start at exponent emin,
    # code 0
    code = steps.astype(np.int64) + ((exponent - to.emin).astype(np.int64) << to.mantissa)
    overflow = to.largest if toward_zero else to.overflow
    code = np.where(code > to.largest, overflow, code)
    code = np.where(infinite, to.overflow, code)
    code |= np.signbit(wide).astype(np.int64) << (to.bits - 1)
    return np.where(nan, to.nan, code).astype(np.uint16 if to.bits > 8 else np.uint8)


def _encode_bf16(value: Array) -> Array:
    bits = np.ascontiguousarray(value).view(np.uint32).reshape(value.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(BF16.nan), rounded.astype(np.uint16))


def decode(code: Array, source: SmallFloat) -> Array:
    """Return the float32 values of ``code``, exact; NaN becomes the canonical float32 NaN.

    BF16 is the exception: it widens by a shift, as on the GPU, and keeps sign and payload of NaN.
    """
    code = np.asarray(code)
    if source is BF16:
        wide = code.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    if source is FP16:
        return canonical_nan(code.view(np.float16).astype(np.float32))
    index = code.view(np.uint8) & np.uint8((1 << source.bits) - 1)
    return np.asarray(_TABLES[source][index])


def _table(of: SmallFloat) -> Array:
    codes = np.arange(1 << of.bits)
    magnitude = codes & ((1 << (of.bits - 1)) - 1)
    field, mantissa = magnitude >> of.mantissa, magnitude & ((1 << of.mantissa) - 1)
    implicit = np.where(field > 0, 1 << of.mantissa, 0)
    exponent = np.maximum(field, 1) - of.bias - of.mantissa
    value = np.ldexp((implicit + mantissa).astype(np.float32), exponent.astype(np.int32))
    # above the largest number comes infinity, if the format has it, then NaN
    infinity = of is E5M2
    value = np.where(magnitude > of.largest, np.float32(np.inf) if infinity else np.nan, value)
    value = np.where(magnitude > of.largest + infinity, np.nan, value).astype(np.float32)
    value = np.where(codes >> (of.bits - 1) == 1, -value, value)
    return canonical_nan(value)


def canonical_nan(value: Array) -> Array:
    """Return float32 ``value`` with every NaN replaced by the one the GPU writes."""
    nan = np.isnan(value)
    return np.where(nan, F32_NAN.view(np.float32), value) if nan.any() else value


_TABLES = {of: _table(of) for of in (E4M3, E5M2, E2M1)}


def encode_e8m0(value: Array, *, up: bool) -> Array:
    """Return the E8M0 bytes of float32 ``value``: round up, or toward zero.

    As ``cvt.{rp,rz}.satfinite.ue8m0x2.f32``: the sign is dropped, infinity and what rounds above
    ``2**127`` give 254, NaN gives 255, and 0 is the byte of everything up to ``2**-127``.
    """
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).reshape(np.shape(value))
    exponent = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int64)
    mantissa = bits & np.uint32(0x7FFFFF)
    # 2**-127 is the float32 subnormal 0x400000, byte 0; above it round-up gives 1
    inexact = np.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = np.minimum(exponent + (inexact if up else 0), 254)
    return np.where(np.isnan(value), 255, code).astype(np.uint8)


def decode_e8m0(code: Array) -> Array:
    """Return ``2**(code - 127)`` as float32; 255 is NaN."""
    exponent = np.minimum(np.asarray(code).astype(np.int32), 254) - 127
    wide = np.ldexp(np.float32(1.0), exponent)
    return np.where(code == 255, F32_NAN.view(np.float32), wide.astype(np.float32))


def fma(x: Array, y: Array, z: Array) -> Array:
    """Return ``x * y + z`` as a float64 from which any narrower type is rounded right.

    The inputs are float32 or narrower. The product of two float32 is exact in float64. Their sum
    with ``z`` is rounded to odd, which keeps the information a second rounding to at most 51 bits
    needs.
    """
    x, y, z = (np.asarray(v, np.float64) for v in np.broadcast_arrays(x, y, z))
    product = x * y
    total = product + z
    # TwoSum: product + z == total + error, exactly
    rest = total - product
    error = (product - (total - rest)) + (z - rest)
    bits = np.ascontiguousarray(total).view(np.int64).reshape(total.shape)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, (bits + toward).view(np.float64), total)


def extremum(a: Array, b: Array, *, largest: bool, propagate_nan: bool) -> Array:
    """Return the PTX ``max`` or ``min``: NaN loses unless it propagates, -0.0 is below +0.0."""
    plain: Callable[[Array, Array], Array]
    if propagate_nan:
        plain = np.maximum if largest else np.minimum
    else:
        plain = np.fmax if largest else np.fmin
    out = plain(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        negative = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
        zero = np.where(negative, -0.0, 0.0).astype(out.dtype)
        out = np.where(zeros, zero, out)
    return out


def to_integer(value: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``value`` truncated to an integer type, saturated as PTX ``cvt.rzi`` does.

    NaN gives 0. The narrowest conversion is to 16 bits; an 8-bit result is its low byte.
    """
    kind = "u" if dtype.kind == "u" else "i"
    width = np.dtype(f"{kind}{max(dtype.itemsize, 2)}")
    low, high = np.iinfo(width).min, np.iinfo(width).max
    wide = np.trunc(np.asarray(value, np.float64))
    # float64 cannot hold the largest 64-bit integers, so compare before converting
    inside = np.where((wide >= low) & (wide < float(high)), wide, 0.0).astype(width)
    out = np.where(wide >= float(high), high, np.where(wide < low, low, inside)).astype(width)
    return np.where(np.isnan(wide), width.type(0), out).astype(dtype)
