# SPDX-License-Identifier: Apache-2.0
"""FP8 under one scale a tensor, in plain torch: the definition, which the kernels obey bit for bit.

Pure functions of tensors and plain options. They run on any device, take any shape and strides and
trace with dynamic sizes; under ``torch.compile`` they are ordinary operations that fuse with their
neighbours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from te_fp8_current.layout import matrix_shape, transpose_shape
from te_proto.graphs import is_compiling
from te_proto.numerics import (
    decode,
    element_format,
    encode,
    is_plain_cpu,
    magnitudes,
    materialize,
    round_to,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PART = 1 << 18
"""Elements whose intermediate results stay in a cache, and in memory that is used again."""

_FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT = -(1 << 23)  # 0xFF800000: all but the mantissa of a float32


def amax(x: Tensor, noop: Tensor | None = None) -> Tensor:
    """Return the largest magnitude of ``x``, float32 ``[1]``.

    NaN is ignored; a tensor without numbers, or without elements, has 0.

    Args:
        x: float32, bfloat16 or float16, any shape, device and strides.
        noop: one float32 element; exactly 1.0 says that nobody will use the result, which is 0.

    Source:
        ``amax_kernel`` of TransformerEngine, ``common/recipe/current_scaling.cu``.
    """
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    top = _amax_of_words(x) if _is_long(x) else magnitudes(x).amax()
    top = top.float().reshape(1)
    return top if noop is None else torch.where(noop.reshape(1) == 1.0, 0.0, top)


def scale_from_amax(
    amax: Tensor, *, dtype: str, force_pow_2_scales: bool, amax_epsilon: float
) -> Tensor:
    """Return the float32 scale that takes ``amax`` to the largest number of the element format.

    It multiplies before the cast; ``1 / scale`` is ``scale_inv``. An ``amax`` of zero, infinity or
    NaN has scale 1. Where the quotient would overflow it is the largest float32. A power of two is
    had by cutting the mantissa off, so that nothing saturates.

    Args:
        amax: float32, any shape.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: a smaller ``amax`` counts as this, zero included.

    Source:
        ``compute_scale_from_amax`` of TransformerEngine, ``common/recipe/recipe_common.cuh``.
    """
    amax = amax.clamp(min=amax_epsilon)  # keeps NaN
    # a number divided by a tensor would be its product with the reciprocal, rounded twice
    scale = (torch.full_like(amax, element_format(dtype).max) / amax).clamp(max=_FLT_MAX)
    if force_pow_2_scales:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    usable = (amax > 0.0) & (amax <= _FLT_MAX)
    return torch.where(usable, scale, 1.0)


def quantize(
    x: Tensor,
    amax: Tensor,
    *,
    dtype: str,
    force_pow_2_scales: bool,
    amax_epsilon: float,
    data: bool,
    transpose: bool,
) -> dict[str, Tensor]:
    """Return the buffers of ``x`` for a given maximum, present ones only, in canonical order.

    A code is the product of element and scale, rounded to nearest even; infinities and what passes
    the largest number saturate, NaN of either sign becomes ``0x7F`` and ``-0.0`` ``0x80``.

    Args:
        x: float32, bfloat16 or float16, any shape, device and strides, may be empty.
        amax: float32 ``[1]``, of ``x`` or of a group of tensors, see :func:`amax`.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        force_pow_2_scales: as for :func:`scale_from_amax`.
        amax_epsilon: as for :func:`scale_from_amax`.
        data: make the codes in the order of ``x``.
        transpose: make the codes with the last axis in front, the same ones.

    Returns:
        ``fp8_data``, uint8 of the shape of ``x``; ``data_transpose``, uint8; ``fp8_scale_inv``,
        float32 ``[1]``.

    Source:
        TransformerEngine, ``common/transpose/cast_transpose.cu``.
    """
    scale = scale_from_amax(
        amax, dtype=dtype, force_pow_2_scales=force_pow_2_scales, amax_epsilon=amax_epsilon
    )
    buffers: dict[str, Tensor] = {}
    if data or transpose:
        codes = _encode(x, materialize(scale), dtype)
        if data:
            buffers["fp8_data"] = codes
        if transpose:
            buffers["data_transpose"] = move_last_to_front(codes, alone=not data)
    buffers["fp8_scale_inv"] = torch.ones_like(scale) / scale
    return buffers


def dequantize(codes: Tensor, scale_inv: Tensor, *, dtype: str, out_dtype: torch.dtype) -> Tensor:
    """Return the values of ``codes``, in their order: a float32 product, rounded to ``out_dtype``.

    Args:
        codes: uint8, any shape and strides.
        scale_inv: float32 ``[1]``.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        out_dtype: float32, bfloat16 or float16.
    """
    scale_inv = scale_inv.reshape(())  # [1] would make a 0-d tensor 1-d
    if not _is_long(codes):
        return round_to(decode(codes, dtype) * scale_inv, out_dtype)
    # there are 256 values; to look them up is 4 times as fast as to convert each code
    every = torch.arange(256, dtype=torch.uint8, device=codes.device)
    values = (decode(every, dtype) * scale_inv).to(out_dtype)
    out = torch.empty(codes.shape, dtype=out_dtype, device=codes.device)
    for part, target in zip(_parts(codes), _parts(out), strict=True):
        torch.index_select(values, 0, part.int(), out=target)
    return out


def move_last_to_front(codes: Tensor, *, alone: bool = False) -> Tensor:
    """Return ``codes`` with the last axis in front, contiguous, in memory of their own.

    Args:
        codes: any dtype and shape; up to one axis the order stays.
        alone: nobody else keeps ``codes``.
    """
    m, k = matrix_shape(codes.shape)
    # as a matrix: a graph over three axes or more would be guarded on each of them
    moved = codes.reshape(m, k).t()
    if is_compiling():
        # Inductor removes a clone, and returns one buffer twice; x | 0 it computes
        moved = (moved if alone else moved.bitwise_or(0)).contiguous()
    else:
        moved = moved.clone(memory_format=torch.contiguous_format)
    return moved.reshape(transpose_shape(codes.shape))


def move_front_to_last(codes: Tensor, shape: Sequence[int]) -> Tensor:
    """Return transposed ``codes`` in the order of ``shape``, the inverse of the above."""
    m, k = matrix_shape(shape)
    moved = codes.reshape(k, m).t()
    return moved.clone(memory_format=torch.contiguous_format).reshape(shape)


def _amax_of_words(x: Tensor) -> Tensor:
    """Return the largest magnitude but NaN, in ``x``'s dtype; 20 times as fast as with floats.

    Magnitudes are ordered as their bits are, and NaN lies above infinity.
    """
    word = torch.int32 if x.dtype == torch.float32 else torch.int16
    infinity = int(torch.tensor(math.inf, dtype=x.dtype).view(word))
    tops = []
    for part in _parts(x):
        bits = part.view(word) & torch.iinfo(word).max
        top = bits.amax()
        if top > infinity:
            top = bits.masked_fill_(bits > infinity, 0).amax()
        tops.append(top)
    return torch.stack(tops).amax().view(x.dtype)


def _encode(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Return codes of ``x`` with the strides of a fresh tensor, also at axes of one element."""
    if not _is_long(x):
        codes = encode(x * scale, dtype).reshape(x.shape)
        return codes.clone(memory_format=torch.contiguous_format)
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for part, target in zip(_parts(x), _parts(out), strict=True):
        target.copy_(encode(part * scale, dtype))
    return out


def _is_long(x: Tensor) -> bool:
    """Whether eager code takes ``x`` in parts.

    On a CPU most time goes into fresh memory for intermediate results, if these are large. A graph
    has none, and a tensor that is elsewhere, or a fake one without data, is taken whole.
    """
    return is_plain_cpu(x) and x.is_contiguous() and x.numel() > _PART


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = x.view(-1).split(_PART)
    return parts
