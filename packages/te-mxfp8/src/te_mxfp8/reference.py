# SPDX-License-Identifier: Apache-2.0
"""MXFP8 in plain torch: the definition of the format, which the kernels obey bit for bit.

Pure functions of tensors and plain options. They run on any device, take any strides and trace with
dynamic sizes; under ``torch.compile`` they are ordinary operations that fuse with their neighbours.
Shapes are the caller's to check: the rowwise plane needs ``K % 32 == 0``, the columnwise plane
``M % 32 == 0``, ``two_d`` both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_mxfp8.layout import BLOCK, TILE_INNER, TILE_OUTER, matrix_shape, scale_shape
from te_proto.numerics import decode, decode_e8m0, e8m0_from_amax, e8m0_reciprocal, encode

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
        columnwise: make the plane with one scale per 32 rows of a column, quantized from ``x``
            again.
        two_d: one scale per 32x32 block; both planes then hold the same codes.
        swizzled: store scales in the order of the GEMM, see :func:`swizzle`.

    Returns:
        uint8 ``rowwise_data``, ``rowwise_scale_inv``, ``columnwise_data``,
        ``columnwise_scale_inv`` in the shapes of :func:`te_mxfp8.layout.buffer_shapes`. Scale
        padding is zero.

    Source:
        TransformerEngine, ``common/cast/mxfp8/quantize_mxfp8.cuh``; OCP MX v1.0 for the codes.
    """
    m, k = matrix_shape(x.shape)
    matrix = x.reshape(m, k)
    buffers: dict[str, Tensor] = {}
    if two_d:
        blocks = matrix.reshape(m // BLOCK, BLOCK, k // BLOCK, BLOCK)
        codes, scale = _quantize_blocks(blocks, (1, 3), dtype)
        if rowwise:
            buffers["rowwise_data"] = codes.reshape(x.shape).contiguous()
            rows = scale.unsqueeze(1).expand(-1, BLOCK, -1).reshape(m, k // BLOCK)
            buffers["rowwise_scale_inv"] = store_scale(
                rows, m, k, columnwise=False, swizzled=swizzled
            )
        if columnwise:
            # a plane may be dropped or written in place, so it never shares memory with the other
            codes = codes.clone() if rowwise else codes
            buffers["columnwise_data"] = codes.reshape(x.shape).contiguous()
            columns = scale.unsqueeze(2).expand(-1, -1, BLOCK).reshape(m // BLOCK, k)
            buffers["columnwise_scale_inv"] = store_scale(
                columns, m, k, columnwise=True, swizzled=swizzled
            )
        return buffers
    if rowwise:
        codes, scale = _quantize_blocks(matrix.reshape(m, k // BLOCK, BLOCK), (2,), dtype)
        buffers["rowwise_data"] = codes.reshape(x.shape).contiguous()
        buffers["rowwise_scale_inv"] = store_scale(scale, m, k, columnwise=False, swizzled=swizzled)
    if columnwise:
        codes, scale = _quantize_blocks(matrix.reshape(m // BLOCK, BLOCK, k), (1,), dtype)
        buffers["columnwise_data"] = codes.reshape(x.shape).contiguous()
        buffers["columnwise_scale_inv"] = store_scale(
            scale, m, k, columnwise=True, swizzled=swizzled
        )
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
    scale = decode_e8m0(compact_scale(scale_inv, m, k, columnwise=columnwise, swizzled=swizzled))
    blocks = (m // BLOCK, BLOCK, k) if columnwise else (m, k // BLOCK, BLOCK)
    values = decode(data.reshape(blocks), dtype) * scale.unsqueeze(1 if columnwise else 2)
    return values.reshape(data.shape).to(out_dtype)


def swizzle(scale: Tensor, *, columnwise: bool) -> Tensor:
    """Return a padded compact scale buffer in the order of the GEMM, in the same 2-D shape.

    Tiles of 128 x 4 scales follow each other in row-major order, 512 bytes each; inside a tile
    scale ``(i, j)`` is byte ``(i % 32) * 16 + (i // 32) * 4 + j``. ``i`` counts rows of a rowwise
    and columns of a columnwise buffer, ``j`` blocks: a columnwise buffer is swizzled as its
    transpose.
    """
    outer = scale.t() if columnwise else scale
    i, j = outer.shape
    tiles = outer.reshape(i // TILE_OUTER, 4, 32, j // TILE_INNER, TILE_INNER)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scale.shape)


def unswizzle(scale: Tensor, *, columnwise: bool) -> Tensor:
    """Return a padded swizzled scale buffer in compact order, the inverse of :func:`swizzle`."""
    i, j = reversed(scale.shape) if columnwise else scale.shape
    tiles = scale.reshape(i // TILE_OUTER, j // TILE_INNER, 32, 4, TILE_INNER)
    outer = tiles.permute(0, 3, 2, 1, 4).reshape(i, j)
    return outer.t().contiguous() if columnwise else outer


def store_scale(scale: Tensor, m: int, k: int, *, columnwise: bool, swizzled: bool) -> Tensor:
    """Return the scale buffer of an ``[m, k]`` matrix: its blocks' scales, padded with zero."""
    padded = scale.new_zeros(scale_shape(m, k, columnwise=columnwise))
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return swizzle(padded, columnwise=columnwise) if swizzled else padded


def compact_scale(scale_inv: Tensor, m: int, k: int, *, columnwise: bool, swizzled: bool) -> Tensor:
    """Return the scales of an ``[m, k]`` matrix's blocks, the inverse of :func:`store_scale`."""
    if swizzled:
        scale_inv = unswizzle(scale_inv, columnwise=columnwise)
    return scale_inv[: m // BLOCK, :k] if columnwise else scale_inv[:m, : k // BLOCK]


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
