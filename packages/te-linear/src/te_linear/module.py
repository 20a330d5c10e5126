# SPDX-License-Identifier: Apache-2.0
"""The module ``Linear``, for any installed format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import te_proto
from te_linear.config import LinearConfig
from te_linear.functional import linear
from te_linear.plan import LinearPlan, plan_linear
from te_proto.proto import TensorProto, to_tensor_proto

if TYPE_CHECKING:
    from te_proto.recipe import Recipe


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
