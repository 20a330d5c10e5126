# SPDX-License-Identifier: Apache-2.0
"""MXFP8 in plain torch: the definition of the format, which the kernels obey bit for bit.

Pure functions of tensors and plain options. They run on any device, take any strides and trace with
dynamic sizes; under ``torch.compile`` they are ordinary operations that fuse with their neighbours.
Shapes are the caller's to check: the rowwise plane needs ``K % 32 == 0``, the columnwise plane
``M % 32 == 0``, ``two_d`` both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from te_mxfp8.layout import BLOCK, TILE_INNER, TILE_OUTER, matrix_shape, round_up
from te_proto.numerics import decode, decode_e8m0, e8m0_from_amax, e8m0_reciprocal, encode


def quantize(
    x: Tensor, *, dtype: str, rowwise: bool, columnwise: bool, two_d: bool, swizzled: bool
) -> dict[str, Tensor]:
    """Return the MXFP8 buffers of ``x``, present planes only, in canonical order.

    The scale of a block is the smallest power of two not below ``amax / max(dtype)``, so nothing
    saturates. NaN is ignored in ``amax`` and becomes ``0x7F``; a block of NaN alone has scale byte
    0, a block with infinity 254. A zero keeps its sign: ``-0.0`` becomes ``0x80``, as in the peer's
    generic kernel. Its specialised kernels for bfloat16 and float16 add ``+0.0`` in the scaling and
    are expected to emit ``0x00`` there; no other value differs.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16, any device and strides, may be empty.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        rowwise: make the plane with one scale per 32 elements of a row.
        columnwise: make the plane with one scale per 32 rows of a column, from ``x`` again.
        two_d: one scale per 32x32 block; both planes then hold the same codes.
        swizzled: store scales in the order of the GEMM, see :func:`swizzle`.

    Returns:
        uint8 ``rowwise_data``, ``rowwise_scale_inv``, ``columnwise_data`` and
        ``columnwise_scale_inv`` in the shapes of :func:`te_mxfp8.layout.buffer_shapes`. Scale
        padding is zero.

    Source:
        TransformerEngine, ``common/cast/mxfp8/quantize_mxfp8.cuh``.
    """
    m, k = matrix_shape(x.shape)
    tiles = _whole_tiles(x.reshape(m, k))
    rows, columns = tiles.shape
    planes: dict[str, tuple[Tensor, Tensor]] = {}
    if two_d:
        blocks = tiles.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        codes, scale = _quantize_blocks(blocks, (1, 3), dtype)
        data = _cut(codes.reshape(rows, columns), m, k)
        by_row = scale.unsqueeze(1).expand(-1, BLOCK, -1).reshape(rows, columns // BLOCK)
        by_column = scale.unsqueeze(2).expand(-1, -1, BLOCK).reshape(rows // BLOCK, columns)
        # A plane may be dropped or written in place, so it never shares memory with the other.
        # Inductor removes a clone, and returns one buffer twice; x | 0 it computes.
        copy = data.bitwise_or(0) if rowwise and columnwise else data
        planes = {"rowwise": (data, by_row), "columnwise": (copy, by_column)}
    if rowwise and not two_d:
        blocks = tiles.reshape(rows, columns // BLOCK, BLOCK)
        codes, scale = _quantize_blocks(blocks, (2,), dtype)
        planes["rowwise"] = _cut(codes.reshape(rows, columns), m, k), scale
    if columnwise and not two_d:
        blocks = tiles.reshape(rows // BLOCK, BLOCK, columns)
        codes, scale = _quantize_blocks(blocks, (1,), dtype)
        planes["columnwise"] = _cut(codes.reshape(rows, columns), m, k), scale

    buffers: dict[str, Tensor] = {}
    for plane, on in (("rowwise", rowwise), ("columnwise", columnwise)):
        if on:
            data, scale = planes[plane]
            buffers[f"{plane}_data"] = data.reshape(x.shape)
            if swizzled:
                scale = swizzle(scale, columnwise=plane == "columnwise")
            buffers[f"{plane}_scale_inv"] = scale
    return buffers


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    *,
    dtype: str,
    columnwise: bool,
    swizzled: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the values that one plane stands for, in the logical shape.

    ``code * 2**(scale_inv - 127)`` in float32, then rounded once to ``out_dtype``. The product is
    exact unless it falls below ``2**-149``. Scale byte 0 is ``2**-127``, 255 is NaN.

    Args:
        data: uint8 codes ``[..., K]``, any strides.
        scale_inv: the plane's uint8 scale buffer, padded.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        columnwise: which plane the two buffers are.
        swizzled: whether ``scale_inv`` is in the order of the GEMM.
        out_dtype: float32, bfloat16 or float16.
    """
    m, k = matrix_shape(data.shape)
    tiles = _whole_tiles(data.reshape(m, k))
    rows, columns = tiles.shape
    scale = decode_e8m0(unswizzle(scale_inv, columnwise=columnwise) if swizzled else scale_inv)
    if columnwise:
        blocks = tiles.reshape(rows // BLOCK, BLOCK, columns)
        values = decode(blocks, dtype) * scale.unsqueeze(1)
    else:
        blocks = tiles.reshape(rows, columns // BLOCK, BLOCK)
        values = decode(blocks, dtype) * scale.unsqueeze(2)
    values = values.to(out_dtype).reshape(rows, columns)
    return _cut(values, m, k).reshape(data.shape)


def swizzle(scale: Tensor, *, columnwise: bool) -> Tensor:
    """Return a padded compact scale buffer in the order of the GEMM, in the same 2-D shape.

    Tiles of 128 x 4 scales follow each other in row-major order, 512 bytes each; inside a tile
    scale ``(i, j)`` is byte ``(i % 32) * 16 + (i // 32) * 4 + j``. ``i`` counts rows of a rowwise
    and columns of a columnwise buffer, ``j`` blocks: a columnwise buffer is swizzled as its
    transpose.
    """
    rows, columns = scale.shape
    step_i, step_j = (1, columns) if columnwise else (columns, 1)
    across = (rows if columnwise else columns) // TILE_INNER

    # Byte 128 * quarter + rest. A permuted view would say the same, but a graph traced through it
    # is guarded on whether there is one tile or more. Both indices are sums, so it is cheap.
    quarter = torch.arange(rows * columns // 128, device=scale.device).unsqueeze(1)
    rest = torch.arange(128, device=scale.device)
    tile = quarter // 4
    first_i = tile // across * TILE_OUTER + quarter % 4 * 8
    first_j = tile % across * TILE_INNER
    i = rest // 16 + rest % 16 // 4 * 32
    j = rest % 4
    source = (first_i * step_i + first_j * step_j) + (i * step_i + j * step_j)
    return scale.reshape(-1)[source].view(scale.shape)


def unswizzle(scale: Tensor, *, columnwise: bool) -> Tensor:
    """Return a padded swizzled scale buffer in compact order, the inverse of :func:`swizzle`."""
    rows, columns = scale.shape
    across = (rows if columnwise else columns) // TILE_INNER
    row = torch.arange(rows, device=scale.device).unsqueeze(1)
    column = torch.arange(columns, device=scale.device)
    i, j = (column, row) if columnwise else (row, column)
    tile_row = i // TILE_OUTER * across * 512 + i % 32 * 16 + i % TILE_OUTER // 32 * 4
    return scale.reshape(-1)[tile_row + (j // TILE_INNER * 512 + j % TILE_INNER)]


def compact_scale(scale_inv: Tensor, m: int, k: int, *, columnwise: bool, swizzled: bool) -> Tensor:
    """Return the scales of an ``[m, k]`` matrix's blocks, without padding, in compact order."""
    if swizzled:
        scale_inv = unswizzle(scale_inv, columnwise=columnwise)
    return scale_inv[: m // BLOCK, :k] if columnwise else scale_inv[:m, : k // BLOCK]


def store_scale(scale: Tensor, *, columnwise: bool, swizzled: bool) -> Tensor:
    """Return the scale buffer that holds these scales, the inverse of :func:`compact_scale`."""
    rows, columns = scale.shape
    i, j = (TILE_INNER, TILE_OUTER) if columnwise else (TILE_OUTER, TILE_INNER)
    padded = pad(scale, (0, round_up(columns, j) - columns, 0, round_up(rows, i) - rows))
    return swizzle(padded, columnwise=columnwise) if swizzled else padded.contiguous()


def _whole_tiles(matrix: Tensor) -> Tensor:
    """Return ``matrix`` padded with zeros to whole swizzle tiles, 128 rows and 128 columns.

    The padding of the scale buffers is then what blocks of zeros get. A traced graph always pads:
    a size rounded up to 128 is never 1, where ``M // 32`` could be and would be guarded on.
    """
    m, k = matrix.shape
    if not is_compiling() and m % TILE_OUTER == 0 and k % TILE_OUTER == 0:
        return matrix
    return pad(matrix, (0, round_up(k, TILE_OUTER) - k, 0, round_up(m, TILE_OUTER) - m))


def _cut(tiles: Tensor, m: int, k: int) -> Tensor:
    """Return the first ``m`` rows and ``k`` columns, contiguous, in memory of their own."""
    if not is_compiling() and tiles.shape == (m, k):
        return tiles.contiguous()
    # a graph always copies: to look would guard on whether there was padding
    return tiles[:m, :k].clone(memory_format=torch.contiguous_format)


def _quantize_blocks(blocks: Tensor, axes: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
    """Return codes of the shape of ``blocks``, and one scale byte for its ``axes`` together."""
    # a maximum of magnitudes is exact in the input's own dtype, at half the bytes of float32
    magnitudes = blocks.abs().masked_fill_(blocks != blocks, 0.0)
    scale = e8m0_from_amax(magnitudes.amax(axes).float(), dtype)
    inverse = e8m0_reciprocal(scale)
    # Inductor recomputes a pointwise value at each use, here 32 times; a reduction of 8 or more it
    # stores. The maximum of 8 equal values halves the compiled time of both planes.
    inverse = inverse.expand(8, *inverse.shape).amax(0)
    for axis in axes:
        inverse = inverse.unsqueeze(axis)
    return encode(blocks * inverse, dtype), scale
