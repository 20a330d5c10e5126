# SPDX-License-Identifier: Apache-2.0
"""Values of one MXFP8 plane.

Computes  te_mxfp8.reference.dequantize, bit for bit.
Reads     codes    [M, K] uint8, any strides (in elements);
          scales   uint8 in the padded shape of te_mxfp8.layout, compact or swizzled, contiguous.
Writes    out      [M, K] float32, bfloat16 or float16, contiguous.
Grid      one axis, (cdiv(M, BM) * cdiv(K, BK),), K fastest; the ragged edge is masked.
Numerics  one float32 product an element, exact above 2**-149, and one rounding to the type of out.
          HARDWARE takes the conversions of sm_89 and later; only the payload of a NaN may differ.
Checked   tests/test_kernels_dequantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_proto.blocks import matrix_shape
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics.device import (
    columnwise_scale_offset,
    decode,
    decode_e8m0,
    rowwise_scale_offset,
)

if TYPE_CHECKING:
    from torch import Tensor

TILE = (32, 128)
"""Rows and columns of one program."""


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    M,
    K,
    stride_m,
    stride_k,
    DTYPE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    first_row = (pid // tiles_k).to(tl.int64) * BM
    first_col = (pid % tiles_k).to(tl.int64) * BK
    row = first_row + tl.arange(0, BM)
    col = first_col + tl.arange(0, BK)
    live = (row < M)[:, None] & (col < K)[None, :]
    offset = row[:, None] * stride_m + col[None, :] * stride_k
    values = decode(tl.load(codes_ptr + offset, mask=live, other=0), DTYPE, HARDWARE)

    if COLUMNWISE:
        block = first_row // 32 + tl.arange(0, BM // 32)
        blocks = tl.cdiv(M, 128) * 4
        cols = tl.cdiv(K, 128) * 128
        at = columnwise_scale_offset(block[:, None], col[None, :], blocks, cols, SWIZZLED)
        inside = (block < blocks)[:, None] & (col < cols)[None, :]
        scale = decode_e8m0(tl.load(scales_ptr + at, mask=inside, other=0))
        values = tl.reshape(values, (BM // 32, 32, BK)) * scale[:, None, :]
    else:
        block = first_col // 32 + tl.arange(0, BK // 32)
        blocks = tl.cdiv(K, 128) * 4
        at = rowwise_scale_offset(row[:, None], block[None, :], blocks, SWIZZLED)
        inside = (row < M)[:, None] & (block < blocks)[None, :]
        scale = decode_e8m0(tl.load(scales_ptr + at, mask=inside, other=0))
        values = tl.reshape(values, (BM, BK // 32, 32)) * scale[:, :, None]

    out = tl.reshape(values, (BM, BK)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + col[None, :], out, mask=live)


def launch_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    out: Tensor,
    *,
    dtype: str,
    columnwise: bool,
    swizzled: bool,
    tile: tuple[int, int] = TILE,
    hardware: bool | None = None,
) -> None:
    """Write the values of one plane into ``out``, whose dtype says how they are rounded.

    Args:
        data: uint8 codes ``[..., K]``, copied only if they are not a view ``[M, K]``.
        scale_inv: the plane's scale buffer.
        out: float32, bfloat16 or float16 of the shape of ``data``, contiguous.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        columnwise: which plane the buffers are.
        swizzled: whether ``scale_inv`` is in the order of the GEMM.
        tile: rows and columns of one program, powers of two from 32.
        hardware: use the float8 conversions of the device; by default where it has them.

    Raises:
        LayoutError: ``out`` is not contiguous.
    """
    check_contiguous("mxfp8", "out", out)
    m, k = matrix_shape(data.shape)
    if m == 0 or k == 0:
        return
    matrix = data.reshape(m, k)
    tile_m, tile_k = tile
    with current(data.device):
        dequantize_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k),)](
            matrix,
            scale_inv.contiguous(),
            out,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            DTYPE=dtype,
            COLUMNWISE=columnwise,
            SWIZZLED=swizzled,
            HARDWARE=has_conversion(data.device, (8, 9)) if hardware is None else hardware,
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
            enable_fp_fusion=False,
        )
