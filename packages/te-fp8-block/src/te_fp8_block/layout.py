# SPDX-License-Identifier: Apache-2.0
"""Shapes of block-scaled FP8 buffers, from the logical shape alone.

This module imports no torch. Sizes may be ``int`` or ``torch.SymInt``: only ``+ - * //`` are used,
so nothing here specializes a dynamic size.

A tensor of shape ``S`` is seen as a matrix ``[M, K]`` with ``K = S[-1]`` and ``M`` the product of
the other sizes; a 0-d tensor as ``[1, 1]``. A plane is that of a matrix ``[R, C]`` whose rows are
cut into blocks: the rowwise plane of ``[M, K]`` itself, the columnwise plane of its transpose
``[K, M]``, stored as such. The quantizer's description, the reference and the launchers all read
this page.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from te_proto.blocks import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 128
"""Elements that share one scale, along a row and, in 2-D, also down a column."""

SCALE_MULTIPLE = 4
"""The last axis of a scale buffer is padded to a multiple of this many scales."""


def blocks(size: int) -> int:
    """Return how many blocks cover ``size`` elements."""
    return (size + BLOCK - 1) // BLOCK


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return ``(M, K)`` of a logical shape; a 1-d shape has ``M = 1``, a 0-d one ``M = K = 1``."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 0 else (1, 1)


def transposed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the columnwise codes: the last axis comes first."""
    return (*shape[-1:], *shape[:-1])


def scale_shape(rows: int, columns: int, *, two_d: bool) -> tuple[int, int]:
    """Return the shape of the scale buffer of a plane ``[rows, columns]``, padding included.

    The scale of element ``(r, c)`` is at ``[c // 128, r]``, stored transposed, or, in 2-D, at
    ``[r // 128, c // 128]``.
    """
    if two_d:
        return blocks(rows), round_up(blocks(columns), SCALE_MULTIPLE)
    return blocks(columns), round_up(rows, SCALE_MULTIPLE)


def scale_counts(rows: int, columns: int, *, two_d: bool) -> tuple[int, int]:
    """Return the shape of the scales of a plane ``[rows, columns]`` without padding."""
    return (blocks(rows), blocks(columns)) if two_d else (blocks(columns), rows)


def buffer_shapes(
    shape: Sequence[int], *, rowwise: bool, columnwise: bool, two_d: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every buffer, present planes only, in canonical order.

    Codes (``_data``) are uint8, scales (``_scale_inv``) float32.
    """
    m, k = matrix_shape(shape)
    shapes: dict[str, tuple[int, ...]] = {}
    if rowwise:
        shapes["rowwise_data"] = tuple(shape)
        shapes["rowwise_scale_inv"] = scale_shape(m, k, two_d=two_d)
    if columnwise:
        shapes["columnwise_data"] = transposed(shape)
        shapes["columnwise_scale_inv"] = scale_shape(k, m, two_d=two_d)
    return shapes
