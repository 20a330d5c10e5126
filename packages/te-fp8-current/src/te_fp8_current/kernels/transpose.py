# SPDX-License-Identifier: Apache-2.0
"""Codes with the last axis in front.

Computes  te_fp8_current.reference.move_last_to_front.
Reads     codes  [M, K] uint8, any strides (in elements).
Writes    out    [K, M] uint8, contiguous.
Grid      one axis, (cdiv(M, BM) * cdiv(K, BK),), K fastest; the ragged edge is masked.
Checked   tests/test_kernels_transpose.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_fp8_current.layout import matrix_shape
from te_proto.launch import check_contiguous, current

if TYPE_CHECKING:
    from torch import Tensor

TILE = (64, 128)
"""Rows and columns of one program."""


@triton.jit
def transpose_kernel(
    codes_ptr, out_ptr, M, K, stride_m, stride_k, BM: tl.constexpr, BK: tl.constexpr
):
    tiles_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    row = (pid // tiles_k).to(tl.int64) * BM + tl.arange(0, BM)
    col = (pid % tiles_k).to(tl.int64) * BK + tl.arange(0, BK)
    offset = row[:, None] * stride_m + col[None, :] * stride_k
    live = (row < M)[:, None] & (col < K)[None, :]
    codes = tl.load(codes_ptr + offset, mask=live, other=0)

    moved = col[:, None] * M + row[None, :]
    live = (col < K)[:, None] & (row < M)[None, :]
    tl.store(out_ptr + moved, tl.trans(codes), mask=live)


def launch_transpose(codes: Tensor, out: Tensor, *, tile: tuple[int, int] = TILE) -> None:
    """Write ``codes`` into ``out`` with the last axis in front.

    Args:
        codes: uint8, any shape and strides; copied only if it is not a view ``[M, K]``.
        out: uint8 in the shape of :func:`te_fp8_current.layout.transpose_shape`, contiguous.
        tile: rows and columns of one program, powers of two.

    Raises:
        LayoutError: ``out`` is not contiguous.
    """
    check_contiguous("fp8_current", "out", out)
    m, k = matrix_shape(codes.shape)
    if m == 0 or k == 0:
        return
    matrix = codes.reshape(m, k)
    tile_m, tile_k = tile
    with current(codes.device):
        transpose_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k),)](
            matrix,
            out,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
        )
