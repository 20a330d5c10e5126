# SPDX-License-Identifier: Apache-2.0
"""The card of NVFP4. This module imports no torch."""

from __future__ import annotations

from te_proto.spec import FormatSpec

FORMAT = FormatSpec(
    name="nvfp4",
    distribution="te-nvfp4",
    protocol=1,
    summary="NVFP4: 1x16 blocks (16x16 in 2-D) under an E4M3 scale and one float32 amax",
    elements=("e2m1",),
    scale="e4m3",
    block=(1, 16),
    quantizer="te_nvfp4.quantizer:NVFP4Quantizer",
    tensor="te_nvfp4.tensor:NVFP4Tensor",
    storage="te_nvfp4.tensor:NVFP4Storage",
    recipe="te_nvfp4.recipe:NVFP4BlockScaling",
)
