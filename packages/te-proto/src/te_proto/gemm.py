# SPDX-License-Identifier: Apache-2.0
"""What a quantized matrix looks like to ``torch.nn.functional.scaled_mm``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn.functional import ScalingType, SwizzleType

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor


class GemmOperand(NamedTuple):
    """One operand of a scaled product, whatever the format.

    It is what the tensor holds, seen as a matrix whose last axis is the summed one; nothing but
    ``factor`` is computed. Element ``(i, j)`` is ``data[i, j] * scale[i // rows, j // columns]``,
    where a block has the ``rows`` and ``columns`` that ``scaling`` names.

    Attributes:
        data: ``[rows, summed]`` of a float8 dtype, or ``[rows, summed // 2]`` of
            ``torch.float4_e2m1fn_x2``; any strides.
        scale: one scale a block, ``[1]`` if ``scaling`` is tensor-wise, else a matrix, any strides,
            which may be padded.
        scaling: which elements of ``data`` share an element of ``scale``.
        swizzle: order of the elements of ``scale``.
        factor: one float32 that multiplies all elements too, None if there is none.
        transform: what the summed axis was transformed by, None if by nothing. Equal orthogonal
            transforms cancel out in a product; others must not be multiplied.
    """

    data: Tensor
    scale: Tensor
    scaling: ScalingType = ScalingType.TensorWise
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE
    factor: Tensor | None = None
    transform: Hashable = None
