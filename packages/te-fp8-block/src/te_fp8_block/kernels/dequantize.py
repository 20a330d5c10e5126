# SPDX-License-Identifier: Apache-2.0
"""Values of one plane of block-scaled FP8.

Computes  te_fp8_block.reference.dequantize, bit for bit.
Reads     codes    [R, C] uint8, any strides (in elements): R, C are M, K, and K, M if COLUMNWISE;
          scales   float32 in the padded shape of te_fp8_block.layout, contiguous.
Writes    out      [M, K] float32, bfloat16 or float16, contiguous.
Grid      one axis, (cdiv(R, BR) * cdiv(C, BC),), C fastest; the ragged edge is masked.
Numerics  one float32 product an element and one rounding to the type of out.
          HARDWARE takes the conversions of sm_89 and later; only the payload of a NaN may differ.
Checked   tests/test_kernels_dequantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_fp8_block._format import FORMAT
from te_fp8_block.layout import matrix_shape
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics.device import decode

if TYPE_CHECKING:
    from torch import Tensor

TILE = (32, 128)
"""Rows and columns of the codes that one program reads."""


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    R,
    C,
    stride_r,
    stride_c,
    DTYPE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    HARDWARE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    tiles_c = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    first_col = (pid % tiles_c).to(tl.int64) * BC
    row = (pid // tiles_c).to(tl.int64) * BR + tl.arange(0, BR)
    col = first_col + tl.arange(0, BC)
    live = (row < R)[:, None] & (col < C)[None, :]
    offset = row[:, None] * stride_r + col[None, :] * stride_c
    values = decode(tl.load(codes_ptr + offset, mask=live, other=0), DTYPE, HARDWARE)

    block = first_col // 128 + tl.arange(0, BC // 128)
    blocks = tl.cdiv(C, 128)
    if TWO_D:
        at = (row // 128)[:, None] * (tl.cdiv(blocks, 4) * 4) + block[None, :]
    else:
        at = block[None, :] * (tl.cdiv(R, 4) * 4) + row[:, None]
    inside = (row < R)[:, None] & (block < blocks)[None, :]
    scale = tl.load(scales_ptr + at, mask=inside, other=0.0)
    values = tl.reshape(values, (BR, BC // 128, 128)) * scale[:, :, None]
    out = tl.reshape(values, (BR, BC)).to(out_ptr.dtype.element_ty)

    if COLUMNWISE:
        # rows of the output are columns of the tile
        turned = col[:, None] * R + row[None, :]
        tl.store(out_ptr + turned, tl.trans(out), mask=tl.trans(live))
    else:
        tl.store(out_ptr + row[:, None] * C + col[None, :], out, mask=live)


def launch_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    out: Tensor,
    *,
    dtype: str,
    columnwise: bool,
    two_d: bool,
    tile: tuple[int, int] = TILE,
    hardware: bool | None = None,
) -> None:
    """Write the values of one plane into ``out``, whose dtype says how they are rounded.

    Args:
        data: uint8 codes, those of the columnwise plane transposed.
        scale_inv: the plane's scale buffer.
        out: float32, bfloat16 or float16 of the logical shape, contiguous.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        columnwise: which plane the buffers are.
        two_d: one scale per 128x128 block.
        tile: rows and columns of the codes of one program, powers of two, columns from 128.
        hardware: use the float8 conversions of the device; by default where it has them.

    Raises:
        LayoutError: ``out`` is not contiguous.
    """
    check_contiguous(FORMAT.name, "out", out)
    m, k = matrix_shape(out.shape)
    if m == 0 or k == 0:
        return
    rows, columns = (k, m) if columnwise else (m, k)
    matrix = data.reshape(rows, columns)
    tile_r, tile_c = tile
    with current(data.device):
        dequantize_kernel[(triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)](
            matrix,
            scale_inv.contiguous(),
            out,
            rows,
            columns,
            matrix.stride(0),
            matrix.stride(1),
            DTYPE=dtype,
            COLUMNWISE=columnwise,
            TWO_D=two_d,
            HARDWARE=has_conversion(data.device, (8, 9)) if hardware is None else hardware,
            BR=tile_r,
            BC=tile_c,
            num_warps=4,
            enable_fp_fusion=False,
        )
