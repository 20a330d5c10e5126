# SPDX-License-Identifier: Apache-2.0
"""Swap the linear layers of an existing model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

import te_proto
from te_linear.module import Linear
from te_proto.errors import TeError, UsageError
from te_proto.proto import TensorProto

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto.recipe import Recipe


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did with every module that has a matrix of weights.

    Attributes:
        recipe: name of the recipe.
        converted: names of the modules that are swapped, or would be.
        kept: name of a module that is left alone -> why.
    """

    recipe: str
    converted: tuple[str, ...]
    kept: dict[str, str]

    def __str__(self) -> str:
        """Return a line for each module."""
        rows = [(name, f"quantized, {self.recipe}") for name in self.converted]
        rows += [(name, f"kept: {why}") for name, why in self.kept.items()]
        width = max((len(name) for name, _ in rows), default=0)
        count = f"{len(self.converted)} of {len(rows)} modules with a weight matrix are quantized"
        return "\n".join([f"{name:{width}}  {what}" for name, what in rows] + [count])


def convert(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    filter: Callable[[str, nn.Linear], bool] | None = None,  # the word that torch and torchao use
    mode: str = "traced",
    dry_run: bool = False,
) -> ConversionReport:
    """Swap each ``nn.Linear`` inside ``model`` for a :class:`te_linear.Linear`, in place.

    Parameters stay the very same objects, so that ties and optimizers keep them; hooks, buffers,
    attributes and the training flag stay too, and so does the state dict. Everything is decided
    before anything is swapped.

    Args:
        model: any module; a module that is used at several places is swapped at all of them.
        recipe: name of an installed format, for its defaults, or a :class:`te_proto.Recipe`.
        filter: takes name and module and returns whether to swap it; all, if None.
        mode: of the layers, ``"traced"`` or ``"opaque"``: see :func:`te_linear.linear`.
        dry_run: only report.

    Returns:
        What was swapped and what was not, and why: print it.

    Raises:
        UnknownFormatError: no installed distribution provides the format.
        UsageError: ``model`` is itself a linear layer.
    """
    chosen = te_proto.get_recipe(recipe) if isinstance(recipe, str) else recipe
    if isinstance(model, nn.Linear):
        msg = (
            f"linear: model must hold the layers that are swapped, got {type(model).__name__} "
            "itself; make a te_linear.Linear instead"
        )
        raise UsageError(msg)
    converted: dict[str, Linear] = {}
    kept: dict[str, str] = {}
    made: dict[nn.Module, Linear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if getattr(getattr(module, "weight", None), "ndim", 0) != 2:
            continue
        found = made.get(module) or _layer_or_reason(name, module, chosen, filter, mode)
        if isinstance(found, str):
            kept[name] = found
        else:
            converted[name] = made[module] = found
    if not dry_run:
        for name, layer in converted.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
    return ConversionReport(chosen.name, tuple(converted), kept)


def _layer_or_reason(
    name: str,
    module: nn.Module,
    recipe: Recipe,
    filter: Callable[[str, nn.Linear], bool] | None,
    mode: str,
) -> Linear | str:
    """Return the layer that takes the module's place and shares all it holds, or why none does."""
    if not isinstance(module, nn.Linear):
        return f"{type(module).__name__} is no nn.Linear"
    if isinstance(module, Linear):
        return "a te_linear.Linear already"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear, whose forward may differ"
    if filter is not None and not filter(name, module):
        return "filter"
    sizes = (module.in_features, module.out_features)
    layer = Linear(*sizes, False, recipe=recipe, mode=mode, device="meta")
    buffers = {**layer._buffers, **module._buffers}
    hidden = layer._non_persistent_buffers_set | module._non_persistent_buffers_set
    layer.__dict__.update(vars(module), _buffers=buffers, _non_persistent_buffers_set=hidden)
    rows = math.lcm(*(q.alignment()[0] for q in (recipe.input, recipe.grad_output)))
    x = TensorProto(
        shape=(rows, module.in_features),
        dtype=module.weight.dtype,
        requires_grad=True,
        device=module.weight.device,
    )
    try:
        layer.plan(x)
    except TeError as error:
        return str(error)
    return layer
