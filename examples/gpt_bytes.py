# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model's linear layers: what prototypes say before it runs, and what a run holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gpt_model import Bf16Linear
from torch.autograd.graph import saved_tensors_hooks

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
        if isinstance(layer, Bf16Linear):
            weight = to_tensor_proto(layer.weight).replace(dtype=x.dtype)
            kept = (x, weight)
        else:
            plan: Any = layer.plan(x)  # type: ignore[operator]  # te_linear.Linear's
            weight, kept = plan.quantized_weight, plan.saved
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
        open_hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
        open_hooks[-1].__enter__()
        if isinstance(layer, Bf16Linear):
            weights.add(layer.weight.detach().to(args[0].dtype))
        else:
            quantizer = layer.plan(args[0]).quantized_weight.quantizer  # type: ignore[operator]
            weights.add(quantizer.quantize(layer.weight.detach()))

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


class _Storages:
    """The distinct storages among the tensors it is shown, kept alive so that none is reused."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._held: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor | QuantizedStorage) -> None:
        parts: Iterable[Tensor] = (tensor,)
        if isinstance(tensor, QuantizedStorage):
            parts = tensor.inner_tensors().values()
        for storage in (part.untyped_storage() for part in parts):
            if storage.data_ptr() not in self._ignored:
                self._held[storage.data_ptr()] = storage

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._held.values())
