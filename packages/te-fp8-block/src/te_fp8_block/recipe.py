# SPDX-License-Identifier: Apache-2.0
"""The recipe of block-scaled FP8 training."""

from __future__ import annotations

from te_fp8_block.quantizer import Float8BlockQuantizer
from te_proto.errors import QuantizerError
from te_proto.recipe import Recipe


def Float8BlockScaling(  # noqa: N802  # the field's name of the recipe
    *,
    fp8_format: str = "e4m3",
    force_pow_2_scales: bool = True,
    amax_epsilon: float = 0.0,
    x_block_scaling_dim: int = 1,
    w_block_scaling_dim: int = 2,
    grad_block_scaling_dim: int = 1,
) -> Recipe:
    """Return the quantizers of a linear layer's input, weight and output gradient.

    Args:
        fp8_format: ``"e4m3"`` for all, or ``"hybrid"``: E4M3 forward and E5M2 for gradients.
        force_pow_2_scales: of all three quantizers.
        amax_epsilon: of all three quantizers.
        x_block_scaling_dim: 1 for blocks of 1x128 of the input, 2 for blocks of 128x128.
        w_block_scaling_dim: the same for the weight.
        grad_block_scaling_dim: the same for the gradient of the output.

    Raises:
        QuantizerError: another ``fp8_format`` (E5M2 alone is too coarse for the forward), an option
            that no quantizer has, or 128x128 blocks for two of the three: no GEMM multiplies them.

    Source:
        ``Float8BlockScaling`` of TransformerEngine's recipes.
    """
    if fp8_format not in ("e4m3", "hybrid"):
        msg = f"fp8_block: fp8_format must be 'e4m3' or 'hybrid', got {fp8_format!r}"
        raise QuantizerError(msg)
    dims = {"x": x_block_scaling_dim, "w": w_block_scaling_dim, "grad": grad_block_scaling_dim}
    two_d = [f"{role}_block_scaling_dim" for role, dim in dims.items() if dim == 2]
    if len(two_d) > 1:
        msg = (
            "fp8_block: at most 1 of input, weight and gradient may have blocks of 128x128, "
            f"got {' and '.join(two_d)} of 2; set all but one to 1"
        )
        raise QuantizerError(msg)

    def quantizer(role: str, dtype: str) -> Float8BlockQuantizer:
        return Float8BlockQuantizer(
            dtype=dtype,
            amax_epsilon=amax_epsilon,
            force_pow_2_scales=force_pow_2_scales,
            block_scaling_dim=dims[role],
        )

    return Recipe(
        name="fp8_block",
        input=quantizer("x", "e4m3"),
        weight=quantizer("w", "e4m3"),
        grad_output=quantizer("grad", "e5m2" if fp8_format == "hybrid" else "e4m3"),
    )
