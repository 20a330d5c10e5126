# SPDX-License-Identifier: Apache-2.0
"""The recipe of NVFP4 training."""

from __future__ import annotations

from typing import Any

from te_nvfp4.quantizer import NVFP4Quantizer
from te_proto.errors import QuantizerError
from te_proto.recipe import Recipe

ROLES = ("none", "weights", "activations", "all")


def NVFP4BlockScaling(  # noqa: N802  # the field's name of the recipe
    *,
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    row_scaled_activation: bool = False,
    nvfp4_4over6: str = "none",
    nvfp4_4over6_e4m3_use_256: str = "all",
    nvfp4_4over6_err_mode: str = "MAE",
) -> Recipe:
    """Return the quantizers of a linear layer's input, weight and output gradient.

    Args:
        disable_rht: no Hadamard transform of input and gradient, which the weight gradient sums.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: 1x16 blocks for the weight too.
        row_scaled_activation: one amax a row of the input; needs ``disable_rht``.
        nvfp4_4over6: which of weights and activations (the input) choose the scale of each block:
            ``"none"``, ``"weights"``, ``"activations"`` or ``"all"``. That of activations needs
            ``disable_rht``.
        nvfp4_4over6_e4m3_use_256: which of those map amax to 256 instead of 448; the same values.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``.

    Raises:
        QuantizerError: a role is none of the four, or the options of one role do not go together.

    Source:
        ``NVFP4BlockScaling`` of TransformerEngine's recipes.
    """
    for option, roles in (
        ("nvfp4_4over6", nvfp4_4over6),
        ("nvfp4_4over6_e4m3_use_256", nvfp4_4over6_e4m3_use_256),
    ):
        if roles not in ROLES:
            msg = f"nvfp4: {option} must be one of {', '.join(ROLES)}, got {roles!r}"
            raise QuantizerError(msg)

    def chosen(role: str) -> dict[str, Any]:
        return {
            "nvfp4_use_4over6": nvfp4_4over6 in (role, "all"),
            "nvfp4_e4m3_max": 256 if nvfp4_4over6_e4m3_use_256 in (role, "all") else 448,
            "nvfp4_4over6_err_mode": nvfp4_4over6_err_mode,
        }

    rht: dict[str, Any] = {"with_rht": not disable_rht, "with_post_rht_amax": not disable_rht}
    return Recipe(
        name="nvfp4",
        input=NVFP4Quantizer(
            **rht, row_scaled_nvfp4=row_scaled_activation, **chosen("activations")
        ),
        weight=NVFP4Quantizer(
            with_2d_quantization=not disable_2d_quantization, **chosen("weights")
        ),
        grad_output=NVFP4Quantizer(**rht, stochastic_rounding=not disable_stochastic_rounding),
    )
