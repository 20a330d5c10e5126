# SPDX-License-Identifier: Apache-2.0
"""The product of two quantized matrices: scaled, or of dequantized values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import ScalingType, scaled_mm

if TYPE_CHECKING:
    from torch import Tensor

    from te_proto.gemm import GemmOperand

_MULTIPLE = 16
"""Of the summed axis and of the columns of the result, in elements, for CUDA's float8 GEMM."""

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
        return _scaled(left, right)
    return _values(a, columnwise=a_columnwise) @ _values(b, columnwise=b_columnwise).t()


def _takes(a: GemmOperand, b: GemmOperand) -> bool:
    """Whether the device multiplies the pair as it is."""
    if {a.scaling, b.scaling} != {ScalingType.TensorWise}:
        return False  # which devices take other pairs has not been seen
    (rows, summed), columns = a.data.shape, b.data.shape[0]
    if a.data.device.type == "cpu":
        return _ON_CPU and summed != 1  # Inductor takes no matrix of one column
    if a.data.device.type != "cuda" or not _has_float8_gemm(a.data.device):
        return False
    if summed % _MULTIPLE or columns % _MULTIPLE or rows * summed * columns == 0:
        return False
    return not (a.data.dtype == b.data.dtype == torch.float8_e5m2)


def _has_float8_gemm(device: torch.device) -> bool:
    """Whether CUDA device ``device`` has one; that of a fake tensor may not exist."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    # both are what dynamo takes for constants, unlike get_device_capability
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def _scaled(a: GemmOperand, b: GemmOperand) -> Tensor:
    # Every device takes a row-major first and a column-major second matrix. Some take others,
    # but Inductor does not, and the copy is small beside the product.
    return scaled_mm(
        a.data.contiguous(),
        b.data.contiguous().t(),
        a.scale,
        a.scaling,
        b.scale,
        b.scaling,
        a.swizzle,
        b.swizzle,
        output_dtype=torch.float32,
    )


def _values(operand: Any, *, columnwise: bool) -> Tensor:
    plane = operand.with_usage(**{"rowwise" if columnwise else "columnwise": False})
    values: Tensor = plane.dequantize(torch.float32)
    matrix = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    return matrix.t() if columnwise else matrix
