# SPDX-License-Identifier: Apache-2.0
"""The recipe of MXFP8 training."""

from __future__ import annotations

from te_mxfp8.quantizer import MXFP8Quantizer
from te_proto.errors import QuantizerError
from te_proto.recipe import Recipe


def MXFP8BlockScaling(  # noqa: N802  # the field's name of the recipe
    *, fp8_format: str = "e4m3", enable_2d_quantization: bool = False
) -> Recipe:
    """Return the quantizers of a linear layer's input, weight and output gradient.

    Args:
        fp8_format: ``"e4m3"`` for all, or ``"hybrid"``: E4M3 forward and E5M2 for gradients.
        enable_2d_quantization: 32x32 blocks for the weight.

    Raises:
        QuantizerError: another ``fp8_format``; E5M2 alone is too coarse for the forward.

    Source:
        ``MXFP8BlockScaling`` of TransformerEngine's recipes.
    """
    if fp8_format not in ("e4m3", "hybrid"):
        msg = f"mxfp8: fp8_format must be 'e4m3' or 'hybrid', got {fp8_format!r}"
        raise QuantizerError(msg)
    return Recipe(
        name="mxfp8",
        input=MXFP8Quantizer(),
        weight=MXFP8Quantizer(with_2d_quantization=enable_2d_quantization),
        grad_output=MXFP8Quantizer(dtype="e5m2" if fp8_format == "hybrid" else "e4m3"),
    )
