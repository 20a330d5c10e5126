# SPDX-License-Identifier: Apache-2.0
"""Largest magnitude of a tensor, in one pass and without asking the host.

Computes  te_fp8_current.reference.amax, bit for bit.
Reads     x     [M, K] float32, bfloat16 or float16, any strides (in elements);
          noop  one float32, optional: exactly 1.0 leaves the result as it is.
Writes    amax  one float32 as its bits, int32, which the launcher's caller has set to zero.
Grid      one axis, (cdiv(M, BM) * cdiv(K, BK),), K fastest; the ragged edge is masked.
Numerics  integers only: magnitudes are ordered as their bits are, NaN counts as zero. The maximum
          of maxima is the same in whatever order the programs add theirs.
Checked   tests/test_kernels_amax.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from te_fp8_current.layout import matrix_shape
from te_proto.launch import current

if TYPE_CHECKING:
    from torch import Tensor

TILE = (32, 256)
"""Rows and columns of one program."""


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,
    noop_ptr,
    M,
    K,
    stride_m,
    stride_k,
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
    x = tl.load(x_ptr + offset, mask=live, other=0.0)

    magnitude = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.where(magnitude > 0x7F800000, 0, magnitude)
    tl.atomic_max(amax_ptr, tl.max(magnitude), sem="relaxed")


def launch_amax(
    x: Tensor, amax: Tensor, *, noop: Tensor | None = None, tile: tuple[int, int] = TILE
) -> None:
    """Raise ``amax`` to the largest magnitude of ``x``.

    Args:
        x: any shape and strides; copied only if it is not a view ``[M, K]``.
        amax: float32 ``[1]``, zero.
        noop: one float32 on the device of ``x``, read by the kernel; 1.0 leaves ``amax`` alone.
        tile: rows and columns of one program, powers of two.
    """
    m, k = matrix_shape(x.shape)
    if m == 0 or k == 0:
        return
    matrix = x.reshape(m, k)
    tile_m, tile_k = tile
    with current(x.device):
        amax_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k),)](
            matrix,
            amax.view(torch.int32),
            noop,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
        )
