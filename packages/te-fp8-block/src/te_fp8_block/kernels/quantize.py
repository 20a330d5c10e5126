# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of both planes of block-scaled FP8, in one pass over the input.

Computes  te_fp8_block.reference.quantize, bit for bit.
Reads     x        [M, K] float32, bfloat16 or float16, any strides (in elements);
          noop     one float32, optional: exactly 1.0 leaves every output byte as it is.
Writes    codes    rowwise [M, K] and columnwise [K, M] uint8, contiguous;
          scales   float32 in the padded shapes of te_fp8_block.layout, every byte: padding is zero.
Grid      one axis, cdiv(M', BM) * cdiv(K', BK), K fastest: the second grid axis of a GPU ends at
          65535, which a long 1-d tensor passes. M' and K' are M and K, in 2-D rounded up to 512,
          so that the grid covers the padding of the scales.
Numerics  two correctly rounded divisions a block and one float32 product an element, nothing to
          fuse. HARDWARE takes the conversions of sm_89 and later, with the same bits.
Checked   tests/test_kernels_quantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from te_fp8_block._format import FORMAT
from te_fp8_block.layout import BLOCK, SCALE_MULTIPLE, matrix_shape
from te_proto.blocks import round_up
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics import element_format
from te_proto.numerics.device import encode

if TYPE_CHECKING:
    from torch import Tensor

ROWWISE_TILE = (32, 128)
"""Rows and columns of one program that makes the rowwise plane of 1x128 blocks alone."""

COLUMNWISE_TILE = (128, 64)
"""The same for the columnwise plane."""

TILE = (128, 128)
"""The same for both planes, and for blocks of 128x128."""


@triton.jit
def _block_scale(amax, epsilon, TOP: tl.constexpr, LARGEST: tl.constexpr, POW_2: tl.constexpr):
    amax = tl.maximum(amax, epsilon)
    unscaled = (amax == 0.0) | (amax == float("inf"))
    scale = tl.div_rn(tl.full(amax.shape, TOP, tl.float32), tl.where(unscaled, 1.0, amax))
    scale = tl.where(scale == float("inf"), LARGEST, scale)
    if POW_2:
        # sign and exponent alone
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return tl.where(unscaled, 1.0, scale)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


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
    epsilon,
    DTYPE: tl.constexpr,
    TOP: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    HARDWARE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    if noop_ptr is not None:  # noqa: SIM102 -- decided when compiled, the inner one at run time
        if tl.load(noop_ptr) == 1.0:
            return

    blocks_m = tl.cdiv(M, 128)
    blocks_k = tl.cdiv(K, 128)
    tiles_k = tl.cdiv(tl.cdiv(blocks_k, 4) * 512 if TWO_D else K, BK)
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
    if TWO_D:
        amax = tl.max(tl.reshape(magnitude, (BM // 128, 128, BK // 128, 128)), axis=3)
        scale = _block_scale(tl.max(amax, axis=1), epsilon, TOP, LARGEST, POW_2)
        scaled = tl.reshape(x, (BM // 128, 128, BK // 128, 128)) * scale[:, None, :, None]
        codes = encode(tl.reshape(scaled, (BM, BK)), DTYPE, HARDWARE)
        inverse = _inverse(scale)
        down = (first_row // 128 + tl.arange(0, BM // 128))[:, None]
        across = (first_col // 128 + tl.arange(0, BK // 128))[None, :]
        inverse = tl.where((down < blocks_m) & (across < blocks_k), inverse, 0.0)

    if ROWWISE:
        if TWO_D:
            width = tl.cdiv(blocks_k, 4) * 4
            at = down * width + across
            inside = (down < blocks_m) & (across < width)
        else:
            amax = tl.max(tl.reshape(magnitude, (BM, BK // 128, 128)), axis=2)
            scale = _block_scale(amax, epsilon, TOP, LARGEST, POW_2)
            scaled = tl.reshape(x, (BM, BK // 128, 128)) * scale[:, :, None]
            codes = encode(tl.reshape(scaled, (BM, BK)), DTYPE, HARDWARE)
            inverse = tl.where((row < M)[:, None], _inverse(scale), 0.0)
            block = first_col // 128 + tl.arange(0, BK // 128)
            width = tl.cdiv(M, 4) * 4
            at = block[None, :] * width + row[:, None]
            inside = (row < width)[:, None] & (block < blocks_k)[None, :]
        tl.store(row_codes_ptr + row[:, None] * K + col[None, :], codes, mask=live)
        tl.store(row_scales_ptr + at, inverse, mask=inside)

    if COLUMNWISE:
        if TWO_D:
            width = tl.cdiv(blocks_m, 4) * 4
            at = across * width + down
            inside = (across < blocks_k) & (down < width)
        else:
            amax = tl.max(tl.reshape(magnitude, (BM // 128, 128, BK)), axis=1)
            scale = _block_scale(amax, epsilon, TOP, LARGEST, POW_2)
            scaled = tl.reshape(x, (BM // 128, 128, BK)) * scale[:, None, :]
            codes = encode(tl.reshape(scaled, (BM, BK)), DTYPE, HARDWARE)
            inverse = tl.where((col < K)[None, :], _inverse(scale), 0.0)
            block = first_row // 128 + tl.arange(0, BM // 128)
            width = tl.cdiv(K, 4) * 4
            at = block[:, None] * width + col[None, :]
            inside = (block < blocks_m)[:, None] & (col < width)[None, :]
        # rows of the output are columns of the tile
        turned = col[:, None] * M + row[None, :]
        tl.store(col_codes_ptr + turned, tl.trans(codes), mask=tl.trans(live))
        tl.store(col_scales_ptr + at, inverse, mask=inside)


def warps_of(tile: tuple[int, int], *, hardware: bool) -> int:
    """Return the warps of one program: so many that no register spills.

    That is 32 elements a thread, or 16 where it encodes them by integers.
    """
    each, most = (1024, 16) if hardware else (512, 32)
    return max(1, min(most, tile[0] * tile[1] // each))


def launch_quantize(
    x: Tensor,
    buffers: dict[str, Tensor],
    *,
    dtype: str,
    two_d: bool,
    pow_2: bool,
    amax_epsilon: float,
    noop: Tensor | None = None,
    tile: tuple[int, int] | None = None,
    hardware: bool | None = None,
) -> None:
    """Write the planes of ``x`` into ``buffers``, whose names say which planes.

    Args:
        x: any shape and strides; copied only if it is not a view ``[M, K]``.
        buffers: contiguous, as :func:`te_fp8_block.layout.buffer_shapes` says.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        two_d: one scale per 128x128 block.
        pow_2: round ``scale`` down to a power of two.
        amax_epsilon: smallest maximum that a block counts with.
        noop: one float32 on the device of ``x``, read by the kernel; 1.0 leaves ``buffers`` alone.
        tile: rows and columns of one program, powers of two; a multiple of 128 along an axis that
            is cut into blocks.
        hardware: use the float8 conversions of the device; by default where it has them.

    Raises:
        LayoutError: a buffer is not contiguous.
    """
    for name, buffer in buffers.items():
        check_contiguous(FORMAT.name, name, buffer)
    m, k = matrix_shape(x.shape)
    if m == 0 or k == 0:
        return
    rowwise, columnwise = "rowwise_data" in buffers, "columnwise_data" in buffers
    if tile is None:
        tile = TILE
        if not two_d and not (rowwise and columnwise):
            tile = ROWWISE_TILE if rowwise else COLUMNWISE_TILE
    if hardware is None:
        hardware = has_conversion(x.device, (8, 9))
    tile_m, tile_k = tile
    matrix = x.reshape(m, k)
    multiple = BLOCK * SCALE_MULTIPLE if two_d else 1
    tiles_m = triton.cdiv(round_up(m, multiple), tile_m)
    tiles_k = triton.cdiv(round_up(k, multiple), tile_k)
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
            float(amax_epsilon),
            DTYPE=dtype,
            TOP=element_format(dtype).max,
            LARGEST=torch.finfo(x.dtype).max,
            POW_2=pow_2,
            ROWWISE=rowwise,
            COLUMNWISE=columnwise,
            TWO_D=two_d,
            HARDWARE=hardware,
            BM=tile_m,
            BK=tile_k,
            num_warps=warps_of(tile, hardware=hardware),
            enable_fp_fusion=False,
        )
