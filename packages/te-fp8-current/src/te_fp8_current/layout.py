# SPDX-License-Identifier: Apache-2.0
"""Shapes of the buffers, from the logical shape alone. This module imports no torch.

Sizes may be ``int`` or ``torch.SymInt``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return ``(M, K)`` of a logical shape: all axes but the last together, and the last."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) else (1, 1)


def transpose_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` with the last axis in front."""
    return (*shape[-1:], *shape[:-1])


def buffer_shapes(
    shape: Sequence[int], *, rowwise: bool, columnwise: bool, separate_transpose: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every buffer, present ones only, in canonical order.

    One buffer of codes serves both usages, so it is held whatever they are, unless the columnwise
    usage has a transposed buffer of its own.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if rowwise or not separate_transpose:
        shapes["fp8_data"] = tuple(shape)
    if columnwise and separate_transpose:
        shapes["data_transpose"] = transpose_shape(shape)
    shapes["fp8_scale_inv"] = (1,)
    return shapes
