# SPDX-License-Identifier: Apache-2.0
"""The card of MXFP8. This module imports no torch."""

from __future__ import annotations

from te_proto.spec import FormatSpec

FORMAT = FormatSpec(
    name="mxfp8",
    distribution="te-mxfp8",
    protocol=1,
    summary="MXFP8: 1x32 blocks (32x32 in 2-D) under one power-of-two scale",
    elements=("e4m3", "e5m2"),
    scale="e8m0",
    block=(1, 32),
    quantizer="te_mxfp8.quantizer:MXFP8Quantizer",
    tensor="te_mxfp8.tensor:MXFP8Tensor",
    storage="te_mxfp8.tensor:MXFP8Storage",
    recipe="te_mxfp8.recipe:MXFP8BlockScaling",
)
