# SPDX-License-Identifier: Apache-2.0
"""Shapes of NVFP4 buffers, from the logical shape alone.

This module imports no torch. Sizes may be ``int`` or ``torch.SymInt``: only ``+ - * //`` are used,
so nothing here specializes a dynamic size.

A columnwise plane is that of the transposed matrix: what is said of the rows of a rowwise plane
holds for the columns of a columnwise one. The quantizer's description, the reference and the
launchers all read this page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_proto.blocks import TILE_INNER, TILE_OUTER, matrix_shape, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_nvfp4.quantizer import NVFP4Quantizer

BLOCK = 16
"""Elements that share one scale, along a row or down a column; also the points of the transform."""


def scale_shape(outer: int, inner: int) -> tuple[int, int]:
    """Return the shape of a plane's scale buffer, ``outer`` lines of ``inner`` elements, in scales.

    The scale of element ``(i, j)`` of the plane is at ``[i, j // 16]`` when scales are compact.
    Both axes are padded to whole swizzle tiles of 128 x 4, so swizzling keeps the shape.
    """
    return round_up(outer, TILE_OUTER), round_up(inner // BLOCK, TILE_INNER)


def buffer_shapes(
    shape: Sequence[int], *, rowwise: bool, columnwise: bool, row_scaled: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every buffer, present planes only, in canonical order.

    Codes are two a byte along the axis that is cut into blocks. The columnwise codes are those of
    the transposed matrix, 2-D whatever the logical rank. Amaxes are float32: one, or with
    ``row_scaled`` one a row (rowwise) and one a column (columnwise); all else is uint8.
    """
    m, k = matrix_shape(shape)
    shapes: dict[str, tuple[int, ...]] = {}
    if rowwise:
        shapes["rowwise_data"] = (*shape[:-1], k // 2)
        shapes["rowwise_scale_inv"] = scale_shape(m, k)
    if columnwise:
        shapes["columnwise_data"] = (k, m // 2)
        shapes["columnwise_scale_inv"] = scale_shape(k, m)
    if rowwise:
        shapes["amax_rowwise"] = (m if row_scaled else 1,)
    if columnwise:
        shapes["amax_columnwise"] = (k if row_scaled else 1,)
    return shapes


def measured_amaxes(q: NVFP4Quantizer) -> tuple[str, ...]:
    """Return which amaxes differ: both planes hold the same values unless one is transformed."""
    on = {"amax_rowwise": q.rowwise, "amax_columnwise": q.columnwise}
    names = tuple(name for name, wanted in on.items() if wanted)
    return names if q.with_rht or q.row_scaled_nvfp4 else names[:1]
