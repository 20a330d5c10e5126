# SPDX-License-Identifier: Apache-2.0
"""The recipe of training in FP8 with current scaling."""

from __future__ import annotations

from te_fp8_current.quantizer import Float8CurrentScalingQuantizer
from te_proto.errors import QuantizerError
from te_proto.recipe import Recipe


def Float8CurrentScaling(  # noqa: N802  # the field's name of the recipe
    *,
    fp8_format: str = "hybrid",
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
    separate_transpose: bool = False,
) -> Recipe:
    """Return the quantizers of a linear layer's input, weight and output gradient.

    Options are those of all three; ``dataclasses.replace`` gives a role its own.

    Args:
        fp8_format: ``"hybrid"``, E4M3 forward and E5M2 for gradients, or ``"e4m3"`` for all.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: a smaller maximum counts as this.
        separate_transpose: hold transposed codes, as
            :func:`te_fp8_current.needs_separate_transpose` advises.

    Raises:
        QuantizerError: another ``fp8_format``; E5M2 alone is too coarse for the forward.

    Source:
        ``Float8CurrentScaling`` of TransformerEngine's recipes.
    """
    if fp8_format not in ("hybrid", "e4m3"):
        msg = f"fp8_current: fp8_format must be 'hybrid' or 'e4m3', got {fp8_format!r}"
        raise QuantizerError(msg)
    forward = Float8CurrentScalingQuantizer(
        force_pow_2_scales=force_pow_2_scales,
        amax_epsilon=amax_epsilon,
        separate_transpose=separate_transpose,
    )
    gradient = forward.replace(dtype="e5m2") if fp8_format == "hybrid" else forward
    return Recipe(name="fp8_current", input=forward, weight=forward, grad_output=gradient)
