# SPDX-License-Identifier: Apache-2.0
"""Handlers of torch ops that keep the quantized form; layouts are the format's, see storage.py.

A handler returns NotImplemented where the form cannot be kept, and the visible fallback runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from te_proto.errors import DeviceError, DtypeError, ShapeError
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _bind(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return all arguments of ``func`` by name, defaults included: nothing depends on position."""
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound.update({a.name: v for a, v in zip(func._schema.arguments, args, strict=False)})
    bound.update(kwargs)
    return bound


def _axis(func: Any, dim: int, rank: int) -> int:
    """Return ``dim`` counted from the front; torch does not check it before a handler runs."""
    if not -rank <= dim < rank:
        msg = f"{func}: dim {dim} is out of range for a tensor of {rank} axes"
        raise IndexError(msg)
    return dim % rank


def _alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    out = args[0].like(args[0].inner_tensors())
    out.is_view_copy = args[0].is_view_copy
    return out


def _clone(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].like({n: t.clone() for n, t in args[0].inner_tensors().items()})


def _pin(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].like({n: t.pin_memory() for n, t in args[0].inner_tensors().items()})


def _is_pinned(func: Any, args: Args, kwargs: Kwargs) -> bool:
    inner = args[0].inner_tensors()
    return bool(inner) and all(t.is_pinned() for t in inner.values())


def _to_copy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q, given = args[0], _bind(func, args, kwargs)
    dtype = given["dtype"] or q.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    move = {"device": given["device"], "non_blocking": given["non_blocking"], "copy": True}
    inner = {n: t.to(**move) for n, t in q.inner_tensors().items()}
    if given["pin_memory"]:
        inner = {n: t.pin_memory() for n, t in inner.items()}
    return q.like(inner, dtype=dtype)


def _copy_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    dst, src = args[:2]
    if isinstance(dst, QuantizedStorage):
        dst.check_writable()
    if not isinstance(dst, QuantizedStorage):
        dst.copy_(src.dequantize(dst.dtype if dst.dtype.is_floating_point else None))
        return dst
    if isinstance(src, QuantizedStorage) and dst.shape == src.shape:
        wanted, held = dst.inner_tensors(), src.inner_tensors()
        usage = {"rowwise": dst.quantizer.rowwise, "columnwise": dst.quantizer.columnwise}
        same = src.quantizer.replace(internal=dst.quantizer.internal, **usage) == dst.quantizer
        if same and all(n in held for n in wanted):
            for name, buffer in wanted.items():
                buffer.copy_(held[name])
            return dst
    value = src.dequantize() if isinstance(src, QuantizedStorage) else src
    dst.quantizer.quantize_into(value.to(dst.dtype).expand(dst.shape), dst)
    return dst


def _like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``empty_like, new_empty, new_zeros``, where the format takes dtype and shape."""
    q, given = args[0], _bind(func, args, kwargs)
    dtype, shape = given["dtype"] or q.dtype, given.get("size", q.shape)
    quantizer = q.quantizer.replace(internal=False)
    try:
        quantizer.check_shape(shape)
    except ShapeError:
        return NotImplemented
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    out = quantizer.make_empty(shape, dtype=dtype, device=given["device"] or q.device)
    if func is aten.new_zeros.default:
        # a format may refuse the other dtype as an input, and zeros are the same in each
        quantizer.quantize_into(torch.zeros(shape, dtype=q.dtype, device=out.device), out)
    return out


def _plain_like(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """``zeros_like`` and kin are plain: an optimizer's moments must not be quantized unasked."""
    q = args[0]
    out: Tensor = func(torch.empty(q.shape, dtype=q.dtype, device=q.device), *args[1:], **kwargs)
    return out


def _view_as(q: Any, shape: Sequence[int]) -> Any:
    inner = q.view_inner(shape)
    if inner is None:
        return NotImplemented
    held = q.inner_tensors()
    out = q.like(inner, shape=shape)
    # codes of the logical shape are a view, or what is beside them is a copy too
    beside = {n: t for n, t in inner.items() if tuple(t.shape) != tuple(shape)}
    out.is_view_copy = q.is_view_copy or not all(_shares(t, held[n]) for n, t in beside.items())
    return out


def _shares(a: Tensor, b: Tensor) -> bool:
    return a is b or torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


def _view_copy(
    q: Any, inner: dict[str, Tensor], shape: Sequence[int], quantizer: Any = None
) -> Any:
    """Return what torch takes for a view; it refuses writes, unless it holds the very buffers."""
    held = q.inner_tensors().values()
    out = q.like(inner, quantizer=quantizer, shape=shape)
    same = all(any(t is h for h in held) for t in inner.values())
    out.is_view_copy = q.is_view_copy or not same
    return out


def infer_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Return ``shape`` with its one -1 filled in.

    Raises:
        ShapeError: it does not have ``numel`` elements.
    """
    known = math.prod(n for n in shape if n != -1)
    out = tuple(numel // known if n == -1 and known else n for n in shape)
    if math.prod(out) != numel:
        msg = f"view: shape {tuple(shape)} has not the {numel} elements of the tensor"
        raise ShapeError(msg)
    return out


def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _view_as(args[0], infer_shape(args[1], args[0].numel()))


def _unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q = args[0]
    at = _axis(func, args[1], q.dim() + 1)
    return _view_as(q, (*q.shape[:at], 1, *q.shape[at:]))


def _squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q = args[0]
    dims = (
        range(q.dim()) if len(args) == 1 else ([args[1]] if isinstance(args[1], int) else args[1])
    )
    # a 0-d tensor counts as one of a single axis
    axes = (_axis(func, d, max(q.dim(), 1)) for d in dims)
    gone = {d for d in axes if q.dim() and q.shape[d] == 1}
    return _view_as(q, [n for d, n in enumerate(q.shape) if d not in gone])


def _expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q = args[0]
    shape = tuple(n if s == -1 else s for s, n in zip(args[1], q.shape, strict=False))
    return (
        _alias(func, args, kwargs)
        if shape == tuple(q.shape) and len(args[1]) == q.dim()
        else NotImplemented
    )


def _as_strided(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = _bind(func, args, kwargs)
    q = given["self"]
    if (
        tuple(given["size"]) == tuple(q.shape)
        and tuple(given["stride"]) == q.stride()
        and not given["storage_offset"]
    ):
        return _alias(func, (q,), {})
    msg = (
        f"{q.quantizer.format_name}: as_strided must keep shape {tuple(q.shape)} and strides "
        f"{q.stride()}, "
        f"got {tuple(given['size'])} and {tuple(given['stride'])}; call .dequantize() first"
    )
    raise ShapeError(msg)


def _narrow(q: Any, dim: int, start: int, length: int) -> Any:
    if start == 0 and length == q.shape[dim]:
        return _alias(None, (q,), {})
    shape = [length if d == dim else n for d, n in enumerate(q.shape)]
    return _view_copy(q, q.narrow_inner(dim, start, length), shape)


def _slice(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = _bind(func, args, kwargs)
    q, step = given["self"], given["step"]
    dim = _axis(func, given["dim"], q.dim())
    size = q.shape[dim]
    start, end = given["start"] or 0, size if given["end"] is None else given["end"]
    start, end = (min(max(i + size if i < 0 else i, 0), size) for i in (start, end))
    if step != 1:
        msg = (
            f"{q.quantizer.format_name}: a slice must have step 1, got {step} on axis {dim}; "
            "call .dequantize() first"
        )
        raise ShapeError(msg)
    return _narrow(q, dim, start, max(end - start, 0))


def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q, dim, index = args[:3]
    dim = _axis(func, dim, q.dim())
    size = q.shape[dim]
    if not -size <= index < size:
        msg = f"select: index {index} is out of range for axis {dim} of size {size}"
        raise IndexError(msg)
    try:
        piece = _narrow(q, dim, index % size, 1)
    except ShapeError:
        if dim == q.dim() - 1:
            return NotImplemented  # one column is no slice of blocks, but may be read
        raise
    return _view_as(piece, [n for d, n in enumerate(q.shape) if d != dim])


def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = _bind(func, args, kwargs)
    q = given["self"]
    dim = _axis(func, given["dim"], q.dim())
    size = q.shape[dim]
    if "split_sizes" in given:
        lengths = list(given["split_sizes"])
        if any(length < 0 for length in lengths):
            msg = f"split: split_sizes {lengths} must not be negative"
            raise ShapeError(msg)
        if sum(lengths) != size:
            msg = f"split: split_sizes {lengths} must add up to {size}, the size of axis {dim}"
            raise ShapeError(msg)
    else:
        step = given["split_size"]
        if step < 0 or (step == 0 and size):
            msg = f"split: split_size must be positive, got {step}"
            raise ShapeError(msg)
        step = max(step, 1)
        lengths = [min(step, size - at) for at in range(0, size, step)] or [0]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [_narrow(q, dim, start, length) for start, length in zip(starts, lengths, strict=True)]


def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = _bind(func, args, kwargs)
    q = given["self"]
    dim = _axis(func, given["dim"], q.dim())
    pieces = [_select(aten.select.int, (q, dim, i), {}) for i in range(q.shape[dim])]
    return NotImplemented if any(p is NotImplemented for p in pieces) else pieces


def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = _bind(func, args, kwargs)
    tensors, first = given["tensors"], given["tensors"][0]
    alike = isinstance(first, QuantizedStorage) and all(
        type(t) is type(first) and t.quantizer == first.quantizer and t.dtype == first.dtype
        for t in tensors
    )
    if not alike or any(t.dim() != first.dim() for t in tensors):
        return NotImplemented
    dim = _axis(func, given["dim"], first.dim())
    shapes = [list(t.shape) for t in tensors]
    if any(s[:dim] + s[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :] for s in shapes):
        msg = f"cat: shapes must agree on every axis but {dim}, got {[tuple(s) for s in shapes]}"
        raise ShapeError(msg)
    if len(tensors) == 1:
        return _clone(func, (first,), {})
    inner = type(first).cat_inner(tensors, dim)
    shape = [*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :]]
    return NotImplemented if inner is None else first.like(inner, shape=shape)


def _transpose(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q = args[0]
    if q.dim() != 2:
        return NotImplemented
    order = [1, 0]
    if func is not aten.t.default:
        dims = args[1:] if func is aten.transpose.int else args[1]
        order = [_axis(func, d, 2) for d in dims[:2]]
        if func is aten.transpose.int:
            order = [1, 0] if order[0] != order[1] else [0, 1]
        elif len(dims) != 2 or sorted(order) != [0, 1]:
            msg = f"permute: dims must name each of the 2 axes once, got {list(dims)}"
            raise ShapeError(msg)
    if order == [0, 1]:
        return _alias(func, args, kwargs)
    result = q.transpose_inner()
    return (
        NotImplemented
        if result is None
        else _view_copy(q, result[1], (q.shape[1], q.shape[0]), result[0])
    )


def _record_stream(func: Any, args: Args, kwargs: Kwargs) -> None:
    for tensor in args[0].inner_tensors().values():
        tensor.record_stream(args[1])


def _set_data_refused(func: Any, args: Args, kwargs: Kwargs) -> Any:
    msg = "set_: a quantized tensor has no storage of its own; assign .data, or copy_ into it"
    raise DeviceError(msg)


def _view_dtype(func: Any, args: Args, kwargs: Kwargs) -> Any:
    q = args[0]
    msg = (
        f"{q.quantizer.format_name}: the bits of a quantized tensor cannot be viewed as {args[1]}; "
        f"use an inner tensor ({', '.join(q.inner_tensors())})"
    )
    raise DtypeError(msg)


def handlers() -> dict[Any, Callable[[Any, Args, Kwargs], Any]]:
    """Return the table: op overload -> handler."""
    table: dict[Callable[[Any, Args, Kwargs], Any], tuple[Any, ...]] = {
        _alias: (aten.detach.default, aten.alias.default, aten.lift_fresh.default),
        _clone: (aten.clone.default,),
        _pin: (aten._pin_memory.default,),
        _is_pinned: (aten.is_pinned.default,),
        _to_copy: (aten._to_copy.default,),
        _copy_: (aten.copy_.default,),
        _like: (aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default),
        _plain_like: (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
        ),
        _view: (aten.view.default, aten._unsafe_view.default, aten.reshape.default),
        _view_dtype: (aten.view.dtype,),
        _unsqueeze: (aten.unsqueeze.default,),
        _squeeze: (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        _expand: (aten.expand.default,),
        _as_strided: (aten.as_strided.default,),
        _slice: (aten.slice.Tensor,),
        _select: (aten.select.int,),
        _split: (aten.split.Tensor, aten.split_with_sizes.default),
        _unbind: (aten.unbind.int,),
        _cat: (aten.cat.default,),
        _transpose: (aten.t.default, aten.transpose.int, aten.permute.default),
        _record_stream: (aten.record_stream.default,),
        _set_data_refused: (aten.set_.source_Tensor, aten.set_.source_Storage),
    }
    return {op: handler for handler, ops in table.items() for op in ops}
