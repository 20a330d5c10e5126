# SPDX-License-Identifier: Apache-2.0
"""Where a scale lies in its buffer; shared by the kernels of this folder."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rowwise_scale_offset(row, block, blocks, SWIZZLED: tl.constexpr):
    """Byte offset of scale ``[row, block]``, int64; ``blocks`` is the padded count a row."""
    return _tiled(row, block, blocks // 4) if SWIZZLED else row * blocks + block


@triton.jit
def columnwise_scale_offset(block, col, blocks, cols, SWIZZLED: tl.constexpr):
    """Byte offset of scale ``[block, col]``, int64; ``blocks`` and ``cols`` are padded counts."""
    return _tiled(col, block, blocks // 4) if SWIZZLED else block * cols + col


@triton.jit
def _tiled(i, j, tiles):
    tile = (i // 128) * tiles + j // 4
    return tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
