# SPDX-License-Identifier: Apache-2.0
"""Shapes and offsets of MXFP8 buffers, from the logical shape alone.

This module imports no torch. Sizes may be ``int`` or ``torch.SymInt``: only ``+ - * //`` are used,
so nothing here specializes a dynamic size.

The quantizer's description, the reference and the launchers all read this page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_proto.blocks import TILE_INNER, TILE_OUTER, matrix_shape, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 32
"""Elements that share one scale, along a row or down a column."""


def scale_shape(m: int, k: int, *, columnwise: bool) -> tuple[int, int]:
    """Return the shape of a scale buffer of an ``[m, k]`` matrix, in scales.

    The scale of element ``(i, j)`` is at ``[i, j // 32]`` of the rowwise and at ``[i // 32, j]`` of
    the columnwise buffer when scales are compact. Both axes are padded to whole swizzle tiles of
    128 x 4, so swizzling keeps the shape.
    """
    if columnwise:
        return round_up(m // BLOCK, TILE_INNER), round_up(k, TILE_OUTER)
    return round_up(m, TILE_OUTER), round_up(k // BLOCK, TILE_INNER)


def buffer_shapes(
    shape: Sequence[int], *, rowwise: bool, columnwise: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every uint8 buffer, present planes only, in canonical order.

    The columnwise codes are not transposed: both code planes have the logical shape.
    """
    m, k = matrix_shape(shape)
    shapes: dict[str, tuple[int, ...]] = {}
    if rowwise:
        shapes["rowwise_data"] = tuple(shape)
        shapes["rowwise_scale_inv"] = scale_shape(m, k, columnwise=False)
    if columnwise:
        shapes["columnwise_data"] = tuple(shape)
        shapes["columnwise_scale_inv"] = scale_shape(m, k, columnwise=True)
    return shapes
