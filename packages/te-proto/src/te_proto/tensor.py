# SPDX-License-Identifier: Apache-2.0
"""The ``torch.Tensor`` of a format, and the one table of what torch ops do with it.

An op keeps the quantized form exactly, or goes through the one visible fallback: dequantize, say so
once, run the op. An in-place op requantizes in place. A slice that would cut a block raises.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import Self

from te_proto._classes import class_id
from te_proto._compat import is_compiling
from te_proto._ops import handlers
from te_proto.errors import DtypeError, FallbackError, ShapeError
from te_proto.layout import check_layout
from te_proto.storage import QuantizedStorage, device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_proto.quantizer import Quantizer

Policy = Literal["error", "warn", "allow"]

_LIB = torch.library.Library("te_proto", "DEF")
_LIB.define("dequantize(Tensor q, ScalarType? dtype=None) -> Tensor")
_LIB.define("straight_through(Tensor x, Tensor q) -> Tensor")
_LIB.define("inner_tensor(Tensor(a) q, int index) -> Tensor(a)")
# All only ever meet a quantized tensor, whose __torch_dispatch__ answers with plain torch ops, so
# none is left in a compiled graph. As ops, and not autograd functions, they have a gradient that
# AOTAutograd can cache.


class FallbackWarning(UserWarning):
    """An operation dequantized a quantized tensor."""


class fallback:  # noqa: N801  # reads as a verb: te_proto.fallback("error")
    """Set what happens when an op has no quantized form; as a context manager, restore it on exit.

    Args:
        policy: ``"error"`` raises :class:`FallbackError`, ``"warn"`` (the start) warns once per op
            and format, ``"allow"`` is silent. In a compiled graph the policy of its compilation
            holds.
    """

    _policy: Policy = "warn"

    def __init__(self, policy: Policy) -> None:
        if policy not in ("error", "warn", "allow"):
            msg = f"fallback: policy must be 'error', 'warn' or 'allow', got {policy!r}"
            raise ValueError(msg)
        self._previous = fallback._policy
        fallback._policy = policy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        fallback._policy = self._previous


_WARNED: set[tuple[str, str]] = set()


class QuantizedTensor(QuantizedStorage, Tensor):
    """A quantized tensor that torch sees as a tensor of the logical shape and nominal dtype.

    A format derives from its storage and from this class, and adds nothing::

        class MXFP8Tensor(MXFP8Storage, QuantizedTensor): ...

    Code that is compiled reads buffers through :meth:`inner_tensors`: dynamo takes an attribute of
    a graph's input for an input of its own, in which writes of the graph are not seen.

    Args:
        inner: inner tensors in flatten order, as ``quantizer`` describes them for ``shape``.
        quantizer: describes the layout.
        shape: logical shape; the tensor is dense and row-major.
        dtype: nominal dtype.
        requires_grad: as for any tensor.
        device: where a tensor without any inner tensor is said to be.

    Raises:
        LayoutError: ``inner`` is not what ``quantizer`` describes.
    """

    @staticmethod
    def __new__(
        cls,
        inner: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ) -> Self:
        """Make the tensor that torch sees around the inner tensors."""
        if not is_compiling():
            check_layout(inner, quantizer, shape)
        self: Self = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(shape) if not is_compiling() else shape,
            dtype=dtype,
            device=device_of(inner, device),
            requires_grad=requires_grad,
        )
        for name in cls.inner_names:
            setattr(self, name, inner.get(name))
        self.quantizer = quantizer
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do after ``__new__``."""

    # the built-in is bound to no class, unlike the classmethod it stands for
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is a built-in, bound to no class
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            out = handler(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return _fall_back(func, args, kwargs)

    # -- values -----------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the plain tensor this one stands for; the gradient passes straight through.

        Args:
            dtype: of the result; the nominal dtype if None.

        Raises:
            UsageError: no plane is held.
        """
        out: Tensor = torch.ops.te_proto.dequantize(self, dtype)
        return out

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """Return the tensor with other planes; the gradient passes straight through.

        Raises:
            UsageError: a plane is asked for that is not held and cannot be derived.
        """
        out = super().with_usage(rowwise=rowwise, columnwise=columnwise)
        if torch.is_grad_enabled() and self.requires_grad:
            out = torch.ops.te_proto.straight_through(self, out)
        return out

    def quantize_(self, x: Tensor, noop: Tensor | None = None) -> Self:
        """Quantize ``x`` into the buffers of this tensor, which keep their memory; return it.

        Args:
            x: plain or quantized, of this shape.
            noop: float32 scalar tensor; exactly 1.0 leaves every byte as it is.
        """
        self.quantizer.quantize_into(x, self, noop)
        return self

    def float(self) -> Tensor:
        """Dequantize to float32; ``.to(torch.float32)`` changes only the nominal dtype."""
        return self.dequantize(torch.float32)

    def half(self) -> Tensor:
        """Dequantize to float16; ``.to(torch.float16)`` changes only the nominal dtype."""
        return self.dequantize(torch.float16)

    def bfloat16(self) -> Tensor:
        """Dequantize to bfloat16; ``.to(torch.bfloat16)`` changes only the nominal dtype."""
        return self.dequantize(torch.bfloat16)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move, or change the nominal dtype; the codes stay as they are."""
        out: Self = Tensor.to(self, *args, **kwargs)  # type: ignore[assignment]  # its op keeps the class
        return out

    def numel(self) -> int:
        """Elements of the logical tensor."""
        return Tensor.numel(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return an empty storage: the bytes are in the inner tensors, see :attr:`nbytes`."""
        return torch.UntypedStorage(0, device=self.device)

    @property
    def data(self) -> Self:
        """The tensor outside autograd, sharing the buffers; assigning a tensor takes it over."""
        return self.detach()  # type: ignore[return-value]  # its op keeps the class

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            msg = (
                f"{self.quantizer.format_name}: data must be set to a tensor of shape "
                f"{tuple(self.shape)}, got {tuple(value.shape)}"
            )
            raise ShapeError(msg)
        if (value.dtype, value.device) != (self.dtype, self.device):
            # Module.half() comes here: to keep the old dtype and say nothing would be a lie
            msg = (
                f"{self.quantizer.format_name}: data must be set to a tensor of {self.dtype} on "
                f"{self.device}, got {value.dtype} on {value.device}; use .to() on the tensor"
            )
            raise DtypeError(msg)
        if isinstance(value, type(self)):
            self._set(value.inner_tensors(), value.quantizer)
        else:
            self.quantize_(value.detach())

    # -- torch protocols --------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            known: Self = memo[id(self)]
            return known
        out = self.like({n: t.clone() for n, t in self.inner_tensors().items()})
        out.requires_grad_(self.requires_grad)
        memo[id(self)] = out
        out.__dict__.update(copy.deepcopy(self._extra_state(), memo))
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __coerce_same_metadata_as_tangent__(
        self, metadata: object, expected_type: type | None = None
    ) -> Tensor | None:
        """Return the plain gradient that a compiled backward takes where it was given this one.

        It is a fallback as any other. None, where another was traced: torch says which.
        """
        if expected_type is not Tensor:
            return None
        _announce("backward of a compiled graph", self)
        plain: Tensor = QuantizedStorage.dequantize(self)
        return plain

    def _stable_hash_for_caching(self) -> str:
        """Key of torch's compile caches: the layout and its sizes, never the values."""
        inner = [
            (n, t.dtype, str(t.device), str(tuple(t.shape)))
            for n, t in self.inner_tensors().items()
        ]
        outer = (str(tuple(self.shape)), self.dtype, self.requires_grad)
        layout = self.quantizer._stable_hash_for_caching()
        return f"{class_id(type(self))}:{layout}:{outer}:{inner}"


def _dequantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return QuantizedStorage.dequantize(*args, **kwargs)


def _straight_through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    q: QuantizedTensor = args[1]
    return q.like(q.inner_tensors())


def _inner_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    q, index = args
    inner: Tensor = list(q.inner_tensors().values())[index]
    return inner


def _setup_dequantize(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


torch.library.register_autograd(
    "te_proto::dequantize",
    lambda ctx, grad: (grad.to(ctx.dtype), None),
    setup_context=_setup_dequantize,
    lib=_LIB,
)
torch.library.register_autograd(
    "te_proto::straight_through",
    lambda ctx, grad: (grad, None),
    setup_context=lambda ctx, inputs, output: None,
    lib=_LIB,
)

_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.ops.te_proto.dequantize.default: _dequantize,
    torch.ops.te_proto.straight_through.default: _straight_through,
    torch.ops.te_proto.inner_tensor.default: _inner_tensor,
    **handlers(),
}


def _fall_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized arguments; requantize what it wrote into."""
    plain: dict[int, Tensor] = {}
    for q in tree_leaves((args, kwargs)):
        if isinstance(q, QuantizedTensor) and id(q) not in plain:
            _announce(func, q)
            plain[id(q)] = QuantizedStorage.dequantize(q)

    schema = func._schema.arguments
    given = {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs
    targets = [
        given[a.name] for a in schema if a.alias_info and a.alias_info.is_write and a.name in given
    ]
    args, kwargs = tree_map_only(QuantizedTensor, lambda q: plain[id(q)], (args, kwargs))
    out = func(*args, **kwargs)

    written = {id(plain[id(q)]): q for q in tree_leaves(targets) if isinstance(q, QuantizedTensor)}
    for q in written.values():
        q.quantize_(plain[id(q)])
    return tree_map_only(Tensor, lambda t: written.get(id(t), t), out)


def _announce(func: Any, q: QuantizedTensor) -> None:
    if fallback._policy == "allow":
        return
    name = q.quantizer.format_name
    msg = (
        f"{name}: {func} has no quantized form and dequantizes its {type(q).__name__}: {q.nbytes} "
        f"bytes become {q.numel() * q.dtype.itemsize} of {str(q.dtype)[6:]}; call .dequantize() "
        "first, or te_proto.fallback('allow')"
    )
    if fallback._policy == "error":
        raise FallbackError(msg)
    if (str(func), name) not in _WARNED:
        _WARNED.add((str(func), name))
        warnings.warn(msg, FallbackWarning, stacklevel=4)
