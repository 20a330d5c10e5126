# SPDX-License-Identifier: Apache-2.0
"""Whether the results of an op are what its prototypes say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from te_proto.errors import LayoutError
from te_proto.proto import to_tensor_proto
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from te_proto.layout import BufferSpec


def each(result: Any) -> Iterator[Any]:
    """Iterate over the results of an op: none, one or a sequence."""
    if result is not None:
        yield from result if isinstance(result, (tuple, list)) else (result,)


def check_results(name: str, protos: Any, results: Any, inputs: Sequence[Tensor] = ()) -> None:
    """Raise unless ``results`` are what ``protos`` say.

    Class, buffers, their order, shape, stride, dtype and device are compared.

    Raises:
        LayoutError: naming the result and the property that differs.
    """
    wanted, found = list(each(protos)), list(each(results))
    if len(wanted) != len(found):
        msg = f"{name}: outputs describes {len(wanted)} results, the op returned {len(found)}"
        raise LayoutError(msg)
    held = {t.untyped_storage()._cdata for t in inputs}
    for i, (proto, result) in enumerate(zip(wanted, found, strict=True)):
        if not isinstance(result, (Tensor, QuantizedStorage)):
            msg = f"{name}: result {i} is described as a tensor, got a {type(result).__name__}"
            raise LayoutError(msg)
        proto, real = proto.at_rest(), to_tensor_proto(result)
        for what in ("shape", "dtype", "quantizer", "device"):
            if getattr(proto, what) != getattr(real, what):
                msg = (
                    f"{name}: {what} of result {i} is described as {getattr(proto, what)}, "
                    f"got {getattr(real, what)}"
                )
                raise LayoutError(msg)
        inner: dict[str, Any] = {"data": result}
        if isinstance(result, QuantizedStorage):
            cls, inner = proto.create_metadata().cls, result.inner_tensors()
            if type(result) is not cls:
                msg = (
                    f"{name}: class of result {i} is described as {cls.__name__}, "
                    f"got {type(result).__name__}"
                )
                raise LayoutError(msg)
        _check_buffers(f"{name}: result {i}", proto.inner_specs(), inner, held)


def _check_buffers(
    what: str, specs: dict[str, BufferSpec], inner: dict[str, Tensor], held: set[int]
) -> None:
    if list(inner) != list(specs):
        msg = f"{what} is described with the buffers {list(specs)}, got {list(inner)}"
        raise LayoutError(msg)
    for key, spec in specs.items():
        buffer = inner[key]
        got = (tuple(buffer.shape), buffer.dtype)
        if got != (tuple(spec.shape), spec.dtype) or not buffer.is_contiguous():
            msg = (
                f"{what} is described with {key} contiguous, {spec.dtype} of shape "
                f"{tuple(spec.shape)}, got {buffer.dtype} of shape {got[0]} and strides "
                f"{buffer.stride()}"
            )
            raise LayoutError(msg)
        if buffer.untyped_storage()._cdata in held:
            msg = f"{what} shares the memory of {key} with an argument; return a new tensor"
            raise LayoutError(msg)
