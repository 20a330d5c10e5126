# SPDX-License-Identifier: Apache-2.0
"""Which quantizer each operand of a layer gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_proto.quantizer import Quantizer


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which quantizer each operand of a layer gets.

    Attributes:
        name: shown in messages and tables, such as ``"mxfp8"``.
        input: quantizer of a layer's input.
        weight: quantizer of its weight.
        grad_output: quantizer of the gradient that comes back.
    """

    name: str
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
