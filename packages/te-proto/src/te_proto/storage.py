# SPDX-License-Identifier: Apache-2.0
"""The flatten base class: a handful of inner tensors that stand for one logical tensor."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from te_proto._classes import class_id as class_id
from te_proto._classes import find_class as find_class
from te_proto._classes import register_class as register_class
from te_proto._classes import source_name as source_name
from te_proto._compat import is_compiling
from te_proto._rebuild import rebuild
from te_proto.errors import ShapeError, UsageError
from te_proto.layout import check_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from te_proto.gemm import GemmOperand
    from te_proto.quantizer import Quantizer

InnerTensor = Annotated[Tensor | None, "inner tensor"]
"""Annotation of an inner tensor: its name and place among the annotations are the flatten order."""


class _Sourced:
    """Every storage class, as an attribute."""


def is_torch_tensor(value: Any) -> bool:
    """Return whether torch sees ``value`` as a tensor; mypy thinks that no storage can be one."""
    return isinstance(value, Tensor)


class FlattenContext(NamedTuple):
    """What the flatten protocol carries besides inner tensors; it holds no sizes.

    Attributes:
        cls: the class to rebuild.
        quantizer: the quantizer that describes the layout.
        dtype: nominal dtype, the one the logical tensor has.
    """

    cls: type[Any]
    quantizer: Quantizer
    dtype: torch.dtype

    def build(
        self,
        inner: Mapping[str, Tensor],
        shape: Sequence[int],
        *,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ) -> Any:
        """Assemble the tensor or storage from its inner tensors; ``device`` is for none at all."""
        if issubclass(self.cls, Tensor):
            make: Any = self.cls  # mypy would look for Tensor's own arguments
            return make(
                inner,
                self.quantizer,
                shape,
                self.dtype,
                requires_grad=requires_grad,
                device=device,
            )
        # dynamo constructs a plain object only of a class that it reaches from a global
        storage = getattr(_Sourced, self.cls.class_key)
        return storage(inner, self.quantizer, shape, self.dtype, device=device)


class QuantizedStorage:
    """Inner tensors, the quantizer that describes them now, and the logical shape.

    A subclass annotates its inner tensors once, in flatten order::

        class MXFP8Storage(QuantizedStorage):
            rowwise_data: InnerTensor
            rowwise_scale_inv: InnerTensor

    and everything else follows: flattening, repr, pickling, moving, saving for backward. The
    ``torch.Tensor`` of the format derives from it and from :class:`te_proto.QuantizedTensor`.

    Attributes:
        quantizer: describes the layout as it is now; it follows :meth:`update_usage`.
        shape: logical shape, known whatever planes are held.
        dtype: nominal dtype of the logical tensor.
        device: device of the inner tensors.
        is_view_copy: torch takes the tensor for a view of another, but its buffers are copies: a
            slice pads its scales anew. It refuses to be written, which would not reach the other.
    """

    inner_names: ClassVar[tuple[str, ...]] = ()
    class_key: ClassVar[str]
    is_view_copy = False
    quantizer: Quantizer
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            annotations = (
                inspect.get_annotations(base) if issubclass(base, QuantizedStorage) else {}
            )
            names.update(
                {
                    n: None
                    for n, a in annotations.items()
                    if a is InnerTensor or str(a).endswith("InnerTensor")
                }
            )
        cls.inner_names = tuple(names)
        register_class(cls)
        cls.class_key = source_name(cls)
        setattr(_Sourced, cls.class_key, cls)

    def __init__(
        self,
        inner: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = device_of(inner, device)
        self._set(inner, quantizer)

    def _set(self, inner: Mapping[str, Tensor], quantizer: Quantizer) -> None:
        if not is_compiling():
            check_layout(inner, quantizer, self.shape)
        for name in self.inner_names:
            setattr(self, name, inner.get(name))
        self.quantizer = quantizer

    # -- the flatten protocol ---------------------------------------------------------------------

    def inner_tensors(self) -> dict[str, Tensor]:
        """Return the inner tensors that are present, in flatten order."""
        held = {n: t for n, t in ((n, getattr(self, n)) for n in self.inner_names) if t is not None}
        if torch.compiler.is_dynamo_compiling() and is_torch_tensor(self):
            # by an op: dynamo takes the attribute of an input for an input of its own, and would
            # see no write into the one in the other
            whole = Tensor.detach(self)  # type: ignore[arg-type]  # see is_torch_tensor
            return {n: torch.ops.te_proto.inner_tensor(whole, i) for i, n in enumerate(held)}
        return held

    def __tensor_flatten__(self) -> tuple[list[str], FlattenContext]:
        return list(self.inner_tensors()), FlattenContext(type(self), self.quantizer, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        context: FlattenContext,
        outer_size: Sequence[int],
        outer_stride: object,
    ) -> Any:
        return context.build(inner, outer_size)

    def like(
        self,
        inner: Mapping[str, Tensor],
        *,
        quantizer: Quantizer | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a tensor or storage of this class around other inner tensors."""
        context = FlattenContext(type(self), quantizer or self.quantizer, dtype or self.dtype)
        shape = self.shape if shape is None else shape
        result: Self = context.build(inner, shape, device=self.device)
        return result

    # -- usages -----------------------------------------------------------------------------------

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """Return the tensor with other planes, sharing the buffers that stay.

        Raises:
            UsageError: a plane is asked for that is not held and cannot be derived.
        """
        quantizer = self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        return self.like(self._planes(quantizer), quantizer=quantizer)

    def update_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drop or add planes in place; None keeps one as it is. The quantizer follows.

        Raises:
            UsageError: a plane is asked for that is not held and cannot be derived.
        """
        if is_torch_tensor(self) and is_compiling():
            msg = (
                f"{self.quantizer.format_name}: a compiled graph cannot see a plane dropped in "
                "place; use with_usage()"
            )
            raise UsageError(msg)
        quantizer = self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        self._set(self._planes(quantizer), quantizer)

    def _planes(self, quantizer: Quantizer) -> dict[str, Tensor]:
        held = self.inner_tensors()
        wanted = list(quantizer.describe_buffers(self.shape))
        missing = [name for name in wanted if name not in held]
        if missing:
            held.update(self.derive_inner(quantizer, missing))
        return {name: held[name] for name in wanted}

    def derive_inner(self, quantizer: Quantizer, missing: list[str]) -> dict[str, Tensor]:
        """Compute buffers of ``quantizer`` that are ``missing``; a format may override."""
        msg = (
            f"{quantizer.format_name}: the tensor does not hold {', '.join(missing)} and they "
            f"cannot be derived from {', '.join(self.inner_tensors()) or 'nothing'}; quantize the "
            "high-precision tensor with that usage"
        )
        raise UsageError(msg)

    def check_writable(self) -> None:
        """Raise :class:`UsageError` if a write would not reach the tensor this was taken from."""
        if self.is_view_copy:
            msg = (
                f"{self.quantizer.format_name}: the tensor of shape {tuple(self.shape)} is a slice "
                "or transpose whose buffers are copies, so a write would not reach the whole; "
                "write into the whole, or into a .clone()"
            )
            raise UsageError(msg)

    # -- what a format may override: layout of views ----------------------------------------------

    def view_inner(self, shape: Sequence[int]) -> dict[str, Tensor] | None:
        """Return the inner tensors of a view of ``shape``, or None if a block would be cut."""
        return self.inner_tensors() if tuple(shape) == tuple(self.shape) else None

    def narrow_inner(self, dim: int, start: int, length: int) -> dict[str, Tensor]:
        """Return the inner tensors of ``length`` entries from ``start`` of axis ``dim``.

        Raises:
            ShapeError: a block would be cut.
        """
        msg = (
            f"{self.quantizer.format_name}: a slice of axis {dim} does not keep the quantized "
            "form; call .dequantize() first"
        )
        raise ShapeError(msg)

    @classmethod
    def cat_inner(cls, tensors: Sequence[Self], dim: int) -> dict[str, Tensor] | None:
        """Return the inner tensors of the concatenation, or None if blocks would not stay whole."""
        return None

    def transpose_inner(self) -> tuple[Quantizer, dict[str, Tensor]] | None:
        """Return quantizer and inner tensors of the 2-D transpose, or None if it is not exact."""
        return None

    # -- what a format may override: products ------------------------------------------------------

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        """Return the codes of one usage as ``torch.nn.functional.scaled_mm`` takes them.

        Args:
            columnwise: sum over the rows, all axes but the last together, instead of the last axis.

        Returns:
            The operand, or None where the product must be computed from dequantized values.
        """
        return None

    # -- values, moving, saving -------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the plain tensor this one stands for, in ``dtype`` or the nominal dtype.

        Raises:
            UsageError: no plane is held.
        """
        inner = self.inner_tensors()
        if not inner:
            msg = (
                f"{self.quantizer.format_name}: the tensor holds no plane, "
                "so there is nothing to dequantize"
            )
            raise UsageError(msg)
        return self.quantizer.dequantize_impl(inner, self.shape, dtype or self.dtype)

    if TYPE_CHECKING:
        nbytes: int  # as torch declares it: a quantized tensor derives from both
    else:

        @property
        def nbytes(self) -> int:
            """Bytes held by the inner tensors."""
            # their own .nbytes refuses SymInts
            return sum(t.numel() * t.itemsize for t in self.inner_tensors().values())

    def to(
        self, device: torch.device | str, *, non_blocking: bool = False, copy: bool = False
    ) -> Self:
        """Return the storage with every inner tensor on ``device``."""
        moved = {
            n: t.to(device, non_blocking=non_blocking, copy=copy)
            for n, t in self.inner_tensors().items()
        }
        return self.like(moved)

    def numel(self) -> int:
        """Elements of the logical tensor."""
        return self.shape.numel()

    # mypy forgets the keyword of a typed dunder, which then differs from torch's
    def __repr__(self, *, tensor_contents=None):  # type: ignore[no-untyped-def]
        # no values: a large tensor in a log line costs nothing, and a fake one has none
        buffers = ", ".join(
            f"{n}={str(t.dtype)[6:]}{list(t.shape)}" for n, t in self.inner_tensors().items()
        )
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={str(self.dtype)[6:]}, "
            f"device={self.device}, quantizer={self.quantizer}, {buffers or 'no plane'})"
        )

    def _extra_state(self) -> dict[str, Any]:
        own = {*self.inner_names, "quantizer", "shape", "dtype", "device", "is_view_copy"}
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild, (
            class_id(type(self)),
            class_id(type(self.quantizer)),
            self.quantizer.state(),
            self.inner_tensors(),
            tuple(self.shape),
            self.dtype,
            getattr(self, "requires_grad", False),  # a bare storage has none
            self._extra_state(),
        )


def device_of(inner: Mapping[str, Tensor], otherwise: torch.device | None) -> torch.device:
    """Return the device of the inner tensors, or ``otherwise`` (the CPU) where there is none."""
    return next(iter(inner.values())).device if inner else otherwise or torch.device("cpu")


def prepare_for_saving(
    *tensors: Tensor | QuantizedStorage | None,
) -> tuple[list[Tensor | None], list[Any]]:
    """Split tensors into plain ones that autograd can save and what rebuilds the rest.

    ``None`` and ``torch.Tensor`` objects, wrappers included, are one entry each. A bare storage
    becomes its inner tensors. :func:`restore_from_saved` is the inverse.

    Returns:
        The flat list for ``ctx.save_for_backward`` and the objects to keep on ``ctx``.
    """
    flat: list[Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            flat.append(tensor)
            objects.append(None)
        else:
            names, context = tensor.__tensor_flatten__()
            flat.extend(getattr(tensor, name) for name in names)
            objects.append((names, context, tensor.shape))
    return flat, objects


def restore_from_saved(objects: Iterable[Any], saved: Sequence[Tensor | None]) -> list[Any]:
    """Rebuild what :func:`prepare_for_saving` split."""
    out: list[Any] = []
    at = 0
    for entry in objects:
        if entry is None:
            out.append(saved[at])
            at += 1
        else:
            names, context, shape = entry
            out.append(context.build(dict(zip(names, saved[at:], strict=False)), shape))
            at += len(names)
    return out
