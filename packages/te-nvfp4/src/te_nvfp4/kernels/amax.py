# SPDX-License-Identifier: Apache-2.0
"""The largest magnitudes of a matrix: of all of it or of each line, as it is or transformed.

Computes  the amaxes of te_nvfp4.reference.quantize, bit for bit.
Reads     x     [M, K] float32, bfloat16 or float16, any strides (in elements);
          noop  one float32, optional: exactly 1.0 leaves the outputs as they are.
Writes    rows  int32 bits of float32, one or [M], zero before;
          cols  the same, one or [K]; of the transform of the columns with RHT.
Grid      one axis, (cdiv(M, BM) * cdiv(K, BK),), K fastest; the ragged edge is masked.
Numerics  maxima and, with RHT, four additions an element in a fixed order. Bits of numbers that are
          not negative sort as integers, so that an integer atomic maximum joins the programs.
Checked   tests/test_kernels_amax.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from te_nvfp4.kernels._device import magnitude, transform
from te_proto.blocks import matrix_shape
from te_proto.launch import current

if TYPE_CHECKING:
    from torch import Tensor

    from te_nvfp4.quantizer import NVFP4Quantizer

TILE = (64, 128)
"""Rows and columns of one program."""


@triton.jit
def amax_kernel(
    x_ptr,
    rows_ptr,
    cols_ptr,
    noop_ptr,
    M,
    K,
    stride_m,
    stride_k,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PER_LINE: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    if noop_ptr is not None:  # noqa: SIM102 -- decided when compiled, the inner one at run time
        if tl.load(noop_ptr) == 1.0:
            return

    tiles_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    row = (pid // tiles_k).to(tl.int64) * BM + tl.arange(0, BM)
    col = (pid % tiles_k).to(tl.int64) * BK + tl.arange(0, BK)
    live = (row < M)[:, None] & (col < K)[None, :]
    offset = row[:, None] * stride_m + col[None, :] * stride_k
    x = tl.load(x_ptr + offset, mask=live, other=0.0).to(tl.float32)

    if ROWWISE:
        lines = tl.max(magnitude(x), axis=1)
        if PER_LINE:
            tl.atomic_max(rows_ptr + row, lines.to(tl.int32, bitcast=True), mask=row < M)
        else:
            tl.atomic_max(rows_ptr, tl.max(lines, axis=0).to(tl.int32, bitcast=True))

    if COLUMNWISE:
        turned = tl.trans(x)
        if RHT:
            turned = transform(turned, BK, BM, SIGN_MASK)
        lines = tl.max(magnitude(turned), axis=1)
        if PER_LINE:
            tl.atomic_max(cols_ptr + col, lines.to(tl.int32, bitcast=True), mask=col < K)
        else:
            tl.atomic_max(cols_ptr, tl.max(lines, axis=0).to(tl.int32, bitcast=True))


def launch_amax(
    x: Tensor,
    out: dict[str, Tensor],
    q: NVFP4Quantizer,
    *,
    noop: Tensor | None = None,
    tile: tuple[int, int] = TILE,
) -> None:
    """Raise ``out`` to the amaxes of ``x``.

    Args:
        x: ``[..., K]``, any strides; copied only if it is not a view ``[M, K]``.
        out: float32 zeros, ``amax_rowwise`` and ``amax_columnwise`` or one of them.
        q: the options.
        noop: one float32 on the device of ``x``, read by the kernel; 1.0 leaves ``out`` alone.
        tile: rows and columns of one program, powers of two from 16.
    """
    m, k = matrix_shape(x.shape)
    if m == 0 or k == 0:
        return
    matrix = x.reshape(m, k)
    bits = {name: amax.view(torch.int32) for name, amax in out.items()}
    tile_m, tile_k = tile
    with current(x.device):
        amax_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k),)](
            matrix,
            bits.get("amax_rowwise"),
            bits.get("amax_columnwise"),
            noop,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            ROWWISE="amax_rowwise" in out,
            COLUMNWISE="amax_columnwise" in out,
            PER_LINE=q.row_scaled_nvfp4,
            RHT=q.with_rht,
            SIGN_MASK=q.rht_matrix_random_sign_mask_t,
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
            enable_fp_fusion=False,
        )
