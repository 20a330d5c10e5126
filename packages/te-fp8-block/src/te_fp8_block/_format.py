# SPDX-License-Identifier: Apache-2.0
"""The card of block-scaled FP8. This module imports no torch."""

from __future__ import annotations

from te_proto.spec import FormatSpec

FORMAT = FormatSpec(
    name="fp8_block",
    distribution="te-fp8-block",
    protocol=1,
    summary="FP8: 1x128 or 128x128 blocks under one float32 scale",
    elements=("e4m3", "e5m2"),
    scale="float32",
    block=(128, 128),
    quantizer="te_fp8_block.quantizer:Float8BlockQuantizer",
    tensor="te_fp8_block.tensor:Float8BlockwiseTensor",
    storage="te_fp8_block.tensor:Float8BlockwiseStorage",
    recipe="te_fp8_block.recipe:Float8BlockScaling",
)
