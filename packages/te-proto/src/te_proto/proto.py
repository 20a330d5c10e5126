# SPDX-License-Identifier: Apache-2.0
"""A tensor without its data: what it will be made of, before it exists."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only
from typing_extensions import Self

from te_proto._compat import is_compiling
from te_proto.errors import DeviceError, LayoutError, UsageError
from te_proto.layout import BufferSpec
from te_proto.storage import FlattenContext, QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_proto.quantizer import Quantizer


@dataclass(frozen=True, kw_only=True)
class TensorProto:
    """A data-free prototype of a dense, row-major tensor, plain or quantized.

    Attributes:
        shape: logical shape; sizes may be SymInts.
        dtype: dtype of a plain tensor, nominal dtype of a quantized one.
        quantizer: describes the inner tensors; None for a plain tensor.
        requires_grad: as for the tensor; always False for a bare storage.
        device: where the tensor is made. Questions about layout need none, making it does.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if isinstance(self.device, str):
            object.__setattr__(self, "device", torch.device(self.device))

    @property
    def is_quantized(self) -> bool:
        """Whether it has a quantizer."""
        return self.quantizer is not None

    def inner_specs(self) -> dict[str, BufferSpec]:
        """Return each inner tensor's shape and dtype in flatten order; ``{"data": ...}`` if plain.

        Raises:
            ShapeError: the format cannot hold the shape.
        """
        if self.quantizer is None:
            return {"data": BufferSpec(self.shape, self.dtype)}
        self.quantizer.check_shape(self.shape)
        return self.quantizer.describe_buffers(self.shape)

    def inner_names(self) -> tuple[str, ...]:
        """Return the names of the inner tensors in flatten order; ``("data",)`` if plain."""
        return tuple(self.inner_specs())

    def create_metadata(self) -> FlattenContext | None:
        """Return the flatten context of the tensor; None if plain."""
        return None if self.quantizer is None else self.quantizer.create_metadata(self.dtype)

    def create_inner_tensors(self) -> list[Tensor]:
        """Allocate the inner tensors, uninitialised, in flatten order.

        Raises:
            DeviceError: the prototype has no device.
        """
        if self.device is None:
            msg = (
                f"a prototype of shape {self.shape} needs a device to be made; "
                "pass device='cuda' or 'cpu'"
            )
            raise DeviceError(msg)
        return [
            torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            for spec in self.inner_specs().values()
        ]

    def assemble(self, inner: Sequence[Tensor] | dict[str, Tensor]) -> Any:
        """Make the tensor from its inner tensors, in flatten order.

        Raises:
            LayoutError: there are more or fewer than the prototype has, or they have another
                layout.
        """
        if self.requires_grad and is_compiling():
            # torch itself would return the tensor without the flag and say nothing
            msg = (
                f"a leaf that requires grad, of shape {self.shape}, cannot be made in a compiled "
                "graph; make it outside, or make it without and call requires_grad_() on the "
                "graph's result"
            )
            raise LayoutError(msg)
        names = self.inner_names()
        if len(inner) != len(names):
            msg = (
                f"a prototype of shape {self.shape} is made of {list(names)}, "
                f"got {len(inner)} inner tensors"
            )
            raise LayoutError(msg)
        if self.quantizer is None:
            (data,) = inner.values() if isinstance(inner, dict) else inner
            self._check_plain(data)
            return data.requires_grad_() if self.requires_grad else data
        named = dict(inner) if isinstance(inner, dict) else dict(zip(names, inner, strict=True))
        context = self.quantizer.create_metadata(self.dtype)
        return context.build(
            named, self.shape, requires_grad=self.requires_grad and not self.quantizer.internal
        )

    def _check_plain(self, data: Tensor) -> None:
        if is_compiling():
            return
        if (tuple(data.shape), data.dtype) != (self.shape, self.dtype) or not data.is_contiguous():
            msg = (
                f"data of a plain prototype must be a contiguous {self.dtype} of shape "
                f"{self.shape}, got {data.dtype} of shape {tuple(data.shape)} and strides "
                f"{data.stride()}"
            )
            raise LayoutError(msg)

    def create_tensor(self) -> Any:
        """Allocate and assemble: an uninitialised tensor, or bare storage if ``internal``.

        Raises:
            DeviceError: the prototype has no device.
            ShapeError: the format cannot hold the shape.
        """
        return self.assemble(self.create_inner_tensors())

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """Return the prototype for other planes; None keeps one as it is.

        Raises:
            UsageError: the prototype is of a plain tensor.
        """
        if self.quantizer is None:
            msg = (
                f"a plain tensor has no planes: the prototype of shape {self.shape} has no "
                "quantizer"
            )
            raise UsageError(msg)
        return self.replace(
            quantizer=self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        )

    def at_rest(self) -> Self:
        """Return the prototype of the tensor it makes, without options that concern a call alone.

        Those, such as a reduction over a group, are no part of a tensor: :meth:`Quantizer.at_rest`.
        """
        return self if self.quantizer is None else self.replace(quantizer=self.quantizer.at_rest())

    def replace(self, **changes: Any) -> Self:
        """Return the prototype with other attributes."""
        return dataclasses.replace(self, **changes)

    def buffer_nbytes(self) -> dict[str, int]:
        """Return the bytes of each inner tensor."""
        return {name: spec.nbytes for name, spec in self.inner_specs().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all inner tensors, padding included."""
        return sum(self.buffer_nbytes().values())

    @property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return math.prod(self.shape)


def to_tensor_proto(tensor: Tensor | QuantizedStorage) -> TensorProto:
    """Return the prototype of a plain tensor, a bare storage or a quantized tensor.

    Raises:
        LayoutError: a quantized class has lost its quantizer.
    """
    quantizer = None
    if isinstance(tensor, QuantizedStorage):
        quantizer = getattr(tensor, "quantizer", None)
        if quantizer is None:
            msg = (
                f"a {type(tensor).__name__} has no quantizer, so its layout is unknown; "
                "build it with one"
            )
            raise LayoutError(msg)
    return TensorProto(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        quantizer=quantizer,
        requires_grad=isinstance(tensor, Tensor) and tensor.requires_grad,
        device=tensor.device,
    )


def eval_proto(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the prototypes of what ``fn`` returns, without running it on data.

    Like ``jax.eval_shape``: ``fn`` is called on data-free stand-ins of its arguments.

    Args:
        fn: a function of tensors, quantized tensors and other values, nested as you like.
        *args: prototypes, or tensors that are taken for their prototypes.
        **kwargs: the same.

    Returns:
        What ``fn`` returns, with a :class:`TensorProto` for each tensor.

    Raises:
        DeviceError: a prototype among the arguments has no device.
    """
    # what fn refers to by itself, such as the parameters of a module, may be real
    with FakeTensorMode(allow_non_fake_inputs=True):

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, (Tensor, QuantizedStorage)):
                leaf = to_tensor_proto(leaf)
            return leaf.create_tensor() if isinstance(leaf, TensorProto) else leaf

        out = fn(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        return tree_map_only((Tensor, QuantizedStorage), to_tensor_proto, out)
