# SPDX-License-Identifier: Apache-2.0
"""The toy format with ops for CUDA tensors, with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from te_toy import Rounding, ToyQuantizer
from torch import Tensor

from te_proto import TensorProto, custom_op
from te_proto.storage import QuantizedStorage

Buffers = dict[str, Tensor]


class Ops:
    """The ops of a namespace; a subclass has a fault."""

    def __init__(self, namespace: str) -> None:
        self.quantize = custom_op(f"{namespace}::quantize", outputs=self.result)(self.run)
        # a torch without CUDA cannot copy even fake CUDA tensors
        self.quantize_into = custom_op(f"{namespace}::quantize_into", mutates=("out",))(self.into)
        self.dequantize = custom_op(
            f"{namespace}::dequantize",
            outputs=lambda q, dtype: TensorProto(shape=q.shape, dtype=dtype, device=q.device),
        )(self.back)

    def result(self, x: TensorProto, q: ToyQuantizer) -> TensorProto:
        return TensorProto(shape=x.shape, dtype=x.dtype, quantizer=q, device=x.device)

    def run(self, x: Tensor, q: ToyQuantizer) -> Any:
        return q.create_metadata(x.dtype).build(ToyQuantizer.quantize_impl(q, x), x.shape)

    def into(self, x: Tensor, out: Any, noop: Tensor | None) -> None:
        inner = out.inner_tensors()
        ToyQuantizer.quantize_into_impl(out.quantizer, x, inner, noop)

    def back(self, q: Any, dtype: torch.dtype) -> Tensor:
        return ToyQuantizer.dequantize_impl(q.quantizer, q.inner_tensors(), q.shape, dtype)


class RoundsOtherwise(Ops):
    def run(self, x: Tensor, q: ToyQuantizer) -> Any:
        made = super().run(x, q.replace(rounding=Rounding.ZERO))
        return made.like(made.inner_tensors(), quantizer=q)


class LeavesMemory(Ops):
    def run(self, x: Tensor, q: ToyQuantizer) -> Any:
        out = q.make_empty(x.shape, dtype=x.dtype, device=x.device)
        for name, made in super().run(x, q).inner_tensors().items():
            out.inner_tensors()[name].flatten()[:-1].copy_(made.flatten()[:-1])
        return out


class FakeOfAnotherDtype(Ops):
    def back(self, q: Any, dtype: torch.dtype) -> Tensor:
        return super().back(q, torch.float32)


class WritesItsInput(Ops):
    def run(self, x: Tensor, q: ToyQuantizer) -> Any:
        x.clamp_(-0.5, 0.5)
        return super().run(x, q)


class ReturnsColumns(Ops):
    def back(self, q: Any, dtype: torch.dtype) -> Tensor:
        return super().back(q, dtype).t().contiguous().t()


class HasAnotherOp(Ops):
    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.other = custom_op(f"{namespace}::transpose", outputs=lambda x: x)(lambda x: x.clone())


class OpQuantizer(ToyQuantizer):
    namespace: ClassVar[str]
    ops: ClassVar[Ops]

    def quantize_impl(self, x: Tensor) -> Buffers:
        if x.device.type != "cuda":
            return super().quantize_impl(x)
        return QuantizedStorage.inner_tensors(self.ops.quantize(x, self.replace(internal=True)))

    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        if x.device.type != "cuda":
            super().quantize_into_impl(x, out, noop)
            return
        context = self.replace(internal=True).create_metadata(x.dtype)
        self.ops.quantize_into(x, context.build(out, x.shape), noop)

    def dequantize_impl(self, inner: Buffers, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if next(iter(inner.values())).device.type != "cuda":
            return super().dequantize_impl(inner, shape, dtype)
        storage = self.replace(internal=True).create_metadata(dtype).build(inner, shape)
        out: Tensor = self.ops.dequantize(storage, dtype)
        return out


def quantizer_of(ops_class: Callable[[str], Ops]) -> type[OpQuantizer]:
    """Return a quantizer with ops of that class."""
    name = ops_class.__name__  # type: ignore[attr-defined]

    class WithOps(OpQuantizer):
        __qualname__ = f"With{name}"
        namespace: ClassVar[str] = f"te_mutant_{name.lower()}"
        ops: ClassVar[Ops] = ops_class(namespace)

    return WithOps
