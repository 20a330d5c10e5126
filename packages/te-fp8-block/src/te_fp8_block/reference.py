# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 in plain torch: the definition of the format, obeyed by kernels bit for bit.

Pure functions of tensors and plain options. They run on any device, take any shape and strides and
trace with dynamic sizes; under ``torch.compile`` they are ordinary operations that fuse with their
neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_fp8_block.layout import BLOCK, SCALE_MULTIPLE, matrix_shape, transposed
from te_proto.blocks import round_up
from te_proto.graphs import is_compiling
from te_proto.numerics import (
    decode,
    element_format,
    encode,
    magnitudes,
    materialize,
    round_to,
)

_SIGN_AND_EXPONENT = -0x800000
"""These bits of a float32, as an int32."""


def quantize(
    x: Tensor,
    *,
    dtype: str,
    rowwise: bool,
    columnwise: bool,
    two_d: bool,
    pow_2: bool,
    amax_epsilon: float,
) -> dict[str, Tensor]:
    """Return the buffers of ``x``, present planes only, in canonical order.

    A code is ``x * block_scale(amax)``, rounded once to float32 and once to the element, where it
    saturates. NaN is ignored in ``amax`` and becomes ``0x7F``, ``-0.0`` becomes ``0x80``. A block
    with infinity has scale 1, so its finite elements are cast as they are. What a ragged block
    lacks counts as zero.

    Args:
        x: any shape and strides, float32, bfloat16 or float16, any device.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        rowwise: make the plane with one scale per 128 elements of a row.
        columnwise: make the transposed plane, with one scale per 128 rows of a column.
        two_d: one scale per 128x128 block; each plane is then the transpose of the other.
        pow_2: round ``scale`` down to a power of two.
        amax_epsilon: smallest ``amax`` that a block counts with, in the unit of ``x``.

    Returns:
        ``rowwise_data``, ``rowwise_scale_inv``, ``columnwise_data`` and ``columnwise_scale_inv``
        as :func:`te_fp8_block.layout.buffer_shapes` says. Scale padding is zero.

    Source:
        TransformerEngine, ``common/transpose/quantize_transpose_square_blockwise.cu``,
        ``quantize_transpose_vector_blockwise.cu`` and ``common/recipe/recipe_common.cuh``.
    """
    m, k = matrix_shape(x.shape)
    matrix = x.reshape(m, k)
    on = {"rowwise": rowwise, "columnwise": columnwise}
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    buffers: dict[str, Tensor] = {}
    for plane in (plane for plane in on if on[plane]):
        columns = plane == "columnwise"
        block = block_of(columnwise=columns, two_d=two_d)
        if block not in made:
            made[block] = _quantize_matrix(matrix, block, dtype, pow_2, amax_epsilon)
        codes, scale_inv = made[block]
        data = transpose_codes(codes) if columns else codes.contiguous()
        buffers[f"{plane}_data"] = data.reshape(transposed(x.shape) if columns else x.shape)
        buffers[f"{plane}_scale_inv"] = store_scale(scale_inv, columnwise=columns, two_d=two_d)
    return buffers


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    shape: tuple[int, ...],
    *,
    dtype: str,
    columnwise: bool,
    two_d: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the values that one plane stands for, in the logical shape.

    ``code * scale_inv``, rounded once to float32 and once to ``out_dtype``.

    Args:
        data: uint8 codes, those of the columnwise plane transposed; any strides.
        scale_inv: the plane's scale buffer, padded.
        shape: logical shape.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        columnwise: which plane the two buffers are.
        two_d: one scale per 128x128 block.
        out_dtype: float32, bfloat16 or float16.
    """
    if 0 in shape:  # torch calls every stride of an empty tensor contiguous
        return data.new_empty(shape, dtype=out_dtype)
    m, k = matrix_shape(shape)
    codes = data.reshape(k, m).t() if columnwise else data.reshape(m, k)
    if columnwise and is_compiling():
        # with this Inductor decodes along rows, twice as fast
        codes = codes.contiguous().as_strided((m, k), (k, 1))
    if is_compiling() and columnwise == two_d:
        # cut later: to cut what may have no padding would guard on whether there is
        scale = scale_inv.t()
    else:
        scale = compact_scale(scale_inv, m, k, columnwise=columnwise, two_d=two_d)
    values = _times(decode(codes, dtype), scale, block_of(columnwise=columnwise, two_d=two_d))
    return round_to(values, out_dtype).contiguous().reshape(shape)


def transpose_codes(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes, in memory of its own."""
    if is_compiling():
        # Inductor stores what is strided anew before it is transposed; to encode along columns is
        # slower by far. And it removes a clone that changes no layout, but not x | 0.
        m, k = codes.shape
        turned = codes.contiguous().as_strided((k, m), (1, k)).bitwise_or(0)
    else:
        turned = codes.t()
    return turned.clone(memory_format=torch.contiguous_format)


def columnwise_scale(scale_inv: Tensor, m: int, k: int) -> Tensor:
    """Return the columnwise scale buffer of 128x128 blocks from the rowwise one."""
    scale = compact_scale(scale_inv, m, k, columnwise=False, two_d=True)
    return store_scale(scale, columnwise=True, two_d=True)


def block_scale(
    amax: Tensor, *, dtype: str, largest: float, pow_2: bool, amax_epsilon: float
) -> Tensor:
    """Return the float32 ``scale`` of blocks with these maxima.

    It is ``max(dtype) / max(amax, amax_epsilon)``, rounded once; 1 where ``amax`` is 0 or infinite.

    Args:
        amax: float32, not NaN.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        largest: what an infinite quotient becomes: the largest number of the input's dtype.
        pow_2: round down to a power of two.
        amax_epsilon: smallest ``amax`` to count with.

    Source:
        TransformerEngine, ``compute_scale_from_types`` of ``common/recipe/recipe_common.cuh``.
    """
    amax = amax.clamp_min(amax_epsilon)
    # a number divided by a tensor would be a product with its reciprocal, rounded twice
    scale = torch.full_like(amax, element_format(dtype).max) / amax
    scale = torch.where(scale == math.inf, largest, scale)
    if pow_2:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    return torch.where((amax == 0.0) | (amax == math.inf), 1.0, scale)


def block_of(*, columnwise: bool, two_d: bool) -> tuple[int, int]:
    """Return how many rows and columns of the logical matrix share a scale."""
    if two_d:
        return BLOCK, BLOCK
    return (BLOCK, 1) if columnwise else (1, BLOCK)


def store_scale(scale: Tensor, *, columnwise: bool, two_d: bool) -> Tensor:
    """Return the padded buffer of the scales ``[down, across]`` of a matrix's blocks."""
    ordered = scale.t() if columnwise == two_d else scale
    # dense before it is padded: with nothing to add, pad keeps the strides, unlike its fake
    dense = ordered.clone(memory_format=torch.contiguous_format)
    return pad(dense, (0, round_up(dense.shape[1], SCALE_MULTIPLE) - dense.shape[1]))


def compact_scale(scale_inv: Tensor, m: int, k: int, *, columnwise: bool, two_d: bool) -> Tensor:
    """Return the scales ``[down, across]`` of an ``[m, k]`` matrix's blocks, without padding."""
    # narrow, as a torch without CUDA does not index a fake CUDA tensor
    rows, columns = block_of(columnwise=columnwise, two_d=two_d)
    down, across = (m + rows - 1) // rows, (k + columns - 1) // columns
    if columnwise == two_d:  # stored transposed
        return scale_inv.narrow(1, 0, down).t()
    width = round_up(across, SCALE_MULTIPLE)
    return scale_inv.reshape(down, width).narrow(1, 0, across)


def _quantize_matrix(
    matrix: Tensor, block: tuple[int, int], dtype: str, pow_2: bool, amax_epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return codes of the shape of ``matrix`` and ``scale_inv`` of its blocks."""
    scale = materialize(
        block_scale(
            _whole_blocks(magnitudes(matrix), block).amax((1, 3)).float(),
            dtype=dtype,
            largest=torch.finfo(matrix.dtype).max,
            pow_2=pow_2,
            amax_epsilon=amax_epsilon,
        )
    )
    codes = encode(_times(matrix.to(torch.float32, copy=True), scale, block), dtype)
    return codes, torch.ones_like(scale) / scale


def _whole_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Return ``[down, rows, across, columns]``, a ragged edge filled up.

    With zeros, or, in a graph, with copies of the last row: no maximum rises by them, and Inductor
    would load rows behind a mask element by element.
    """
    (m, k), (rows, columns) = matrix.shape, block
    bottom, right = round_up(m, rows) - m, round_up(k, columns) - k
    if is_compiling():
        if rows > 1:
            row = torch.arange(m + bottom, device=matrix.device).clamp_max(m - 1)
            matrix = matrix.index_select(0, row)
        matrix = pad(matrix, (0, right))
    elif bottom or right:
        matrix = pad(matrix, (0, right, 0, bottom))
    return matrix.reshape((m + bottom) // rows, rows, (k + right) // columns, columns)


def _times(matrix: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the float32 ``matrix``, whose memory may be used, times the scale of each block."""
    (m, k), (rows, columns) = matrix.shape, block
    factor = scale[:, None, :, None]
    if is_compiling():
        spread = factor.expand(-1, rows, -1, columns).flatten(2).flatten(0, 1)
        return matrix * spread[:m, :k]
    return _whole_blocks(matrix, block).mul_(factor).flatten(2).flatten(0, 1)[:m, :k]
