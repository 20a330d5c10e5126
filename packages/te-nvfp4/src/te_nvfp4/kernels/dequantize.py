# SPDX-License-Identifier: Apache-2.0
"""Values of one NVFP4 plane.

Computes  te_nvfp4.reference.dequantize, bit for bit.
Reads     codes    [M, K // 2] or [K, M // 2] uint8, contiguous;
          scales   uint8 in the padded shape of te_nvfp4.layout, compact or swizzled, contiguous;
          amax     float32, one or one a line of the plane.
Writes    out      [M, K] float32, bfloat16 or float16, contiguous.
Grid      one axis, (cdiv(M, BM) * cdiv(K, BK),), K fastest; the ragged edge is masked.
Numerics  three float32 products an element, with RHT four additions in a fixed order, and one
          rounding to the type of out.
Checked   tests/test_kernels_dequantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_nvfp4.kernels._device import transform_back
from te_proto.blocks import matrix_shape
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics.device import (
    decode_e2m1,
    decode_e4m3,
    rowwise_scale_offset,
    unpack_e2m1,
)

if TYPE_CHECKING:
    from torch import Tensor

    from te_nvfp4.quantizer import NVFP4Quantizer

TILE = (32, 64)
"""Rows and columns of one program."""


@triton.jit
def _read_plane(
    codes_ptr,
    scales_ptr,
    amax_ptr,
    line,
    first,
    lines,
    size,
    R: tl.constexpr,
    C: tl.constexpr,
    PER_LINE: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Return the tile ``[R, C]`` of a plane of ``lines`` lines of ``size`` elements."""
    live = line < lines
    pair = first // 2 + tl.arange(0, C // 2)
    inside = live[:, None] & (pair < size // 2)[None, :]
    packed = tl.load(codes_ptr + line[:, None] * (size // 2) + pair[None, :], mask=inside, other=0)
    even, odd = unpack_e2m1(packed)
    values = tl.reshape(tl.join(decode_e2m1(even), decode_e2m1(odd)), (R, C // 16, 16))

    block = first // 16 + tl.arange(0, C // 16)
    at = rowwise_scale_offset(line[:, None], block[None, :], tl.cdiv(size, 64) * 4, SWIZZLED)
    inside = live[:, None] & (block < size // 16)[None, :]
    scale = decode_e4m3(tl.load(scales_ptr + at, mask=inside, other=0), FLOAT8)
    if PER_LINE:
        amax = tl.load(amax_ptr + line, mask=live, other=0.0)[:, None]
    else:
        amax = tl.load(amax_ptr)
    factor = scale * amax * RECIPROCAL
    return tl.reshape(values * factor[:, :, None], (R, C))


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    amax_ptr,
    out_ptr,
    M,
    K,
    COLUMNWISE: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    PER_LINE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FLOAT8: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    first_row = (pid // tiles_k).to(tl.int64) * BM
    first_col = (pid % tiles_k).to(tl.int64) * BK
    row = first_row + tl.arange(0, BM)
    col = first_col + tl.arange(0, BK)

    if COLUMNWISE:
        turned = _read_plane(
            codes_ptr,
            scales_ptr,
            amax_ptr,
            col,
            first_row,
            K,
            M,
            BK,
            BM,
            PER_LINE,
            RECIPROCAL,
            SWIZZLED,
            FLOAT8,
        )
        if RHT:
            turned = transform_back(turned, BK, BM, SIGN_MASK)
        values = tl.trans(turned)
    else:
        values = _read_plane(
            codes_ptr,
            scales_ptr,
            amax_ptr,
            row,
            first_col,
            M,
            K,
            BM,
            BK,
            PER_LINE,
            RECIPROCAL,
            SWIZZLED,
            FLOAT8,
        )

    live = (row < M)[:, None] & (col < K)[None, :]
    out = values.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + col[None, :], out, mask=live)


def launch_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    out: Tensor,
    q: NVFP4Quantizer,
    *,
    columnwise: bool,
    tile: tuple[int, int] = TILE,
    float8: bool | None = None,
) -> None:
    """Write the values of one plane into ``out``, whose dtype says how they are rounded.

    Args:
        data: packed uint8 codes of the plane.
        scale_inv: the plane's scale buffer.
        amax: the plane's amax.
        out: float32, bfloat16 or float16 of the logical shape, contiguous.
        q: the options.
        columnwise: which plane the buffers are.
        tile: rows and columns of one program, powers of two from 32.
        float8: use the E4M3 conversion of the device; by default where it has it.

    Raises:
        LayoutError: ``out`` is not contiguous.
    """
    check_contiguous("nvfp4", "out", out)
    m, k = matrix_shape(out.shape)
    if m == 0 or k == 0:
        return
    tile_m, tile_k = tile
    with current(data.device):
        dequantize_kernel[(triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k),)](
            data.contiguous(),
            scale_inv.contiguous(),
            amax.contiguous(),
            out,
            m,
            k,
            COLUMNWISE=columnwise,
            RHT=q.with_rht and columnwise,
            SIGN_MASK=q.rht_matrix_random_sign_mask_t,
            RECIPROCAL=1.0 / (6.0 * q.nvfp4_e4m3_max),
            PER_LINE=q.row_scaled_nvfp4,
            SWIZZLED=q.optimize_for_gemm,
            FLOAT8=has_conversion(data.device, (8, 9)) if float8 is None else float8,
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
            enable_fp_fusion=False,
        )
