# SPDX-License-Identifier: Apache-2.0
"""MXFP8 in plain torch: the definition of the format, which the kernels obey bit for bit.

Pure functions of tensors and plain options. They run on any device, take any strides and trace with
dynamic sizes; under ``torch.compile`` they are ordinary operations that fuse with their neighbours.
Shapes are the caller's to check: the rowwise plane needs ``K % 32 == 0``, the columnwise plane
``M % 32 == 0``, ``two_d`` both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import pad

from te_mxfp8.layout import BLOCK
from te_proto.blocks import TILE_INNER, TILE_OUTER, matrix_shape, round_up
from te_proto.numerics import (
    cut,
    decode,
    decode_e8m0,
    e8m0_from_amax,
    e8m0_reciprocal,
    encode,
    in_slabs,
    magnitudes,
    materialize,
    round_to,
    swizzle,
    unswizzle,
    whole_tiles,
)

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
        columnwise: make the plane with one scale per 32 rows of a column, from ``x`` again.
        two_d: one scale per 32x32 block; both planes then hold the same codes.
        swizzled: store scales in the order of the GEMM, see :func:`te_proto.numerics.swizzle`.

    Returns:
        uint8 ``rowwise_data``, ``rowwise_scale_inv``, ``columnwise_data`` and
        ``columnwise_scale_inv`` in the shapes of :func:`te_mxfp8.layout.buffer_shapes`. Scale
        padding is zero.

    Source:
        TransformerEngine, ``common/cast/mxfp8/quantize_mxfp8.cuh``.
    """
    m, k = matrix_shape(x.shape)
    tiles = whole_tiles(x.reshape(m, k))
    rows, columns = tiles.shape
    planes: dict[str, tuple[Tensor, Tensor]] = {}
    if two_d:
        blocks = tiles.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        codes, scale = _quantize_blocks(blocks, (1, 3), dtype)
        data = cut(codes.reshape(rows, columns), m, k)
        by_row = scale.unsqueeze(1).expand(-1, BLOCK, -1).reshape(rows, columns // BLOCK)
        by_column = scale.unsqueeze(2).expand(-1, -1, BLOCK).reshape(rows // BLOCK, columns)
        # A plane may be dropped or written in place, so it never shares memory with the other.
        # Inductor removes a clone, and returns one buffer twice; x | 0 it computes.
        copy = data.bitwise_or(0) if rowwise and columnwise else data
        planes = {"rowwise": (data, by_row), "columnwise": (copy, by_column)}
    if rowwise and not two_d:
        blocks = tiles.reshape(rows, columns // BLOCK, BLOCK)
        codes, scale = _quantize_blocks(blocks, (2,), dtype)
        planes["rowwise"] = cut(codes.reshape(rows, columns), m, k), scale
    if columnwise and not two_d:
        blocks = tiles.reshape(rows // BLOCK, BLOCK, columns)
        codes, scale = _quantize_blocks(blocks, (1,), dtype)
        planes["columnwise"] = cut(codes.reshape(rows, columns), m, k), scale

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
    tiles = whole_tiles(data.reshape(m, k))
    rows, columns = tiles.shape
    scale = decode_e8m0(unswizzle(scale_inv, columnwise=columnwise) if swizzled else scale_inv)
    axis = 1 if columnwise else 2
    shape = (rows // BLOCK, BLOCK, columns) if columnwise else (rows, columns // BLOCK, BLOCK)

    def values(_: int, codes: Tensor, scale: Tensor) -> tuple[Tensor]:
        exact = decode(codes, dtype) * scale.unsqueeze(axis)
        return (round_to(exact, out_dtype),)

    (made,) = in_slabs(values, tiles.reshape(shape), scale)
    return cut(made.reshape(rows, columns), m, k).reshape(data.shape)


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


def _quantize_blocks(blocks: Tensor, axes: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
    """Return codes of the shape of ``blocks``, and one scale byte for its ``axes`` together."""

    def maxima(_: int, part: Tensor) -> tuple[Tensor]:
        return (magnitudes(part).amax(axes).float(),)

    def codes(_: int, part: Tensor, inverse: Tensor) -> tuple[Tensor]:
        for axis in axes:
            inverse = inverse.unsqueeze(axis)
        return (encode(part * inverse, dtype),)

    (amax,) = in_slabs(maxima, blocks)
    scale = e8m0_from_amax(amax, dtype)
    (made,) = in_slabs(codes, blocks, materialize(e8m0_reciprocal(scale)))
    return made, scale
