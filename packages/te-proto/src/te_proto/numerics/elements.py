# SPDX-License-Identifier: Apache-2.0
"""E4M3, E5M2 and E2M1 codes of float32 values, and back.

Two formulations give the same bits. Eager code gets torch's own float8 cast, since every integer
step would be a pass over memory. A compiled graph gets integers, for Inductor makes a scalar loop
of the cast or, on sm_80, refuses it; but on a CPU with AVX-512, where it has vector code for it,
the cast. The choice is made when the graph is traced.
No uint8 is compared in order: Inductor's AVX2 code of torch 2.13 gets ``uint8 > scalar`` wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from te_proto._compat import is_compiling
from te_proto.errors import DtypeError, QuantizerError, ShapeError
from te_proto.numerics.formats import E2M1, E4M3, E5M2, ElementFormat, element_format
from te_proto.numerics.loops import on_avx512, single_vectors
from te_proto.numerics.slabs import is_plain_cpu

_FLOAT32_MANTISSA = 23
_FLOAT32_BIAS = 127
_FLOAT32_INF = 0x7F800000
_TABLE = 256


def encode_e4m3(x: Tensor) -> Tensor:
    """Return the E4M3 code of each element, rounded to nearest, ties to the even code.

    Everything beyond 448, infinities included, becomes +-448; a NaN of either sign becomes 0x7F
    and -0.0 becomes 0x80.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.

    Returns:
        uint8 of the shape of ``x``.

    Raises:
        DtypeError: ``x`` has another dtype.
    """
    return _encode(x, E4M3)


def encode_e5m2(x: Tensor) -> Tensor:
    """Return the E5M2 code of each element, rounded to nearest, ties to the even code.

    Everything beyond 57344, infinities included, becomes +-57344, never an infinity; a NaN of
    either sign becomes 0x7F and -0.0 becomes 0x80.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.

    Returns:
        uint8 of the shape of ``x``.

    Raises:
        DtypeError: ``x`` has another dtype.
    """
    return _encode(x, E5M2)


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the E2M1 code of each element, 0 to 15, rounded to nearest, ties to the even code.

    Everything beyond 6 becomes +-6, NaN of either sign +6 (code 7), and -0.0 code 8: what the
    hardware conversion does.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.

    Returns:
        uint8 of the shape of ``x``, one code a byte; ``pack_e2m1`` makes two of it.

    Raises:
        DtypeError: ``x`` has another dtype.
    """
    # No bits here: Inductor reinterprets a vector element by element, through memory. Each of the
    # three is the code in its own range and above it in the others; halves go to the even code.
    x = as_float32(x, E2M1.name)
    magnitude = x.abs()
    code = torch.minimum((magnitude * 2.0).round_(), torch.round(magnitude).add_(2.0))
    code = torch.minimum(code, (magnitude * 0.5).round_().add_(4.0)).clamp_(max=E2M1.max_code)
    return e2m1_with_sign(code, x)


def e2m1_with_sign(code: Tensor, x: Tensor) -> Tensor:
    """Return uint8 E2M1 codes of float magnitude codes, with the sign of ``x`` and its NaN as +6.

    Args:
        code: float32, 0.0 to 7.0; it is written.
        x: float32 of the same shape.
    """
    if is_compiling():
        # Inductor takes a sign apart by bits
        negative = (x < 0.0) | (x.reciprocal() < 0.0)  # the second for -0.0
        code = torch.where(negative, code + 8.0, code)
        return torch.where(x == x, code, float(E2M1.nan_code)).to(torch.uint8)
    # eager comparisons cost ten times as much as arithmetic
    code = code.add_(4.0).sub_(torch.copysign(torch.full((), 4.0, device=x.device), x))
    return code.nan_to_num_(nan=float(E2M1.nan_code)).to(torch.uint8)


def encode(x: Tensor, name: str) -> Tensor:
    """Return the codes of ``x`` in the eight-bit element format called ``name``.

    Raises:
        QuantizerError: ``name`` is neither ``"e4m3"`` nor ``"e5m2"``.
    """
    return _encode(x, _eight_bit_format(name))


def decode_e4m3(codes: Tensor) -> Tensor:
    """Return the float32 values of uint8 E4M3 codes, exactly; 0x7F and 0xFF are NaN."""
    return _decode(codes, E4M3)


def decode_e5m2(codes: Tensor) -> Tensor:
    """Return the float32 values of uint8 E5M2 codes, exactly; 0x7C and 0xFC are infinities."""
    return _decode(codes, E5M2)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the float32 values of uint8 E2M1 codes, one of 0 to 15 in each byte."""
    # no bits, as in encode_e2m1: the magnitudes lie on three lines, each above the others in turn
    check_codes(codes, E2M1.name)
    wide = codes.to(torch.int32)
    code = (wide & 7).float()
    magnitude = torch.maximum(torch.maximum(code * 0.5, code - 2.0), code * 2.0 - 8.0)
    return torch.where(wide > 7, -magnitude, magnitude)


def decode(codes: Tensor, name: str) -> Tensor:
    """Return the float32 values of codes in the eight-bit element format called ``name``.

    Raises:
        QuantizerError: ``name`` is neither ``"e4m3"`` nor ``"e5m2"``.
    """
    return _decode(codes, _eight_bit_format(name))


def pack_e2m1(codes: Tensor) -> Tensor:
    """Return two E2M1 codes a byte: the element of even index in the low half.

    Args:
        codes: uint8 ``[..., K]`` of 0 to 15, ``K`` even.

    Returns:
        uint8 ``[..., K // 2]``.

    Raises:
        DtypeError: ``codes`` is not uint8.
        ShapeError: there is no last axis, or it is odd.
    """
    check_codes(codes, "e2m1")
    if codes.dim() == 0 or codes.shape[-1] % 2:
        msg = (
            "e2m1: the last axis of codes must be a multiple of 2 to be packed two a byte, "
            f"got shape {tuple(codes.shape)}; pad it with a zero first"
        )
        raise ShapeError(msg)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the E2M1 codes that ``pack_e2m1`` packed.

    Args:
        packed: uint8 ``[..., K // 2]``.

    Returns:
        uint8 ``[..., K]`` of 0 to 15.

    Raises:
        DtypeError: ``packed`` is not uint8.
        ShapeError: there is no last axis.
    """
    check_codes(packed, "e2m1")
    if packed.dim() == 0:
        msg = "e2m1: packed must have at least 1 axis, got shape (); give it one of size 1"
        raise ShapeError(msg)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def as_float8(codes: Tensor, name: str) -> Tensor:
    """Return uint8 codes of ``"e4m3"`` or ``"e5m2"`` as torch's dtype of the same bits."""
    return codes.view(_torch_dtype(element_format(name)))


def magnitudes(x: Tensor) -> Tensor:
    """Return ``|x|`` with NaN as 0, for a maximum; in float32, or in a graph in ``x``'s own dtype.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
    """
    if is_compiling():
        # exact in 16 bits too, at half the bytes; a vector of 16-bit numbers is compared quickly
        return x.abs().masked_fill_(x != x, 0.0)
    # eager code compares, and takes maxima of 16-bit numbers, ten times as slowly
    return x.abs().float().nan_to_num_(nan=0.0, posinf=math.inf)


def as_float32(x: Tensor, format_name: str) -> Tensor:
    """Return ``x`` in float32, exactly and without gradient, or raise DtypeError."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return x.detach().float()
    msg = (
        f"{format_name}: x must be float32, bfloat16 or float16, got {x.dtype}; "
        "convert it with x.float() first"
    )
    raise DtypeError(msg)


def check_codes(codes: Tensor, format_name: str) -> None:
    """Raise DtypeError unless ``codes`` is uint8."""
    if codes.dtype != torch.uint8:
        msg = f"{format_name}: codes must be uint8, got {codes.dtype}; view its bytes as uint8"
        raise DtypeError(msg)


def _eight_bit_format(name: str) -> ElementFormat:
    if name == "e4m3":
        return E4M3
    if name == "e5m2":
        return E5M2
    msg = f"a one-byte element format must be 'e4m3' or 'e5m2', got {name!r}; use one of these"
    raise QuantizerError(msg)


def _encode(x: Tensor, fmt: ElementFormat) -> Tensor:
    x = as_float32(x, fmt.name)
    return _encode_by_cast(x, fmt) if _casts(x) else _encode_by_bits(x, fmt)


def _casts(x: Tensor) -> bool:
    """Whether torch's float8 casts are the quickest way for ``x``."""
    return not is_compiling() or on_avx512(x)


def _torch_dtype(fmt: ElementFormat) -> torch.dtype:
    assert fmt.torch_dtype is not None
    dtype: torch.dtype = getattr(torch, fmt.torch_dtype)
    return dtype


def _encode_by_cast(x: Tensor, fmt: ElementFormat) -> Tensor:
    # The cast alone is not enough: up to torch 2.11 E4M3 does not saturate, E5M2 never does, and it
    # keeps the sign of a NaN. The two ways to drop that sign differ in speed, by 2 and 3 times.
    clamped = x.clamp(-fmt.max, fmt.max)
    if is_compiling():
        clamped = torch.where(x == x, clamped, math.nan)
    else:
        clamped = clamped.nan_to_num_(nan=math.nan)
    return single_vectors(clamped.to(_torch_dtype(fmt))).view(torch.uint8)


def _encode_by_bits(x: Tensor, fmt: ElementFormat) -> Tensor:
    shift = _FLOAT32_MANTISSA - fmt.mantissa_bits
    rebias = (_FLOAT32_BIAS - fmt.bias) << _FLOAT32_MANTISSA
    clamped = x.clamp(-fmt.max, fmt.max)
    bits = clamped.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF

    # Normal range: half an ulp less one, plus one where the code would be odd, rounds ties to
    # even, and a carry out of the mantissa raises the exponent.
    odd = (magnitude >> shift) & 1
    normal = (magnitude + odd + ((1 << (shift - 1)) - 1 - rebias)) >> shift

    # Below it codes count the smallest subnormal, and the product with a power of two is exact.
    # Float32 subnormals, flushed or not, give 0.
    absolute = clamped.abs()
    subnormal = torch.round(absolute * (1.0 / fmt.min_subnormal)).to(torch.int32)

    sign = (bits >> (31 - fmt.sign_bit)) & (1 << fmt.sign_bit)
    code = torch.where(absolute < fmt.min_normal, subnormal, normal) | sign
    return torch.where(x == x, code, fmt.nan_code).to(torch.uint8)


def _decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    check_codes(codes, fmt.name)
    if is_plain_cpu(codes) and codes.numel() > _TABLE:
        every = torch.arange(_TABLE, dtype=torch.uint8)
        values = every.view(_torch_dtype(fmt)).float()
        return values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    if _casts(codes):
        return codes.view(_torch_dtype(fmt)).float()
    return _decode_by_bits(codes, fmt)


def _decode_by_bits(codes: Tensor, fmt: ElementFormat) -> Tensor:
    shift = _FLOAT32_MANTISSA - fmt.mantissa_bits
    rebias = (_FLOAT32_BIAS - fmt.bias) << _FLOAT32_MANTISSA
    wide = codes.to(torch.int32)
    magnitude = wide & fmt.nan_code

    normal = (magnitude << shift) + rebias
    subnormal = (magnitude.float() * fmt.min_subnormal).view(torch.int32)
    bits = torch.where(magnitude < 1 << fmt.mantissa_bits, subnormal, normal)
    if fmt.max_code != fmt.nan_code:
        # A zero mantissa above the largest finite code is E5M2's infinity, any other is a NaN.
        mantissa = (magnitude << shift) & ((1 << _FLOAT32_MANTISSA) - 1)
        bits = torch.where(magnitude > fmt.max_code, mantissa | _FLOAT32_INF, bits)

    # -2**31 is the sign bit of an int32, which has no positive literal
    bits = torch.where((wide >> fmt.sign_bit) > 0, bits | -(2**31), bits)
    return bits.view(torch.float32)
