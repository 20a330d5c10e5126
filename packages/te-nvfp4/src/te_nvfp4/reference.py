# SPDX-License-Identifier: Apache-2.0
"""NVFP4 in plain torch: the definition of the format, which the kernels obey bit for bit.

Pure functions of tensors and a quantizer's fields. They run on any device, take any strides and
trace with dynamic sizes; under ``torch.compile`` they are ordinary operations that fuse with their
neighbours. Shapes are the caller's to check.

All is float32 with one rounding an operation, divisions included. Values are kept as the input has
them, ``[rows, blocks, 16]`` for the rowwise and ``[blocks, 16, columns]`` for the columnwise plane;
only packed codes and scales are transposed, a quarter of the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_nvfp4 import hadamard
from te_nvfp4.four_over_six import choose
from te_nvfp4.layout import BLOCK, measured_amaxes, scale_shape
from te_nvfp4.philox import block_bytes
from te_nvfp4.rounding import (
    decode_columns,
    decode_rows,
    encode_e2m1_stochastic,
    pack_columns,
    pack_rows,
)
from te_nvfp4.scales import block_scales, fill, tensor_scales
from te_proto.blocks import matrix_shape
from te_proto.graphs import is_compiling
from te_proto.numerics import (
    E2M1_MAX,
    cut,
    decode_e4m3,
    encode_e2m1,
    in_slabs,
    magnitudes,
    materialize,
    round_to,
    swizzle,
    unswizzle,
    whole_tiles,
)

if TYPE_CHECKING:
    from te_nvfp4.quantizer import NVFP4Quantizer


class _Plane(NamedTuple):
    """One plane before it is quantized.

    Attributes:
        name: ``"rowwise"`` or ``"columnwise"``.
        axis: of ``values`` along which a block lies.
        values: ``[rows, blocks, 16]`` or, columnwise, ``[blocks, 16, columns]``.
        block_amax: float32 magnitude of the largest element of each block, NaN ignored; a 16x16
            block has it once a line.
    """

    name: str
    axis: int
    values: Tensor
    block_amax: Tensor


def quantize(
    x: Tensor, q: NVFP4Quantizer, group: str | None = None, rng: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the NVFP4 buffers of ``x``, present planes only, in canonical order.

    NaN is ignored in every amax and becomes code 7, +6. A zero keeps its sign. A block whose scale
    rounds to zero keeps codes of +-6, which stand for 0.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16, any device and strides, may be empty.
        q: the options.
        group: c10d name of the group over which amaxes are reduced, with ``with_amax_reduction``.
        rng: int64 ``[2]``, seed and offset, with ``stochastic_rounding``.

    Returns:
        Buffers in the shapes of :func:`te_nvfp4.layout.buffer_shapes`. Scale padding is zero. An
        empty ``x`` has amaxes of zero, or those of the group.

    Source:
        TransformerEngine, ``common/cast/nvfp4`` and ``transpose/*_fp4.cu``.
    """
    m, k = matrix_shape(x.shape)
    if m == 0 or k == 0:
        return _empty(x, q, group)
    matrix = x.reshape(m, k)
    planes = _planes(whole_tiles(matrix) if is_compiling() else matrix, q)
    amaxes = _amaxes(planes, q, group)
    data: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for plane, amax in zip(planes, amaxes, strict=True):
        code, packed = _encode(plane, amax, q, (m, k), rng)
        if plane.name == "rowwise":
            outer, (rows, columns) = m, scale_shape(m, k)
            packed = cut(packed, m, k // 2).view(*x.shape[:-1], k // 2)
            scale = _fit(code, rows, columns)
        else:
            # cut first: columns of a size that a graph does not know would guard on it
            outer, (columns, rows) = k, scale_shape(k, m)
            # not contiguous(), which keeps the strides of a single column
            packed = cut(packed, m // 2, k).t().clone(memory_format=torch.contiguous_format)
            scale = _fit(code, rows, columns).t().contiguous()
        data[f"{plane.name}_data"] = packed
        data[f"{plane.name}_scale_inv"] = swizzle(scale) if q.optimize_for_gemm else scale
        # the padded lines of a graph are cut off; abs makes memory of its own
        amax = amax.flatten()
        held[f"amax_{plane.name}"] = amax[:outer].abs() if q.row_scaled_nvfp4 else amax
    return data | held


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    q: NVFP4Quantizer,
    shape: tuple[int, ...],
    *,
    columnwise: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the values that one plane stands for, in the logical shape.

    ``code * ((scale_inv * amax) * fl32(1 / (6 * e4m3_max)))`` in float32, then rounded once to
    ``out_dtype``. A columnwise plane made ``with_rht`` is transformed back in between, in the fixed
    order of :func:`te_nvfp4.hadamard.inverse`.

    Args:
        data: uint8, two codes a byte: ``[..., K // 2]`` or, columnwise, ``[K, M // 2]``.
        scale_inv: the plane's E4M3 scale buffer, padded.
        amax: float32, ``[1]``, or with ``row_scaled_nvfp4`` one a row or column.
        q: the options.
        shape: logical shape.
        columnwise: which plane the buffers are.
        out_dtype: float32, bfloat16 or float16.
    """
    m, k = matrix_shape(shape)
    if m == 0 or k == 0:
        return torch.empty(shape, dtype=out_dtype, device=data.device)
    outer, inner = (k, m) if columnwise else (m, k)
    packed = data.reshape(outer, inner // 2)
    scale = decode_e4m3(unswizzle(scale_inv) if q.optimize_for_gemm else scale_inv)
    if is_compiling():
        packed = whole_tiles(packed, columns=32)
        if q.row_scaled_nvfp4:
            amax = whole_tiles(amax.unsqueeze(1), columns=1)
    else:
        scale = scale[:outer, : inner // BLOCK]
        amax = amax.unsqueeze(1) if q.row_scaled_nvfp4 else amax
    factor = scale * amax * fill(scale, 1.0 / (E2M1_MAX * q.nvfp4_e4m3_max))
    factor = materialize(factor.t() if columnwise else factor)
    if columnwise:
        packed = materialize(packed.t().contiguous()).unflatten(0, (-1, BLOCK // 2))

    def values(first: int, packed: Tensor, factor: Tensor) -> tuple[Tensor]:
        if not columnwise:
            blocks = decode_rows(packed).unflatten(1, (-1, BLOCK))
            return (round_to((blocks * factor.unsqueeze(2)).flatten(1), out_dtype),)
        columns = decode_columns(packed.flatten(0, 1)).unflatten(0, (-1, BLOCK))
        columns = columns * factor.unsqueeze(1)
        if q.with_rht:
            columns = hadamard.inverse(columns, signs=q.with_random_sign_mask)
        return (round_to(columns.flatten(0, 1), out_dtype),)

    (made,) = in_slabs(values, packed, factor)
    # flat in between, which drops the strides of a single column
    return cut(made, m, k).flatten().view(shape)


def compact_scale(scale_inv: Tensor, outer: int, inner: int, swizzled: bool) -> Tensor:
    """Return the scales of a plane's blocks, ``[outer, inner // 16]`` without padding."""
    return (unswizzle(scale_inv) if swizzled else scale_inv)[:outer, : inner // BLOCK]


def store_scale(scale: Tensor, outer: int, inner: int, swizzled: bool) -> Tensor:
    """Return the scale buffer that holds these scales, the inverse of :func:`compact_scale`."""
    padded = _fit(scale, *scale_shape(outer, inner))
    return swizzle(padded) if swizzled else padded


def _fit(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return ``scale`` padded with zeros, or what a graph padded more than enough cut off."""
    if is_compiling():
        return cut(scale, rows, columns)
    return pad(scale, (0, columns - scale.shape[1], 0, rows - scale.shape[0])).contiguous()


def _planes(tiles: Tensor, q: NVFP4Quantizer) -> list[_Plane]:
    planes = []
    if q.rowwise:
        values = tiles.unflatten(1, (-1, BLOCK))
        planes.append(_Plane("rowwise", 2, values, _block_amax(values, 2, q)))
    if q.columnwise:
        values = tiles.unflatten(0, (-1, BLOCK))
        if q.with_rht:
            signs = q.with_random_sign_mask
            (values,) = in_slabs(lambda _, x: (hadamard.transform(x, signs=signs),), values)
        planes.append(_Plane("columnwise", 1, values, _block_amax(values, 1, q)))
    return planes


def _block_amax(values: Tensor, axis: int, q: NVFP4Quantizer) -> Tensor:
    def largest(first: int, x: Tensor) -> tuple[Tensor]:
        return (magnitudes(x).amax(axis).float(),)

    (amax,) = in_slabs(largest, values)
    if not q.with_2d_quantization:
        return amax
    # the other axis in 16 lines, which share their maximum
    other = 0 if axis == 2 else 1
    lines: Tensor = amax.unflatten(other, (-1, BLOCK))
    return lines.amax(other + 1, keepdim=True).expand_as(lines).flatten(other, other + 1)


def _amaxes(planes: list[_Plane], q: NVFP4Quantizer, group: str | None) -> list[Tensor]:
    """Return the amax of each plane, with two axes, as it broadcasts to the blocks."""
    if q.row_scaled_nvfp4:
        return [p.block_amax.amax(1 if p.axis == 2 else 0, keepdim=True) for p in planes]
    measured = planes[: len(measured_amaxes(q))]
    return _reduced([p.block_amax.amax().view(1, 1) for p in measured], len(planes), group)


def _reduced(amaxes: list[Tensor], planes: int, group: str | None) -> list[Tensor]:
    """Return the amaxes over ``group``, one for each of ``planes``."""
    if group is not None:
        from te_proto.collectives import all_reduce_max  # needs a torch built with distributed

        amaxes = [all_reduce_max(amax, group) for amax in amaxes]
    return amaxes if len(amaxes) == planes else [amaxes[0], amaxes[0].abs()]  # its own memory


def _empty(x: Tensor, q: NVFP4Quantizer, group: str | None) -> dict[str, Tensor]:
    """Return the buffers of an ``x`` without elements, which takes part in a reduction."""
    specs = q.describe_buffers(x.shape).items()
    out = {n: torch.zeros(s.shape, dtype=s.dtype, device=x.device) for n, s in specs}
    if group is not None:
        amaxes = [name for name in out if name.startswith("amax")]
        measured = [out[name] for name in measured_amaxes(q)]
        out.update(zip(amaxes, _reduced(measured, len(amaxes), group), strict=True))
    return out


def _encode(
    plane: _Plane, amax: Tensor, q: NVFP4Quantizer, size: tuple[int, int], rng: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the E4M3 code of each block and the packed codes of the elements, columns as rows."""
    (m, k), axis = size, plane.axis

    def encode(first: int, x: Tensor, block_amax: Tensor, *lines: Tensor) -> tuple[Tensor, Tensor]:
        own = lines[0] if lines else amax
        scales = tensor_scales(own, q.nvfp4_e4m3_max)
        if q.nvfp4_use_4over6:
            code, elements = choose(x, axis, block_amax, own, scales, q)
        else:
            code, multiplier = block_scales(block_amax, scales)
            values = x * multiplier.unsqueeze(axis)
            if rng is None:
                elements = encode_e2m1(values)
            else:
                row = torch.arange(first, first + code.shape[0], device=x.device).unsqueeze(1)
                column = torch.arange(code.shape[1], device=x.device)
                number = row * (k // BLOCK) + column if axis == 2 else column * (m // BLOCK) + row
                bits = block_bytes(rng, number, axis, columnwise=axis == 1)
                elements = encode_e2m1_stochastic(values, bits)
        if axis == 2:
            return code, pack_rows(elements.flatten(1))
        return code, pack_columns(elements.flatten(0, 1))

    lines = (amax,) if q.row_scaled_nvfp4 and axis == 2 else ()
    # the rows of a 16x16 block stay together
    rows = BLOCK if axis == 2 else 1
    code, packed = in_slabs(encode, plane.values, plane.block_amax, *lines, multiple=rows)
    return code, packed
