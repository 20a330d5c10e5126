# SPDX-License-Identifier: Apache-2.0
"""What a quantized matrix looks like to ``torch.nn.functional.scaled_mm``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn.functional import ScalingType, SwizzleType

if TYPE_CHECKING:
    from torch import Tensor


class GemmOperand(NamedTuple):
    """One operand of a scaled product, whatever the format.

    Attributes:
        data: ``[rows, summed]`` of a float8 dtype, any strides: the last axis is the summed one, so
            the product of two operands is ``a.data @ b.data.T``.
        scale: multiplies the product; its shape is what ``scaling`` says.
        scaling: which elements of ``data`` share an element of ``scale``.
        swizzle: order of the elements of ``scale``.
    """

    data: Tensor
    scale: Tensor
    scaling: ScalingType = ScalingType.TensorWise
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE
