# SPDX-License-Identifier: Apache-2.0
"""``linear()`` and the module ``Linear``, for any installed format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import te_proto
from te_linear.execute import execute_backward, execute_forward
from te_linear.plan import LinearConfig, LinearPlan, plan_linear
from te_proto.proto import TensorProto, to_tensor_proto
from te_proto.storage import prepare_for_saving, restore_from_saved

if TYPE_CHECKING:
    from te_proto.recipe import Recipe


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan
    ) -> Tensor:
        y, saved = execute_forward(plan, x, weight, bias)
        flat, ctx.objects = prepare_for_saving(*saved)
        ctx.save_for_backward(*flat)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = restore_from_saved(ctx.objects, ctx.saved_tensors)
        return (*execute_backward(ctx.plan, saved, grad_output), None)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: LinearConfig
) -> Tensor:
    """Return ``x @ weight.T + bias`` computed from quantized operands, also in backward.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16, or a quantized tensor.
        weight: ``[N, K]``, likewise.
        bias: ``[N]`` or None; added in float32.
        config: the quantizer of each role.

    Returns:
        ``[..., N]`` of ``x``'s dtype; products are summed in float32.

    Raises:
        ShapeError: shapes do not fit together, or a format cannot hold an operand of forward or
            backward; nothing was computed.
    """
    plan = plan_linear(
        to_tensor_proto(x),
        to_tensor_proto(weight),
        None if bias is None else to_tensor_proto(bias),
        config,
        grad_enabled=torch.is_grad_enabled(),
    )
    out: Tensor = _Linear.apply(x, weight, bias, plan)
    return out


class Linear(nn.Linear):
    """``nn.Linear`` whose three products run on quantized operands.

    Parameters, initialisation and state dict are those of ``nn.Linear``.

    Args:
        in_features: K, last axis of the input.
        out_features: N, last axis of the output.
        bias: whether there is a bias.
        recipe: name of an installed format, for its defaults, or a :class:`te_proto.Recipe`.
        device: of the parameters.
        dtype: of the parameters; the output has the input's.

    Raises:
        UnknownFormatError: no installed distribution provides the format.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = te_proto.get_recipe(recipe) if isinstance(recipe, str) else recipe
        self.config = LinearConfig.from_recipe(self.recipe)

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name
        """Return the layer's output for ``input``, ``[..., K]``."""
        return linear(input, self.weight, self.bias, config=self.config)

    def plan(self, x: Tensor | TensorProto, *, grad_enabled: bool = True) -> LinearPlan:
        """Return what a call on ``x`` would make, keep and return; nothing is computed."""
        return plan_linear(
            x if isinstance(x, TensorProto) else to_tensor_proto(x),
            to_tensor_proto(self.weight),
            None if self.bias is None else to_tensor_proto(self.bias),
            self.config,
            grad_enabled=grad_enabled,
        )

    def extra_repr(self) -> str:
        """Return the arguments, with the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
