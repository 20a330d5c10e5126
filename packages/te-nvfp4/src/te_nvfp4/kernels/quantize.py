# SPDX-License-Identifier: Apache-2.0
"""NVFP4 codes and scales of both planes in one pass over the input, under amaxes that are known.

Computes  te_nvfp4.reference.quantize, bit for bit.
Reads     x        [M, K] float32, bfloat16 or float16, any strides (in elements);
          amaxes   float32, one or one a line, of each plane;
          rng      int64 [2], seed and offset, optional: rounds stochastically;
          noop     one float32, optional: exactly 1.0 leaves every output byte as it is.
Writes    codes    [M, K // 2] and [K, M // 2] uint8, contiguous;
          scales   uint8 in the padded shapes of te_nvfp4.layout, compact or swizzled, every byte:
                   the grid covers the padding, whose blocks are all zero and so have scale 0;
          amaxes   copies of those read, into the buffers of the result.
Grid      one axis, (cdiv(round_up(M, 128), BM) * cdiv(round_up(K, 128), BK),), K fastest.
Numerics  tl.div_rn divides; the launcher turns contraction off.
Checked   tests/test_kernels_quantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from te_nvfp4.kernels._device import transform
from te_nvfp4.kernels._plane import (
    four_over_six,
    nearest,
    pack_nearest,
    pack_stochastic,
    random_bytes,
)
from te_proto.blocks import TILE_OUTER, matrix_shape, round_up
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics.device import rowwise_scale_offset

if TYPE_CHECKING:
    from torch import Tensor

    from te_nvfp4.quantizer import NVFP4Quantizer

TILE = (32, 128)
"""Rows and columns of one program."""


@triton.jit
def _write_plane(
    x,
    amax_ptr,
    codes_ptr,
    scales_ptr,
    amax_out_ptr,
    rng_ptr,
    line,
    first,
    lines,
    size,
    R: tl.constexpr,
    C: tl.constexpr,
    PLANE: tl.constexpr,
    SIX_E: tl.constexpr,
    PER_LINE: tl.constexpr,
    TWO_D: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SQUARED: tl.constexpr,
    FAST: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FLOAT8: tl.constexpr,
    FLOAT4: tl.constexpr,
):
    """Write the tile ``x`` ``[R, C]`` of a plane of ``lines`` lines of ``size`` elements."""
    live = line < lines
    if PER_LINE:
        own = tl.load(amax_ptr + line, mask=live, other=0.0)
        tl.store(amax_out_ptr + line, own, mask=live & (first == 0))
        amax = own[:, None]
    else:
        one = tl.load(amax_ptr)
        tl.store(amax_out_ptr, one, mask=(tl.min(line, axis=0) == 0) & (first == 0))
        amax = tl.full((1, 1), 0.0, tl.float32) + one

    block = first // 16 + tl.arange(0, C // 16)
    if FOUR_OVER_SIX:
        scale, packed = four_over_six(x, amax, R, C, SIX_E, TWO_D, SQUARED, FAST, FLOAT8)
    else:
        scale, values = nearest(x, amax, R, C, SIX_E, TWO_D, FLOAT8)
        if rng_ptr is not None:
            number = line[:, None] * (size // 16) + block[None, :]
            bits = random_bytes(rng_ptr, number, R, C, PLANE)
            packed = pack_stochastic(values, bits, R, C)
        else:
            packed = pack_nearest(values, R, C, FLOAT4)

    pair = first // 2 + tl.arange(0, C // 2)
    inside = live[:, None] & (pair < size // 2)[None, :]
    tl.store(codes_ptr + line[:, None] * (size // 2) + pair[None, :], packed, mask=inside)
    blocks = tl.cdiv(size, 64) * 4
    at = rowwise_scale_offset(line[:, None], block[None, :], blocks, SWIZZLED)
    inside = (line < tl.cdiv(lines, 128) * 128)[:, None] & (block < blocks)[None, :]
    tl.store(scales_ptr + at, scale, mask=inside)


@triton.jit
def quantize_kernel(
    x_ptr,
    row_amax_ptr,
    col_amax_ptr,
    row_codes_ptr,
    row_scales_ptr,
    row_amax_out_ptr,
    col_codes_ptr,
    col_scales_ptr,
    col_amax_out_ptr,
    rng_ptr,
    noop_ptr,
    M,
    K,
    stride_m,
    stride_k,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    SIX_E: tl.constexpr,
    PER_LINE: tl.constexpr,
    TWO_D: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SQUARED: tl.constexpr,
    FAST: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FLOAT8: tl.constexpr,
    FLOAT4: tl.constexpr,
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

    if ROWWISE:
        _write_plane(
            x,
            row_amax_ptr,
            row_codes_ptr,
            row_scales_ptr,
            row_amax_out_ptr,
            rng_ptr,
            row,
            first_col,
            M,
            K,
            BM,
            BK,
            0,
            SIX_E,
            PER_LINE,
            TWO_D,
            FOUR_OVER_SIX,
            SQUARED,
            FAST,
            SWIZZLED,
            FLOAT8,
            FLOAT4,
        )

    if COLUMNWISE:
        turned = tl.trans(x)
        if RHT:
            turned = transform(turned, BK, BM, SIGN_MASK)
        _write_plane(
            turned,
            col_amax_ptr,
            col_codes_ptr,
            col_scales_ptr,
            col_amax_out_ptr,
            rng_ptr,
            col,
            first_row,
            K,
            M,
            BK,
            BM,
            1,
            SIX_E,
            PER_LINE,
            TWO_D,
            FOUR_OVER_SIX,
            SQUARED,
            FAST,
            SWIZZLED,
            FLOAT8,
            FLOAT4,
        )


def launch_quantize(
    x: Tensor,
    buffers: dict[str, Tensor],
    q: NVFP4Quantizer,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    *,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    tile: tuple[int, int] = TILE,
    float8: bool | None = None,
    float4: bool | None = None,
) -> None:
    """Write the NVFP4 planes of ``x`` into ``buffers``, whose names say which planes.

    Args:
        x: ``[..., K]``, any strides; copied only if it is not a view ``[M, K]``.
        buffers: contiguous, in the shapes of :func:`te_nvfp4.layout.buffer_shapes`.
        q: the options; of ``stochastic_rounding``, ``rng`` decides.
        row_amax: float32 amax of the rowwise plane, None without one.
        col_amax: of the columnwise plane; may be the same tensor.
        rng: int64 ``[2]``, seed and offset.
        noop: one float32 on the device of ``x``, read by the kernel; 1.0 leaves ``buffers`` alone.
        tile: rows and columns of one program, powers of two from 32.
        float8: use the E4M3 conversion of the device; by default where it has it.
        float4: use the E2M1 conversion of the device; by default where it has it.

    Raises:
        LayoutError: a buffer is not contiguous.
    """
    for name, buffer in buffers.items():
        check_contiguous("nvfp4", name, buffer)
    m, k = matrix_shape(x.shape)
    if m == 0 or k == 0:
        for name, amax in (("amax_rowwise", row_amax), ("amax_columnwise", col_amax)):
            if amax is not None:
                kept = amax if noop is None else torch.where(noop == 1.0, buffers[name], amax)
                buffers[name].copy_(kept)
        return
    matrix = x.reshape(m, k)
    tile_m, tile_k = tile
    tiles_m = triton.cdiv(round_up(m, TILE_OUTER), tile_m)
    tiles_k = triton.cdiv(round_up(k, TILE_OUTER), tile_k)
    with current(x.device):
        quantize_kernel[(tiles_m * tiles_k,)](
            matrix,
            row_amax,
            col_amax,
            buffers.get("rowwise_data"),
            buffers.get("rowwise_scale_inv"),
            buffers.get("amax_rowwise"),
            buffers.get("columnwise_data"),
            buffers.get("columnwise_scale_inv"),
            buffers.get("amax_columnwise"),
            rng,
            noop,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            ROWWISE="rowwise_data" in buffers,
            COLUMNWISE="columnwise_data" in buffers,
            RHT=q.with_rht,
            SIGN_MASK=q.rht_matrix_random_sign_mask_t,
            SIX_E=6.0 * q.nvfp4_e4m3_max,
            PER_LINE=q.row_scaled_nvfp4,
            TWO_D=q.with_2d_quantization,
            FOUR_OVER_SIX=q.nvfp4_use_4over6,
            SQUARED=q.nvfp4_4over6_err_mode == "MSE",
            FAST=q.nvfp4_4over6_err_use_fast_math,
            SWIZZLED=q.optimize_for_gemm,
            FLOAT8=has_conversion(x.device, (8, 9)) if float8 is None else float8,
            FLOAT4=has_conversion(x.device, (10, 0)) if float4 is None else float4,
            BM=tile_m,
            BK=tile_k,
            num_warps=8,
            enable_fp_fusion=False,
        )
