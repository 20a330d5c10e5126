# SPDX-License-Identifier: Apache-2.0
"""The base of all quantizers: frozen values that describe a layout and fill it."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import typing
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import Self, dataclass_transform

from te_proto.__about__ import __version__
from te_proto._arguments import check_call, check_input, check_noop, check_out
from te_proto._classes import register_class, source_name
from te_proto._compat import OpaqueBase, is_compiling, register_value_type
from te_proto.errors import QuantizerError
from te_proto.storage import FlattenContext, QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from te_proto.layout import BufferSpec

_FIELD_TYPES = (bool, int, float, str)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Quantizer(OpaqueBase):
    """What a format does to a tensor, as a value: equal fields mean an equal quantizer.

    A subclass is made a frozen, keyword-only dataclass and registered with torch as an opaque value
    when it is defined. Its fields are its identity and may only be bool, int, float, str or Enum.
    A format supplies the class attributes, :meth:`describe_buffers`, :meth:`check_shape`,
    :meth:`quantize_impl`, :meth:`dequantize_impl` and :meth:`alignment`. Code that is traced may
    call methods of a quantizer and read its fields, but not its properties: dynamo (torch 2.13)
    cannot.

    Attributes:
        rowwise: produce the plane whose blocks run along the last axis.
        columnwise: produce the plane whose blocks run along the rows.
        internal: produce the bare storage, without autograd and torch ops, instead of the tensor.
        optimize_for_gemm: allow layouts that only a GEMM reads, such as swizzled scales.
    """

    rowwise: bool = True
    columnwise: bool = True
    internal: bool = False
    optimize_for_gemm: bool = False

    format_name: ClassVar[str]
    storage_class: ClassVar[type[QuantizedStorage]]
    tensor_class: ClassVar[type[Any]]

    if TYPE_CHECKING:
        # _define makes every quantizer a dataclass, which mypy cannot see
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _define(cls)

    def __post_init__(self) -> None:
        for name, kind in type(self)._field_types().items():
            value = getattr(self, name)
            if type(value) is not kind and not (kind is float and type(value) is int):
                self._refuse(name, f"must be a {kind.__name__}", value)
            if value != value:  # NaN would make a quantizer that is not equal to its own copy
                self._refuse(name, "must be a number", value)

    @classmethod
    def _field_types(cls) -> dict[str, type]:
        types: dict[str, type] = cls.__dict__["_types"]
        return types

    def _refuse(self, option: str, rule: str, value: object, todo: str = "") -> typing.NoReturn:
        """Raise the error of an option that the format does not have."""
        msg = (
            f"{self.format_name}: option {option} {rule}, got {value!r}{'; ' if todo else ''}{todo}"
        )
        raise QuantizerError(msg)

    # -- what a format supplies -------------------------------------------------------------------

    @abstractmethod
    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        """Return the inner tensors of a tensor of ``shape``, present ones only, in flatten order.

        This is the only description of the layout: allocation, fakes, the flatten protocol,
        checkpoints and memory plans are derived from it.

        Args:
            shape: logical shape, already accepted by :meth:`check_shape`; may hold SymInts.
        """

    @abstractmethod
    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise :class:`te_proto.errors.ShapeError` if a plane that is on cannot hold ``shape``."""

    @abstractmethod
    def quantize_impl(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantize ``x`` and return its buffers, those that :meth:`describe_buffers` names.

        Args:
            x: a plain tensor whose shape and dtype were checked; any strides.
            *args: none is passed; a format declares just ``x`` and its call arguments.
            **kwargs: its :meth:`call_arguments`.
        """

    @abstractmethod
    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Return the plain tensor of ``shape`` and ``dtype`` that ``inner`` stands for."""

    @abstractmethod
    def alignment(self) -> tuple[int, int]:
        """Multiples ``(M, K)`` must have for the usages that are on; 1 where any size will do."""

    def quantize_into_impl(
        self, x: Tensor, out: dict[str, Tensor], noop: Tensor | None, **call: Any
    ) -> None:
        """Quantize ``x`` into the buffers ``out``; a format with kernels may override.

        Args:
            x: as for :meth:`quantize_impl`.
            out: buffers that were checked against :meth:`describe_buffers`.
            noop: one float32 element; exactly 1.0 leaves every byte as it is.
            **call: its :meth:`call_arguments`.
        """
        self.copy_quantized(x, out, noop, **call)

    def copy_quantized(
        self, x: Tensor, out: dict[str, Tensor], noop: Tensor | None, **call: Any
    ) -> None:
        """Quantize ``x`` and copy its buffers; what :meth:`quantize_into_impl` does by default.

        An override calls it by this name: graphs of torch 2.11 know no ``super()`` of a quantizer.
        """
        for name, made in self.quantize_impl(x, **call).items():
            if noop is not None:
                made = torch.where(noop.reshape(()) == 1.0, out[name], made)
            out[name].copy_(made)

    def check_input(self, x: Tensor) -> None:
        """Raise if an option of the format refuses ``x``; a format may override.

        Args:
            x: plain; its shape and dtype were checked.
        """

    # -- values -----------------------------------------------------------------------------------

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """Return the same quantizer for other usages; None keeps one as it is."""
        return dataclasses.replace(
            self,
            rowwise=self.rowwise if rowwise is None else rowwise,
            columnwise=self.columnwise if columnwise is None else columnwise,
        )

    def replace(self, **changes: Any) -> Self:
        """Return the same quantizer with other options."""
        return dataclasses.replace(self, **changes)

    def state(self) -> dict[str, bool | int | float | str]:
        """Return the fields as plain values; :meth:`from_state` rebuilds an equal quantizer."""
        return {
            name: value.name if isinstance(value, enum.Enum) else value
            for name, value in ((name, getattr(self, name)) for name in type(self)._field_types())
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Rebuild the quantizer whose :meth:`state` this is; absent fields take their defaults."""
        types = cls._field_types()
        if unknown := sorted(set(state) - set(types)):
            msg = (
                f"{cls.format_name}: the saved quantizer has options {unknown} that {cls.__name__} "
                "does not have; install the version of the plugin that wrote it, or a newer one"
            )
            raise QuantizerError(msg)
        options = dict(state)
        for name, value in state.items():
            kind = types[name]
            if issubclass(kind, enum.Enum):
                if value not in kind.__members__:
                    msg = (
                        f"{cls.format_name}: option {name} must be one of "
                        f"{', '.join(kind.__members__)}, got {value!r}; install the version of the "
                        "plugin that wrote it, or a newer one"
                    )
                    raise QuantizerError(msg)
                options[name] = kind[value]
        return cls(**options)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return source that rebuilds this value and the classes it names (torch's protocol)."""
        own = source_name(type(self))
        classes: dict[str, type] = {own: type(self)}
        parts = []
        for name, kind in type(self)._field_types().items():
            value = getattr(self, name)
            if isinstance(value, enum.Enum):
                classes[source_name(kind)] = kind
                parts.append(f"{name}={source_name(kind)}.{value.name}")
            elif isinstance(value, float) and not math.isfinite(value):
                parts.append(f"{name}=float('{value}')")
            else:
                parts.append(f"{name}={value!r}")
        return f"{own}({', '.join(parts)})", classes

    def _stable_hash_for_caching(self) -> str:
        """Key of torch's compile caches; the default would look at the class only.

        What is traced also depends on the releases of te-proto and the plugin, and on the CPU.
        """
        plugin = sys.modules[type(self).__module__.partition(".")[0]]
        capability = torch.backends.cpu.get_cpu_capability()
        code = (__version__, getattr(plugin, "__version__", None), capability)
        return f"{self.__fx_repr__()[0]}:{code}"

    # -- what the base gives ----------------------------------------------------------------------

    def alloc_tensors(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        """Allocate the buffers of a tensor of ``shape``, uninitialised."""
        self.check_shape(shape)
        return {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for name, spec in self.describe_buffers(shape).items()
        }

    def create_metadata(self, dtype: torch.dtype) -> FlattenContext:
        """Return the flatten context of a tensor of nominal ``dtype`` that this quantizer makes."""
        cls = self.storage_class if self.internal else self.tensor_class
        return FlattenContext(cls, self.at_rest(), dtype)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str,
        requires_grad: bool = False,
    ) -> Any:
        """Return a quantized tensor with uninitialised buffers."""
        from te_proto.proto import TensorProto  # proto builds on this module

        return TensorProto(
            shape=tuple(shape),
            dtype=dtype,
            quantizer=self,
            device=device,
            requires_grad=requires_grad,
        ).create_tensor()

    def quantize(
        self,
        x: Tensor | QuantizedStorage,
        *,
        group: str | None = None,
        rng: Tensor | None = None,
    ) -> Any:
        """Quantize ``x``; its gradient passes straight through.

        Args:
            x: float32, bfloat16 or float16, any strides and device; a quantized one is dequantized.
            group: name of the c10d group over which amax is reduced, for quantizers that do.
            rng: int64 ``[2]`` on ``x``'s device, seed and offset, for quantizers that round
                stochastically: equal ones give equal bytes.

        Returns:
            ``tensor_class`` of ``x``'s shape and dtype, or ``storage_class`` if ``internal``.

        Raises:
            ShapeError: the planes that are on cannot hold the shape.
            DtypeError: ``x`` has another dtype.
            UsageError: neither rowwise nor columnwise is on, or ``group`` or ``rng`` is given to a
                quantizer that has no use for it, or not given to one that needs it.
        """
        plain = x.dequantize() if isinstance(x, QuantizedStorage) else x
        check_input(self, plain)
        call = check_call(self, group=group, rng=rng)
        with torch.no_grad():
            inner = self.quantize_impl(plain.detach(), **call)
        if not is_compiling():
            # .data is no view: a graph that takes one as input is guarded on sizes of its base
            inner = {name: tensor.data for name, tensor in inner.items()}
        out = self.create_metadata(plain.dtype).build(inner, plain.shape)
        if not self.internal and torch.is_grad_enabled() and plain.requires_grad:
            return torch.ops.te_proto.straight_through(plain, out)
        return out

    def quantize_into(
        self,
        x: Tensor | QuantizedStorage,
        out: QuantizedStorage,
        noop: Tensor | None = None,
        *,
        group: str | None = None,
        rng: Tensor | None = None,
    ) -> None:
        """Quantize ``x`` into the buffers of ``out``, which keep their memory.

        Args:
            x: as for :meth:`quantize`; moved to ``out``'s device first.
            out: quantized tensor or storage of the same shape, described by this quantizer; only
                ``internal`` may differ.
            noop: float32 scalar tensor on that device; exactly 1.0 leaves every byte as it is,
                decided on the device.
            group: as for :meth:`quantize`.
            rng: as for :meth:`quantize`.

        Raises:
            LayoutError: another quantizer describes ``out``.
            ShapeError: ``out`` has another shape.
            UsageError: ``out`` is a slice, whose buffers are copies.
        """
        plain = x.dequantize() if isinstance(x, QuantizedStorage) else x
        check_input(self, plain)
        check_out(self, plain, out)
        held = QuantizedStorage.inner_tensors(out)
        check_noop(self, noop, out.device)
        call = check_call(self, group=group, rng=rng)
        with torch.no_grad():
            self.quantize_into_impl(plain.detach().to(out.device), held, noop, **call)

    def call_arguments(self) -> tuple[str, ...]:
        """Return which of ``group`` and ``rng`` this quantizer needs with every call.

        A format whose options ask for one overrides this, and takes it in :meth:`quantize_impl`.
        """
        return ()

    def at_rest(self) -> Self:
        """Return the quantizer that a tensor made by this one keeps.

        A format with options that concern a call and no buffer, such as a reduction over a group,
        turns them off: what is written into the tensor later comes without that group.
        """
        return self


def _define(cls: type[Any]) -> None:
    """Make ``cls`` a frozen dataclass, check its fields and register it with torch."""
    dataclass(frozen=True, kw_only=True)(cls)
    hints = typing.get_type_hints(cls)
    types = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for name, kind in types.items():
        if kind not in _FIELD_TYPES and not (
            isinstance(kind, type) and issubclass(kind, enum.Enum)
        ):
            msg = (
                f"{cls.__name__}.{name} is a {kind}: a quantizer's field must be bool, int, float, "
                "str or an Enum, so that quantizers are values; pass anything else as an argument "
                "of the call"
            )
            raise TypeError(msg)
    cls._types = types  # read back by _field_types
    register_class(cls)
    register_value_type(cls, real=("with_usage", "replace"))


_define(Quantizer)
