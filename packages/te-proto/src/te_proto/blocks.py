# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of blocks and scale tiles, shared by the layouts of block-scaled formats.

This module imports no torch. Sizes may be ``int`` or ``torch.SymInt``: only ``+ - * //`` are used,
so nothing here specializes a dynamic size.

A tensor of shape ``S`` is seen as a matrix ``[M, K]`` with ``K = S[-1]`` and ``M`` the product of
the other sizes. Scale buffers are padded to the tiles in which a GEMM on sm_100 reads them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE_OUTER = 128
"""Scales of one swizzle tile along the axis that is not cut into blocks."""

TILE_INNER = 4
"""Scales of one swizzle tile along the axis that is cut into blocks."""


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``size``."""
    return (size + multiple - 1) // multiple * multiple


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return ``(M, K)`` of a logical shape with at least one axis; a 1-d shape has ``M = 1``."""
    return math.prod(shape[:-1]), shape[-1]
