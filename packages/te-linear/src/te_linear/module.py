# SPDX-License-Identifier: Apache-2.0
"""The module ``Linear``, for any installed format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import te_proto
from te_linear.config import LinearConfig
from te_linear.functional import check_mode, linear, quantize_weight
from te_linear.plan import LinearPlan, plan_linear, weight_quantizer
from te_proto.errors import ShapeError, UsageError
from te_proto.proto import TensorProto, to_tensor_proto

if TYPE_CHECKING:
    from te_proto.recipe import Recipe


class Linear(nn.Linear):
    """``nn.Linear`` whose three products run on quantized operands.

    Parameters, initialisation and state dict are those of ``nn.Linear``; those of a parallel layer
    are this rank's part.

    Args:
        in_features: K, last axis of the input of all ranks together.
        out_features: N, last axis of the output of all ranks together.
        bias: whether there is a bias.
        recipe: name of an installed format, for its defaults, or a :class:`te_proto.Recipe`.
        mode: ``"traced"`` or ``"opaque"``, see :func:`te_linear.linear`.
        cache_weight: keep the quantized weight from call to call. A call refreshes it unless told
            not to, as for all micro-batches of a step but the first. It is no part of the state
            dict, and NaN before its first refresh.
        options: of :class:`te_linear.LinearConfig`, such as ``output`` or ``parallel_mode``.
        device: of the parameters.
        dtype: of the parameters; the output has the input's.

    Raises:
        UnknownFormatError: no installed distribution provides the format.
        ShapeError: a parallel layer cannot be cut among that many ranks.
        UsageError: options do not go together.
    """

    weight_cache: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe,
        mode: str = "traced",
        cache_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        recipe = te_proto.get_recipe(recipe) if isinstance(recipe, str) else recipe
        config = LinearConfig.from_recipe(recipe, **options)
        sizes = {"column": out_features, "row": in_features}
        size = sizes.get(config.parallel_mode or "", 0)
        if size % config.tp_size:
            what = "out_features" if config.parallel_mode == "column" else "in_features"
            msg = (
                f"linear: {what} of a {config.parallel_mode} parallel layer must be a multiple of "
                f"TP = {config.tp_size}, got {size}"
            )
            raise ShapeError(msg)
        held = {"column": (in_features, out_features // config.tp_size)}
        held["row"] = (in_features // config.tp_size, out_features)
        local = held.get(config.parallel_mode or "", (in_features, out_features))
        super().__init__(*local, bias, device=device, dtype=dtype)
        self.recipe, self.config, self.mode = recipe, config, check_mode(mode)
        self.register_buffer("weight_cache", None, persistent=False)
        if cache_weight:
            self.weight_cache = weight_quantizer(config).make_empty(
                self.weight.shape, dtype=self.weight.dtype, device=self.weight.device
            )
            for buffer in self.weight_cache.inner_tensors().values():
                buffer.view(torch.uint8).fill_(0xFF)  # NaN, which no forgotten refresh can hide

    def forward(self, input: Tensor, *, refresh_weight: bool | Tensor = True) -> Tensor:
        """Return the layer's output for ``input``, ``[..., K]``.

        Args:
            input: as for :func:`te_linear.linear`.
            refresh_weight: with ``cache_weight``, quantize the weight anew; False reads it as it
                was last quantized. A tensor of one element is looked at on its device: one graph
                serves both.
        """
        if self.weight_cache is not None and refresh_weight is not False:
            noop = None
            if isinstance(refresh_weight, Tensor):
                noop = (refresh_weight == 0).to(torch.float32)
            quantize_weight(self.weight, self.config, out=self.weight_cache, noop=noop)
        elif self.weight_cache is None and refresh_weight is not True:
            msg = "linear: refresh_weight is for a layer made with cache_weight=True"
            raise UsageError(msg)
        return linear(
            input,
            self.weight,
            self.bias,
            config=self.config,
            cached_weight=self.weight_cache,
            mode=self.mode,
        )

    def plan(self, x: Tensor | TensorProto, *, grad_enabled: bool | None = None) -> LinearPlan:
        """Return what a call on ``x`` would make, keep and return; nothing is computed.

        Args:
            x: the input, or its prototype.
            grad_enabled: grad mode of that call; that of now if None.
        """
        given = x if isinstance(x, TensorProto) else to_tensor_proto(x)
        return plan_linear(
            given,
            to_tensor_proto(self.weight),
            None if self.bias is None else to_tensor_proto(self.bias),
            self.config,
            grad_enabled=torch.is_grad_enabled() if grad_enabled is None else grad_enabled,
            cached_weight=None if self.weight_cache is None else to_tensor_proto(self.weight_cache),
        )

    def extra_repr(self) -> str:
        """Return the arguments, with the recipe's name."""
        shown = f"{super().extra_repr()}, recipe={self.recipe.name}"
        if self.config.parallel_mode is not None:
            shown += f", {self.config.parallel_mode} parallel over {self.config.tp_size}"
        return shown if self.mode == "traced" else f"{shown}, mode={self.mode}"
