# SPDX-License-Identifier: Apache-2.0
"""Scale buffers in the order of a GEMM, and matrices padded to whole scale tiles.

The order is that of the block-scaled products of sm_100: tiles of 128 x 4 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_proto._compat import is_compiling
from te_proto.blocks import TILE_INNER, TILE_OUTER, round_up


def swizzle(scale: Tensor, *, columnwise: bool = False) -> Tensor:
    """Return a padded compact scale buffer in the order of the GEMM, in the same 2-D shape.

    Tiles of 128 x 4 scales follow each other in row-major order, 512 bytes each; inside a tile
    scale ``(i, j)`` is byte ``(i % 32) * 16 + (i // 32) * 4 + j``, where ``j`` counts blocks.

    Args:
        scale: one byte a scale, ``[i, j]`` padded to whole tiles, contiguous.
        columnwise: the buffer is ``[j, i]``, and is swizzled as its transpose.
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


def unswizzle(scale: Tensor, *, columnwise: bool = False) -> Tensor:
    """Return a padded swizzled scale buffer in compact order, the inverse of :func:`swizzle`."""
    rows, columns = scale.shape
    across = (rows if columnwise else columns) // TILE_INNER
    row = torch.arange(rows, device=scale.device).unsqueeze(1)
    column = torch.arange(columns, device=scale.device)
    i, j = (column, row) if columnwise else (row, column)
    tile_row = i // TILE_OUTER * across * 512 + i % 32 * 16 + i % TILE_OUTER // 32 * 4
    return scale.reshape(-1)[tile_row + (j // TILE_INNER * 512 + j % TILE_INNER)]


def whole_tiles(matrix: Tensor, rows: int = TILE_OUTER, columns: int = TILE_OUTER) -> Tensor:
    """Return ``matrix`` padded with zeros to multiples of ``rows`` and ``columns``.

    Scales of the padding fill that of a scale buffer: those of blocks of zeros. A traced graph
    always pads: a size rounded up to 128 is never 1, where the number of blocks could be and would
    be guarded on.
    """
    m, k = matrix.shape
    if not is_compiling() and m % rows == 0 and k % columns == 0:
        return matrix
    return pad(matrix, (0, round_up(k, columns) - k, 0, round_up(m, rows) - m))


def cut(tiles: Tensor, m: int, k: int) -> Tensor:
    """Return the first ``m`` rows and ``k`` columns, contiguous, in memory of their own."""
    if not is_compiling() and tiles.shape == (m, k):
        return tiles.contiguous()
    # a graph always copies: to look would guard on whether there was padding
    piece = tiles[:m, :k].clone(memory_format=torch.contiguous_format)
    # Inductor removes a clone of whole rows, and returns the padded memory; x | 0 it computes
    return piece.bitwise_or(0) if piece.dtype == torch.uint8 else piece
