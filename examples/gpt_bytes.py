# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model's linear layers: what prototypes say before it runs, and what a run holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

import te_linear
from te_proto import QuantizedStorage, TensorProto, to_tensor_proto

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpt_model import GPT
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LinearBytes:
    """Bytes of the layers that the factory made, over the whole model.

    Attributes:
        weights: the weights as the forward and backward products read them.
        saved: what the layers keep from forward to backward, parameters left out: their input and
            the rounded weight.
    """

    weights: int
    saved: int


def planned_bytes(model: GPT, *, batch: int, context: int) -> LinearBytes:
    """Return the bytes from prototypes alone; nothing is computed.

    Raises:
        TeError: the format cannot hold one of the operands, such as a shape that cuts a block.
    """
    weights = saved = 0
    for layer in model.factory_linears():
        x = TensorProto(
            shape=(batch, context, layer.in_features),
            dtype=torch.bfloat16,
            device=layer.weight.device,
            requires_grad=True,
        )
        if isinstance(layer, te_linear.Linear):
            plan = layer.plan(x)
            weight, kept = plan.quantized_weight, plan.saved
        else:
            weight = to_tensor_proto(layer.weight).replace(dtype=x.dtype)
            kept = (x, weight)
        weights += weight.nbytes
        saved += sum(proto.nbytes for proto in kept)
    return LinearBytes(weights=weights, saved=saved)


def measured_bytes(model: GPT, tokens: Tensor, targets: Tensor) -> LinearBytes:
    """Return the bytes of one eager forward, each storage counted once."""
    weights = _Storages()
    # a parameter that a layer saves as it is takes no memory of its own
    saved = _Storages(ignored=model.parameters())

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    open_hooks: list[saved_tensors_hooks] = []

    def enter(layer: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, torch.nn.Linear)
        weights.add(_rounded_weight(layer, args[0]))
        open_hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
        open_hooks[-1].__enter__()

    def leave(*_: object) -> None:
        open_hooks.pop().__exit__(None, None, None)

    handles = []
    for layer in model.factory_linears():
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave))
    loss = model(tokens, targets)
    for handle in handles:
        handle.remove()
    assert loss.requires_grad  # else nothing was saved and the count means nothing
    return LinearBytes(weights=weights.nbytes, saved=saved.nbytes)


def _rounded_weight(layer: torch.nn.Linear, x: Tensor) -> Tensor | QuantizedStorage:
    weight = layer.weight.detach()
    if isinstance(layer, te_linear.Linear):
        quantizer = layer.plan(x).quantized_weight.quantizer
        assert quantizer is not None
        rounded: QuantizedStorage = quantizer.quantize(weight)
        return rounded
    return weight.to(x.dtype)


class _Storages:
    """The distinct storages among the tensors it is shown, kept alive so that none is reused."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._held: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor | QuantizedStorage) -> None:
        if isinstance(tensor, QuantizedStorage):
            parts = list(tensor.inner_tensors().values())
        else:
            parts = [tensor]
        for storage in (part.untyped_storage() for part in parts):
            if storage.data_ptr() not in self._ignored:
                self._held[storage.data_ptr()] = storage

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._held.values())
