# SPDX-License-Identifier: Apache-2.0
"""Values of codes, from either order.

Computes  te_fp8_current.reference.dequantize in the order of the logical shape, bit for bit.
Reads     codes      [M, K] uint8, any strides (in elements), so that transposed ones are a view;
          scale_inv  one float32.
Writes    out        [M, K] float32, bfloat16 or float16, contiguous.
Grid      one axis, (cdiv(M, BM) * cdiv(K, BK),), K fastest; the ragged edge is masked.
Numerics  one float32 product an element and one rounding to the type of out. HARDWARE takes the
          conversions of sm_89 and later; only the payload of a NaN may differ.
Checked   tests/test_kernels_dequantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_fp8_current.layout import matrix_shape
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics.device import decode

if TYPE_CHECKING:
    from torch import Tensor

TILE = (64, 64)
"""Rows and columns of one program, square: it reads runs of either."""


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scale_inv_ptr,
    out_ptr,
    M,
    K,
    stride_m,
    stride_k,
    DTYPE: tl.constexpr,
    HARDWARE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    row = (pid // tiles_k).to(tl.int64) * BM + tl.arange(0, BM)
    col = (pid % tiles_k).to(tl.int64) * BK + tl.arange(0, BK)
    live = (row < M)[:, None] & (col < K)[None, :]
    offset = row[:, None] * stride_m + col[None, :] * stride_k
    codes = tl.load(codes_ptr + offset, mask=live, other=0)

    values = decode(codes, DTYPE, HARDWARE) * tl.load(scale_inv_ptr)
    out = values.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + col[None, :], out, mask=live)


def launch_dequantize(
    buffers: dict[str, Tensor],
    out: Tensor,
    *,
    dtype: str,
    tile: tuple[int, int] = TILE,
    hardware: bool | None = None,
) -> None:
    """Write the values of ``buffers`` into ``out``, whose dtype says how they are rounded.

    Args:
        buffers: the inner tensors; transposed codes are read if there are no others.
        out: float32, bfloat16 or float16 of the logical shape, contiguous.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        tile: rows and columns of one program, powers of two.
        hardware: use the float8 conversions of the device; by default where it has them.

    Raises:
        LayoutError: ``out`` is not contiguous.
    """
    check_contiguous("fp8_current", "out", out)
    m, k = matrix_shape(out.shape)
    if m == 0 or k == 0:
        return
    if "fp8_data" in buffers:
        matrix = buffers["fp8_data"].reshape(m, k)
    else:
        matrix = buffers["data_transpose"].reshape(k, m).t()
    tile_m, tile_k = tile
    with current(out.device):
        dequantize_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k),)](
            matrix,
            buffers["fp8_scale_inv"],
            out,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            DTYPE=dtype,
            HARDWARE=has_conversion(out.device, (8, 9)) if hardware is None else hardware,
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
            enable_fp_fusion=False,
        )
