# SPDX-License-Identifier: Apache-2.0
"""MXFP8 codes and scales of both planes in one pass over the input.

Computes  te_mxfp8.reference.quantize, bit for bit.
Reads     x        [M, K] float32, bfloat16 or float16, any strides (in elements);
          noop     one float32, optional: exactly 1.0 leaves every output byte as it is.
Writes    codes    [M, K] uint8, contiguous, one buffer a plane;
          scales   uint8 in the padded shapes of te_mxfp8.layout, compact or swizzled, every byte:
                   the grid covers the padding, whose blocks are all zero and so have scale 0.
Grid      one axis, (cdiv(round_up(M, 128), BM) * cdiv(round_up(K, 128), BK),), K fastest:
          the second grid axis of a GPU ends at 65535, which a long 1-d tensor passes.
Numerics  maxima, bits and one exact-power-of-two product an element; no division, nothing to fuse.
          HARDWARE takes the conversions of sm_89 and later, with the same bits.
Checked   tests/test_kernels_quantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_mxfp8.kernels._launch import check_contiguous, current, has_float8_conversion
from te_mxfp8.kernels._scales import columnwise_scale_offset, rowwise_scale_offset
from te_mxfp8.layout import TILE_OUTER, matrix_shape, round_up
from te_proto.numerics.device import e8m0_from_amax, e8m0_reciprocal, encode

if TYPE_CHECKING:
    from torch import Tensor

TILE = (32, 128)
"""Rows and columns of one program."""


@triton.jit
def _rowwise(x, magnitude, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    BM: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    amax = tl.max(tl.reshape(magnitude, (BM, BK // 32, 32)), axis=2)
    scale = e8m0_from_amax(amax, DTYPE)
    scaled = tl.reshape(x, (BM, BK // 32, 32)) * e8m0_reciprocal(scale)[:, :, None]
    return encode(tl.reshape(scaled, (BM, BK)), DTYPE, HARDWARE), scale


@triton.jit
def _columnwise(x, magnitude, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    BM: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    amax = tl.max(tl.reshape(magnitude, (BM // 32, 32, BK)), axis=1)
    scale = e8m0_from_amax(amax, DTYPE)
    scaled = tl.reshape(x, (BM // 32, 32, BK)) * e8m0_reciprocal(scale)[:, None, :]
    return encode(tl.reshape(scaled, (BM, BK)), DTYPE, HARDWARE), scale


@triton.jit
def _two_d(x, magnitude, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    BM: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    amax = tl.max(tl.reshape(magnitude, (BM // 32, 32, BK // 32, 32)), axis=3)
    scale = e8m0_from_amax(tl.max(amax, axis=1), DTYPE)
    inverse = e8m0_reciprocal(scale)[:, None, :, None]
    scaled = tl.reshape(x, (BM // 32, 32, BK // 32, 32)) * inverse
    by_row = tl.broadcast_to(scale[:, None, :], (BM // 32, 32, BK // 32))
    by_col = tl.broadcast_to(scale[:, :, None], (BM // 32, BK // 32, 32))
    codes = encode(tl.reshape(scaled, (BM, BK)), DTYPE, HARDWARE)
    return codes, tl.reshape(by_row, (BM, BK // 32)), tl.reshape(by_col, (BM // 32, BK))


@triton.jit
def quantize_kernel(
    x_ptr,
    row_codes_ptr,
    row_scales_ptr,
    col_codes_ptr,
    col_scales_ptr,
    noop_ptr,
    M,
    K,
    stride_m,
    stride_k,
    DTYPE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    if noop_ptr is not None:  # noqa: SIM102 -- decided when compiled, the inner one at run time
        if tl.load(noop_ptr) == 1.0:
            return

    tiles_k = tl.cdiv(tl.cdiv(K, 128) * 128, BK)
    pid = tl.program_id(0)
    first_row = (pid // tiles_k).to(tl.int64) * BM
    first_col = (pid % tiles_k).to(tl.int64) * BK
    row = first_row + tl.arange(0, BM)
    col = first_col + tl.arange(0, BK)
    live = (row < M)[:, None] & (col < K)[None, :]
    offset = row[:, None] * stride_m + col[None, :] * stride_k
    x = tl.load(x_ptr + offset, mask=live, other=0.0).to(tl.float32)

    # the maximum with 0 drops NaN, so that a NaN never reaches the scale of its block
    magnitude = tl.maximum(tl.abs(x), 0.0)
    out = row[:, None] * K + col[None, :]
    if TWO_D:
        codes, row_scale, col_scale = _two_d(x, magnitude, DTYPE, HARDWARE)

    if ROWWISE:
        if not TWO_D:
            codes, row_scale = _rowwise(x, magnitude, DTYPE, HARDWARE)
        tl.store(row_codes_ptr + out, codes, mask=live)
        block = first_col // 32 + tl.arange(0, BK // 32)
        blocks = tl.cdiv(K, 128) * 4
        at = rowwise_scale_offset(row[:, None], block[None, :], blocks, SWIZZLED)
        inside = (row < tl.cdiv(M, 128) * 128)[:, None] & (block < blocks)[None, :]
        tl.store(row_scales_ptr + at, row_scale, mask=inside)

    if COLUMNWISE:
        if not TWO_D:
            codes, col_scale = _columnwise(x, magnitude, DTYPE, HARDWARE)
        tl.store(col_codes_ptr + out, codes, mask=live)
        block = first_row // 32 + tl.arange(0, BM // 32)
        blocks = tl.cdiv(M, 128) * 4
        cols = tl.cdiv(K, 128) * 128
        at = columnwise_scale_offset(block[:, None], col[None, :], blocks, cols, SWIZZLED)
        inside = (block < blocks)[:, None] & (col < cols)[None, :]
        tl.store(col_scales_ptr + at, col_scale, mask=inside)


def launch_quantize(
    x: Tensor,
    buffers: dict[str, Tensor],
    *,
    dtype: str,
    two_d: bool,
    swizzled: bool,
    noop: Tensor | None = None,
    tile: tuple[int, int] = TILE,
    hardware: bool | None = None,
) -> None:
    """Write the MXFP8 planes of ``x`` into ``buffers``, whose names say which planes.

    Args:
        x: ``[..., K]``, any strides; copied only if it is not a view ``[M, K]``.
        buffers: uint8, contiguous, in the shapes of :func:`te_mxfp8.layout.buffer_shapes`.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        two_d: one scale per 32x32 block.
        swizzled: scales in the order of the GEMM.
        noop: one float32 on the device of ``x``, read by the kernel; 1.0 leaves ``buffers`` alone.
        tile: rows and columns of one program, powers of two from 32.
        hardware: use the float8 conversions of the device; by default where it has them.

    Raises:
        LayoutError: a buffer is not contiguous.
    """
    for name, buffer in buffers.items():
        check_contiguous(name, buffer)
    m, k = matrix_shape(x.shape)
    if m == 0 or k == 0:
        return
    matrix = x.reshape(m, k)
    tile_m, tile_k = tile
    tiles_m = triton.cdiv(round_up(m, TILE_OUTER), tile_m)
    tiles_k = triton.cdiv(round_up(k, TILE_OUTER), tile_k)
    with current(x.device):
        quantize_kernel[(tiles_m * tiles_k,)](
            matrix,
            buffers.get("rowwise_data"),
            buffers.get("rowwise_scale_inv"),
            buffers.get("columnwise_data"),
            buffers.get("columnwise_scale_inv"),
            noop,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            DTYPE=dtype,
            ROWWISE="rowwise_data" in buffers,
            COLUMNWISE="columnwise_data" in buffers,
            TWO_D=two_d,
            SWIZZLED=swizzled,
            HARDWARE=has_float8_conversion(x.device) if hardware is None else hardware,
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
            enable_fp_fusion=False,
        )
