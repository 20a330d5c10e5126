# SPDX-License-Identifier: Apache-2.0
"""The transpose of a matrix of codes: the columnwise codes of 128x128 blocks from the rowwise ones.

Computes  te_fp8_block.reference.transpose_codes.
Reads     codes    [R, C] uint8, any strides (in elements).
Writes    out      [C, R] uint8, contiguous.
Grid      one axis, (cdiv(R, BR) * cdiv(C, BC),), C fastest; the ragged edge is masked.
Checked   tests/test_kernels_transpose.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_fp8_block._format import FORMAT
from te_proto.launch import check_contiguous, current

if TYPE_CHECKING:
    from torch import Tensor

TILE = (128, 64)
"""Rows and columns of the codes that one program reads."""


@triton.jit
def transpose_kernel(
    codes_ptr, out_ptr, R, C, stride_r, stride_c, BR: tl.constexpr, BC: tl.constexpr
):
    tiles_c = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    row = (pid // tiles_c).to(tl.int64) * BR + tl.arange(0, BR)
    col = (pid % tiles_c).to(tl.int64) * BC + tl.arange(0, BC)
    live = (row < R)[:, None] & (col < C)[None, :]
    offset = row[:, None] * stride_r + col[None, :] * stride_c
    codes = tl.load(codes_ptr + offset, mask=live, other=0)

    turned = col[:, None] * R + row[None, :]
    tl.store(out_ptr + turned, tl.trans(codes), mask=tl.trans(live))


def launch_transpose(codes: Tensor, out: Tensor, *, tile: tuple[int, int] = TILE) -> None:
    """Write the transpose of ``codes`` into ``out``.

    Args:
        codes: uint8 ``[R, C]``, any strides.
        out: uint8 ``[C, R]``, contiguous.
        tile: rows and columns of one program, powers of two.

    Raises:
        LayoutError: ``out`` is not contiguous.
    """
    check_contiguous(FORMAT.name, "out", out)
    rows, columns = codes.shape
    if rows == 0 or columns == 0:
        return
    tile_r, tile_c = tile
    with current(codes.device):
        transpose_kernel[(triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)](
            codes,
            out,
            rows,
            columns,
            codes.stride(0),
            codes.stride(1),
            BR=tile_r,
            BC=tile_c,
            num_warps=4,
        )
