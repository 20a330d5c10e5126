# SPDX-License-Identifier: Apache-2.0
"""FP8 codes in both orders, and their scale, in one pass over the input.

Computes  te_fp8_current.reference.quantize, bit for bit.
Reads     x          [M, K] float32, bfloat16 or float16, any strides (in elements);
          amax       one float32, which every program turns into the scale;
          noop       one float32, optional: exactly 1.0 leaves every output byte as it is.
Writes    codes      [M, K] uint8, contiguous, optional;
          transpose  [K, M] uint8, contiguous, optional: the same codes;
          scale_inv  one float32, by the first program.
Grid      one axis, (max(1, cdiv(M, BM) * cdiv(K, BK)),), K fastest; the ragged edge is masked, and
          an empty tensor has a program for its scale.
Numerics  two correctly rounded divisions a program and one float32 product an element; nothing to
          fuse. HARDWARE takes the conversions of sm_89 and later, with the same bits.
Checked   tests/test_kernels_quantize.py, on CPU by the exact interpreter and on GPU;
          tests/test_kernels_aot.py, ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from te_fp8_current.layout import matrix_shape
from te_proto.launch import check_contiguous, current, has_conversion
from te_proto.numerics.device import encode

if TYPE_CHECKING:
    from torch import Tensor

TILE = (64, 64)
"""Rows and columns of one program, square: it writes runs of either."""


@triton.jit
def scale_from_amax(amax, epsilon, DTYPE: tl.constexpr, POW_2: tl.constexpr):
    """The scale of reference.scale_from_amax; ``amax`` and ``epsilon`` are float32."""
    LARGEST: tl.constexpr = 448.0 if DTYPE == "e4m3" else 57344.0
    # a comparison, not a maximum, keeps NaN on every target
    amax = tl.where(amax < epsilon, epsilon, amax)
    bits = amax.to(tl.int32, bitcast=True)
    usable = (bits > 0) & (bits < 0x7F800000)
    scale = tl.div_rn(LARGEST, tl.where(usable, amax, 1.0)).to(tl.int32, bitcast=True)
    scale = tl.minimum(scale, 0x7F7FFFFF)
    if POW_2:
        scale = scale & 0x7F800000
    return tl.where(usable, scale, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def quantize_kernel(
    x_ptr,
    amax_ptr,
    codes_ptr,
    transpose_ptr,
    scale_inv_ptr,
    noop_ptr,
    M,
    K,
    stride_m,
    stride_k,
    epsilon,
    DTYPE: tl.constexpr,
    POW_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    if noop_ptr is not None:  # noqa: SIM102 -- decided when compiled, the inner one at run time
        if tl.load(noop_ptr) == 1.0:
            return

    pid = tl.program_id(0)
    scale = scale_from_amax(tl.load(amax_ptr), epsilon, DTYPE, POW_2)
    if pid == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))

    tiles_k = tl.maximum(tl.cdiv(K, BK), 1)
    row = (pid // tiles_k).to(tl.int64) * BM + tl.arange(0, BM)
    col = (pid % tiles_k).to(tl.int64) * BK + tl.arange(0, BK)
    live = (row < M)[:, None] & (col < K)[None, :]
    offset = row[:, None] * stride_m + col[None, :] * stride_k
    x = tl.load(x_ptr + offset, mask=live, other=0.0).to(tl.float32)
    codes = encode(x * scale, DTYPE, HARDWARE)

    if codes_ptr is not None:
        tl.store(codes_ptr + row[:, None] * K + col[None, :], codes, mask=live)
    if transpose_ptr is not None:
        moved = col[:, None] * M + row[None, :]
        live = (col < K)[:, None] & (row < M)[None, :]
        tl.store(transpose_ptr + moved, tl.trans(codes), mask=live)


def launch_quantize(
    x: Tensor,
    amax: Tensor,
    buffers: dict[str, Tensor],
    *,
    dtype: str,
    force_pow_2_scales: bool,
    amax_epsilon: float,
    noop: Tensor | None = None,
    tile: tuple[int, int] = TILE,
    hardware: bool | None = None,
) -> None:
    """Write codes and scale of ``x`` into ``buffers``, whose names say which orders.

    Args:
        x: any shape and strides; copied only if it is not a view ``[M, K]``.
        amax: float32 ``[1]`` on the device of ``x``.
        buffers: contiguous, in the shapes of :func:`te_fp8_current.layout.buffer_shapes`.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: a smaller ``amax`` counts as this.
        noop: one float32 on the device of ``x``, read by the kernel; 1.0 leaves ``buffers`` alone.
        tile: rows and columns of one program, powers of two.
        hardware: use the float8 conversions of the device; by default where it has them.

    Raises:
        LayoutError: a buffer is not contiguous.
    """
    for name, buffer in buffers.items():
        check_contiguous("fp8_current", name, buffer)
    m, k = matrix_shape(x.shape)
    matrix = x.reshape(m, k)
    tile_m, tile_k = tile
    with current(x.device):
        quantize_kernel[(max(1, triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k)),)](
            matrix,
            amax,
            buffers.get("fp8_data"),
            buffers.get("data_transpose"),
            buffers["fp8_scale_inv"],
            noop,
            m,
            k,
            matrix.stride(0),
            matrix.stride(1),
            float(amax_epsilon),
            DTYPE=dtype,
            POW_2=force_pow_2_scales,
            HARDWARE=has_conversion(x.device, (8, 9)) if hardware is None else hardware,
            BM=tile_m,
            BK=tile_k,
            num_warps=4,
            enable_fp_fusion=False,
        )
