# SPDX-License-Identifier: Apache-2.0
"""torch.library ops over quantized tensors, described once.

torch sees an op on flat lists, ``(Tensor[] tensors, SymInt[] sizes, Call call) -> Tensor[]``, or
``(..., Tensor(a!)[] mutated) -> ()`` if it writes into arguments: sizes travel where symbolic ones
are legal, and :class:`Call` is a value without sizes that says what the lists mean. The fake
allocates what ``outputs`` describes; there is no hand-written twin.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_proto._check import check_results, each
from te_proto._classes import source_name
from te_proto._compat import (
    FAKE_VALUES,
    OpaqueBase,
    get_opaque_type_name,
    is_compiling,
    register_value_type,
)
from te_proto.errors import UsageError
from te_proto.proto import to_tensor_proto
from te_proto.quantizer import Quantizer
from te_proto.storage import FlattenContext, QuantizedStorage, is_torch_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CONSTANTS = (bool, float, str, type(None))


@dataclass(frozen=True)
class Call(OpaqueBase):
    """What the flat lists of a call mean: an entry an argument, primitives and classes only."""

    entries: tuple[tuple[Any, ...], ...]

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return source that rebuilds this value and the classes it names (torch's protocol)."""
        classes: dict[str, type] = {"Call": Call}
        return f"Call({_source(self.entries, classes)})", classes

    def _stable_hash_for_caching(self) -> str:
        return self.__fx_repr__()[0]


register_value_type(Call, real=())


def _source(value: Any, classes: dict[str, type]) -> str:
    if isinstance(value, tuple):
        return f"({''.join(_source(v, classes) + ', ' for v in value)})"
    if isinstance(value, Quantizer):
        return f"{_source(type(value), classes)}.from_state({value.state()!r})"
    if isinstance(value, type):
        alias = source_name(value)
        classes[alias] = value
        return alias
    if isinstance(value, float):
        return f"float('{value!r}')"
    return repr(value)


class CustomOp:
    """A torch.library op whose arguments and results may be quantized; see :func:`custom_op`.

    Attributes:
        name: ``"namespace::op"``.
        argument_names: in the order of the function.
        mutates: those that it writes into.
        differentiable: whether :meth:`register_autograd` gave it a gradient.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], outputs: Callable[..., Any], mutates: Sequence[str]
    ) -> None:
        parameters = inspect.signature(fn).parameters
        if unknown := sorted(set(mutates) - set(parameters)):
            msg = f"{name}: mutates names {unknown}, but the arguments are {list(parameters)}"
            raise TypeError(msg)
        self.name = name
        self._fn = fn
        self._outputs = outputs
        self.argument_names = tuple(parameters)
        self._defaults = {
            n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty
        }
        self.mutates = tuple(mutates)
        self.__doc__ = fn.__doc__
        namespace, _, op = name.partition("::")
        self._lib = torch.library.Library(namespace, "FRAGMENT")
        tail = ", Tensor(a!)[] mutated) -> ()" if mutates else ") -> Tensor[]"
        self._lib.define(
            f"{op}(Tensor[] tensors, SymInt[] sizes, {get_opaque_type_name(Call)} call{tail}"
        )
        self._lib.impl(op, self._real, "CompositeExplicitAutograd")
        torch.library.register_fake(name, self._fake, lib=self._lib)
        self._op = getattr(getattr(torch.ops, namespace), op)
        self.differentiable = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op: eagerly, on fakes, or traced into a graph."""
        values = self.bind(*args, **kwargs)
        flat = self._op(*self._flatten(values))
        return None if self.mutates else _assemble(self._describe(values), flat)

    def under(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return torch's op, and what a call with these arguments gives it.

        Such as ``torch.library.opcheck(*op.under(x, quantizer))``.
        """
        return self._op.default, self._flatten(self.bind(*args, **kwargs))

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Give the op a gradient, for its plain floating-point arguments and results.

        Args:
            backward: ``(ctx, *grads)``, a gradient for each result (None for a quantized one),
                returns a gradient or None for each argument.
            setup_context: ``(ctx, inputs, output)`` with the arguments and results as the caller
                sees them.
        """

        def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
            ctx._te_sizes, ctx._te_call = len(inputs[1]), inputs[2]
            values = self._unflatten(*inputs)
            protos = self._describe(values)
            ctx._te_results = [(p.is_quantized, len(p.inner_names())) for p in each(protos)]
            if setup_context is not None:
                setup_context(ctx, tuple(values), _assemble(protos, output))
            # a float buffer of a quantized result, such as a scale, would require grad
            rest, buffers = iter(output), []
            for quantized, count in ctx._te_results:
                inner = [next(rest) for _ in range(count)]
                buffers.extend(inner if quantized else [])
            ctx.mark_non_differentiable(*buffers, *(ctx.non_differentiable or ()))

        def run(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, list[None] | None, None]:
            at, of_results = 0, []
            for quantized, count in ctx._te_results:
                of_results.append(None if quantized else grads[at])
                at += count
            of_arguments = backward(ctx, *of_results)
            if not isinstance(of_arguments, tuple):
                of_arguments = (of_arguments,)
            flat: list[Tensor | None] = []
            for entry, grad in zip(ctx._te_call.entries, of_arguments, strict=True):
                if entry[0] == "plain":
                    flat.append(grad)
                elif entry[0] == "quantized":
                    flat.extend([None] * len(entry[1]))
            # torch takes a list of numbers for one leaf, an empty one for an empty list of tensors
            return flat, None if ctx._te_sizes else [], None

        torch.library.register_autograd(self.name, run, setup_context=setup, lib=self._lib)
        self.differentiable = True

    def _flatten(self, values: list[Any]) -> tuple[Any, ...]:
        tensors: list[Tensor] = []
        mutated: list[Tensor] = []
        sizes: list[int | torch.SymInt] = []
        entries = []
        for name, value in zip(self.argument_names, values, strict=True):
            if (
                self.differentiable
                and is_torch_tensor(value)
                and value.requires_grad
                and isinstance(value, QuantizedStorage)
                and torch.is_grad_enabled()
            ):
                msg = (
                    f"{self.name}: {name} is quantized and requires grad, "
                    "which an op cannot pass on; detach() or dequantize() it"
                )
                raise UsageError(msg)
            if name in self.mutates and isinstance(value, QuantizedStorage):
                QuantizedStorage.check_writable(value)
            entries.append(
                _flatten(name, value, mutated if name in self.mutates else tensors, sizes)
            )
        call = Call(tuple(entries))
        return (tensors, sizes, call, mutated) if self.mutates else (tensors, sizes, call)

    def _describe(self, values: Sequence[Any]) -> Any:
        """Return the prototypes of the results, as ``outputs`` gives them."""
        return self._outputs(*[_proto(v) for v in values])

    def bind(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the values of all arguments, in order, defaults filled in."""
        given = {**self._defaults, **dict(zip(self.argument_names, args, strict=False)), **kwargs}
        if (
            len(args) > len(self.argument_names)
            or any(n not in self.argument_names[len(args) :] for n in kwargs)
            or len(given) != len(self.argument_names)
        ):
            msg = (
                f"{self.name}: takes the arguments {self.argument_names}, "
                f"got {len(args)} positional and {tuple(kwargs)}"
            )
            raise TypeError(msg)
        return [given[n] for n in self.argument_names]

    def _real(
        self, tensors: list[Tensor], sizes: list[int], call: Call, mutated: Sequence[Tensor] = ()
    ) -> list[Tensor] | None:
        values = self._unflatten(tensors, sizes, call, mutated)
        result = self._fn(*values)
        if self.mutates:
            return None
        if os.environ.get("TE_PROTO_CHECK") == "1":
            check_results(self.name, self._describe(values), result, tensors)
        flat: list[Tensor] = []
        for value in each(result):
            flat.extend(
                value.inner_tensors().values() if isinstance(value, QuantizedStorage) else [value]
            )
        return flat

    def _fake(
        self, tensors: list[Tensor], sizes: list[int], call: Call, mutated: Sequence[Tensor] = ()
    ) -> list[Tensor] | None:
        if self.mutates:
            return None
        values = self._unflatten(tensors, sizes, call, mutated)
        protos = self._describe(values)
        return [tensor for proto in each(protos) for tensor in proto.create_inner_tensors()]

    def _unflatten(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        call: Call,
        mutated: Sequence[Tensor] = (),
    ) -> list[Any]:
        """Rebuild the arguments; the inverse of :func:`_flatten` over all of them."""
        plain, written, numbers = iter(tensors), iter(mutated), iter(sizes)
        values: list[Any] = []
        for name, (kind, *rest) in zip(self.argument_names, call.entries, strict=True):
            source = written if name in self.mutates else plain
            if kind == "plain":
                values.append(next(source))
            elif kind == "quantized":
                inner_names, cls, quantizer, dtype, rank = rest
                inner = {n: next(source) for n in inner_names}
                shape = tuple(next(numbers) for _ in range(rank))
                values.append(
                    FlattenContext(cls, quantizer, getattr(torch, dtype)).build(inner, shape)
                )
            elif kind == "int":
                values.append(next(numbers))
            elif kind == "ints":
                values.append(tuple(next(numbers) for _ in range(rest[0])))
            elif kind == "dtype":
                values.append(getattr(torch, rest[0]))
            elif kind == "device":
                values.append(torch.device(rest[0]))
            else:
                values.append(rest[0])
        return values


def custom_op(
    name: str, *, outputs: Callable[..., Any] | None = None, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Make a function on plain and quantized tensors one torch.library op.

    ::

        @te_proto.custom_op("mylib::scale", outputs=lambda q, factor: q)
        def scale(q, factor): ...

    Arguments may be plain tensors, quantized tensors, bare storages, quantizers, None, ints
    (symbolic ones too), sequences of ints, bool, float, str, ``torch.dtype`` and ``torch.device``.
    The function must return new tensors.

    Args:
        name: ``"namespace::op"``.
        outputs: maps the arguments, tensors replaced by their :class:`TensorProto`, to the
            prototype of the result or a tuple of them. It is the only description: the fake is
            derived from it, and with ``TE_PROTO_CHECK=1`` each real result is checked.
        mutates: names of the arguments whose tensors the function writes into; such an op has no
            result and no ``outputs``.
    """
    if (outputs is None) == (not mutates):
        msg = (
            f"{name}: an op either has outputs, a function of prototypes, "
            "or names the arguments it mutates"
        )
        raise TypeError(msg)

    def wrap(fn: Callable[..., Any]) -> CustomOp:
        return CustomOp(name, fn, outputs or (lambda *args: None), mutates)

    return wrap


def _flatten(
    name: str, value: Any, tensors: list[Tensor], sizes: list[int | torch.SymInt]
) -> tuple[Any, ...]:
    if isinstance(value, QuantizedStorage):
        # a method of a traced tensor would be an opaque call
        inner = QuantizedStorage.inner_tensors(value)
        tensors.extend(inner.values())
        sizes.extend(value.shape)
        return (
            "quantized",
            tuple(inner),
            type(value),
            value.quantizer,
            str(value.dtype)[6:],
            len(value.shape),
        )
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("plain",)
    if isinstance(value, float) and is_compiling():
        # dynamo may take it for a symbol, which this way of copying it makes a constant
        value = float.fromhex(value.hex())
    if isinstance(value, (Quantizer, *FAKE_VALUES, *_CONSTANTS)):
        return ("const", value)
    if isinstance(value, (int, torch.SymInt)):
        sizes.append(value)
        return ("int",)
    if isinstance(value, torch.dtype):
        return ("dtype", str(value)[6:])
    if isinstance(value, torch.device):
        return ("device", str(value))
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, torch.SymInt)) for v in value):
        sizes.extend(value)
        return ("ints", len(value))
    msg = (
        f"argument {name} is a {type(value).__name__}; an op takes tensors, quantizers, None, "
        "numbers, strings, dtypes, devices and sequences of ints"
    )
    raise TypeError(msg)


def _proto(value: Any) -> Any:
    return to_tensor_proto(value) if isinstance(value, (Tensor, QuantizedStorage)) else value


def _assemble(protos: Any, flat: Sequence[Tensor]) -> Any:
    if protos is None:
        return None
    out, at = [], 0
    for proto in protos if isinstance(protos, (tuple, list)) else (protos,):
        names = proto.inner_names()
        # gradients are autograd's: a result carries the flag its op gave it
        out.append(proto.replace(requires_grad=False).assemble(flat[at : at + len(names)]))
        at += len(names)
    return tuple(out) if isinstance(protos, (tuple, list)) else out[0]
