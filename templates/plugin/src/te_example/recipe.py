# SPDX-License-Identifier: Apache-2.0
"""The recipe of EXAMPLE training."""

from __future__ import annotations

from te_example.quantizer import ExampleQuantizer
from te_proto.recipe import Recipe


def ExampleScaling() -> Recipe:  # noqa: N802  # named like the recipes of the other formats
    """Return the quantizers of a linear layer's input, weight and output gradient."""
    quantizer = ExampleQuantizer()
    return Recipe(name="example", input=quantizer, weight=quantizer, grad_output=quantizer)
