# SPDX-License-Identifier: Apache-2.0
"""The product of two quantized matrices: scaled, or of dequantized values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from te_proto.graphs import is_compiling
from te_proto.numerics import swizzle

if TYPE_CHECKING:
    from torch import Tensor

    from te_proto.gemm import GemmOperand

_MULTIPLE = 16
"""Of the summed axis, in bytes, and of the columns of the result, for CUDA's GEMMs."""

_TENSOR, _LINE, _SQUARE, _MX, _NV = (
    ScalingType.TensorWise,
    ScalingType.BlockWise1x128,
    ScalingType.BlockWise128x128,
    ScalingType.BlockWise1x32,
    ScalingType.BlockWise1x16,
)

_ANY = (99, 0)
_NEEDS = {
    (_TENSOR, _TENSOR): ((8, 9), _ANY, (0, 0)),
    (_LINE, _LINE): ((9, 0), (9, 0), (12, 9)),
    (_LINE, _SQUARE): ((9, 0), (9, 0), (12, 9)),
    (_SQUARE, _LINE): ((9, 0), (9, 0), (12, 9)),
    (_MX, _MX): ((10, 0), _ANY, (12, 8)),
    (_NV, _NV): ((10, 0), _ANY, (12, 8)),
}
"""First and last compute capability of CUDA devices that take a pair of scalings, and the CUDA of
which torch has to be a build, as torch's product checks them."""

_CUDA = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])

_ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


def matmul(a: Any, b: Any, *, a_columnwise: bool, b_columnwise: bool) -> Tensor:
    """Return ``A @ B.T`` in float32, where ``A`` and ``B`` are matrices with the summed axis last.

    ``torch.nn.functional.scaled_mm`` computes it where both formats give an operand and the device
    takes the pair; elsewhere it is the product of the dequantized values. Both sum in float32 and
    differ by its rounding: one multiplies the sum by the scales, the other each element.

    Args:
        a: quantized tensor or storage ``[..., K]``, seen as ``[M, K]``.
        b: the same.
        a_columnwise: read the columnwise usage of ``a``: ``A`` is ``[K, M]``, and rows are summed.
        b_columnwise: the same for ``b``.
    """
    left = a.gemm_operand(columnwise=a_columnwise)
    right = b.gemm_operand(columnwise=b_columnwise)
    if left is not None and right is not None and _takes(left, right):
        return _scaled(_ordered(left), _ordered(right))
    return _values(a, columnwise=a_columnwise) @ _values(b, columnwise=b_columnwise).t()


def _takes(a: GemmOperand, b: GemmOperand) -> bool:
    """Whether the device multiplies the pair as it is."""
    pair = (a.scaling, b.scaling)
    if a.transform != b.transform:
        return False
    (rows, summed), columns, device = a.data.shape, b.data.shape[0], a.data.device
    if device.type == "cpu":
        # Inductor takes no matrix of one column
        return pair == (_TENSOR, _TENSOR) and _ON_CPU and summed != 1
    if device.type != "cuda" or not _has_gemm(pair, device):
        return False
    if summed % _MULTIPLE or columns % _MULTIPLE or rows * summed * columns == 0:
        return False
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        return False
    if pair == (_TENSOR, _TENSOR):
        return True
    # Inductor lowers other scalings to a product that wants other scales, or refuses them
    return not is_compiling() and _has_whole_blocks(a) and _has_whole_blocks(b)


def _has_whole_blocks(operand: GemmOperand) -> bool:
    """Whether no block of 128 is ragged: torch's fake product counts those otherwise."""
    rows, summed = operand.data.shape
    if operand.scaling == _SQUARE and rows % 128:
        return False
    return operand.scaling in (_MX, _NV) or summed % 128 == 0


def _has_gemm(pair: tuple[ScalingType, ScalingType], device: torch.device) -> bool:
    """Whether CUDA device ``device`` has one; that of a fake tensor may not exist."""
    if torch.version.hip is not None or not torch.cuda.is_available() or pair not in _NEEDS:
        return False
    first, last, cuda = _NEEDS[pair]
    # both are what dynamo takes for constants, unlike get_device_capability
    properties = torch.cuda.get_device_properties(device)
    return first <= (properties.major, properties.minor) <= last and cuda <= _CUDA


def _scaled(a: GemmOperand, b: GemmOperand) -> Tensor:
    # Every device takes a row-major first and a column-major second matrix. Some take others,
    # but Inductor does not, and the copy is small beside the product.
    (scale_a, scaling_a, swizzle_a), (scale_b, scaling_b, swizzle_b) = _levels(a), _levels(b)
    return scaled_mm(
        a.data.contiguous(),
        b.data.contiguous().t(),
        scale_a,
        scaling_a,
        scale_b,
        scaling_b,
        swizzle_a,
        swizzle_b,
        output_dtype=torch.float32,
    )


def _levels(operand: GemmOperand) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    """Return scales, scalings and swizzles, one of each a level."""
    if operand.factor is None:
        return [operand.scale], [operand.scaling], [operand.swizzle]
    return (
        [operand.scale, operand.factor],
        [operand.scaling, _TENSOR],
        [operand.swizzle, SwizzleType.NO_SWIZZLE],
    )


def _ordered(operand: GemmOperand) -> GemmOperand:
    """Return ``operand`` with its scales in the order that CUDA reads them in."""
    scale, scaling = operand.scale, operand.scaling
    if scaling in (_LINE, _SQUARE):  # by columns; those of squares as [summed, rows]
        scale = scale.t().contiguous().t() if scaling == _LINE else scale.contiguous().t()
        return operand._replace(scale=scale)
    if scaling in (_MX, _NV) and operand.swizzle == SwizzleType.NO_SWIZZLE:
        scale = swizzle(scale.view(torch.uint8).contiguous()).view(scale.dtype)
        return operand._replace(scale=scale, swizzle=SwizzleType.SWIZZLE_32_4_4)
    return operand


def _values(operand: Any, *, columnwise: bool) -> Tensor:
    plane = operand.with_usage(**{"rowwise" if columnwise else "columnwise": False})
    values: Tensor = plane.dequantize(torch.float32)
    matrix = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    return matrix.t() if columnwise else matrix
