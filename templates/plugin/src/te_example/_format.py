# SPDX-License-Identifier: Apache-2.0
"""The card of the format. This module imports no torch."""

from __future__ import annotations

from te_proto.spec import FormatSpec

FORMAT = FormatSpec(
    name="example",
    distribution="te-example",
    protocol=1,
    summary="EXAMPLE: say in one line what shares a scale with what",
    elements=("int8",),
    scale="float32",
    block=(1, 0),
    quantizer="te_example.quantizer:ExampleQuantizer",
    tensor="te_example.tensor:ExampleTensor",
    storage="te_example.tensor:ExampleStorage",
    recipe="te_example.recipe:ExampleScaling",
)
