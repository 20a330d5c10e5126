# SPDX-License-Identifier: Apache-2.0
"""The card of FP8 with current scaling. This module imports no torch."""

from __future__ import annotations

from te_proto.spec import FormatSpec

FORMAT = FormatSpec(
    name="fp8_current",
    distribution="te-fp8-current",
    protocol=1,
    summary="FP8 current scaling: one float32 scale a tensor, from its own maximum",
    elements=("e4m3", "e5m2"),
    scale="float32",
    block=(0, 0),
    quantizer="te_fp8_current.quantizer:Float8CurrentScalingQuantizer",
    tensor="te_fp8_current.tensor:Float8Tensor",
    storage="te_fp8_current.tensor:Float8Storage",
    recipe="te_fp8_current.recipe:Float8CurrentScaling",
)
