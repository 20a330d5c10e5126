# SPDX-License-Identifier: Apache-2.0
"""What is compared: all that is known of a tensor without its data, its bytes, its refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from te_proto._classes import class_id
from te_proto.errors import TeError
from te_proto.storage import QuantizedStorage
from te_proto.testing.compare import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def facts(tensor: Tensor | QuantizedStorage) -> dict[str, Any]:
    """Return all that is known of a tensor, plain or quantized, without its data.

    Inner tensors are found as ``"<buffer>.<field>"``, and their names in flatten order as
    ``"buffers"``.
    """
    found: dict[str, Any] = {
        "class": _class_of(tensor),
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device.type,
        "requires_grad": getattr(tensor, "requires_grad", False),
    }
    if isinstance(tensor, Tensor):
        found |= {"stride": tuple(tensor.stride()), "offset": tensor.storage_offset()}
    if isinstance(tensor, QuantizedStorage):
        names, context = tensor.__tensor_flatten__()
        found |= {"quantizer": tensor.quantizer, "context": context, "buffers": tuple(names)}
        for name in names:
            for field, value in facts(getattr(tensor, name)).items():
                found[f"{name}.{field}"] = value
    return found


def _class_of(tensor: object) -> str:
    # fakes stand for plain tensors
    return class_id(type(tensor)) if isinstance(tensor, QuantizedStorage) else "plain"


def assert_same_facts(
    actual: Any,
    expected: Any,
    what: str,
    *,
    ignore: Collection[str] = (),
    view: bool = False,
) -> None:
    """Raise AssertionError, naming every fact that differs, unless two tensors have the same.

    Args:
        actual: a tensor, plain or quantized, real, fake or on the meta device.
        expected: the same.
        what: put in front of the message: mode and case.
        ignore: fields not to compare, such as ``"device"``, of the tensor and of its buffers.
        view: buffers may begin in the middle of a storage, and strides count where they are used:
            along axes of two elements or more.
    """
    found, wanted = facts(actual), facts(expected)
    if view:
        ignore = {"offset", *ignore}
        found, wanted = _used_strides(found), _used_strides(wanted)
    wrong = [
        f"{key} is {found.get(key, 'absent')}, expected {wanted.get(key, 'absent')}"
        for key in dict.fromkeys([*wanted, *found])
        if key.rpartition(".")[2] not in ignore and found.get(key) != wanted.get(key)
    ]
    if wrong:
        msg = f"{what}: {'; '.join(wrong)}"
        raise AssertionError(msg)


def _used_strides(known: dict[str, Any]) -> dict[str, Any]:
    def used(key: str) -> tuple[int, ...]:
        shape = known[f"{key.removesuffix('stride')}shape"]
        empty = 0 in shape
        return tuple(s for s, n in zip(known[key], shape, strict=True) if n > 1 and not empty)

    return {key: used(key) if key.endswith("stride") else v for key, v in known.items()}


def buffers(tensor: Any) -> dict[str, Tensor]:
    """Return the inner tensors of a quantized tensor, or a plain one as ``"data"``."""
    if isinstance(tensor, QuantizedStorage):
        return QuantizedStorage.inner_tensors(tensor)
    return {"data": tensor}


def copied(tensor: Any) -> dict[str, Tensor]:
    """Return copies of the buffers, to compare with later."""
    return {name: buffer.detach().clone() for name, buffer in buffers(tensor).items()}


def pointers(tensor: Any) -> dict[str, int]:
    """Return where the buffers lie."""
    return {name: buffer.data_ptr() for name, buffer in buffers(tensor).items()}


def assert_same_bytes(actual: Any, expected: Any, what: str) -> None:
    """Raise AssertionError unless both have the same buffers, in order and byte for byte.

    Args:
        actual: a tensor, plain or quantized, or a mapping of buffers.
        expected: the same.
        what: put in front of the message, before the buffer that differs.
    """
    found = actual if isinstance(actual, dict) else buffers(actual)
    wanted = expected if isinstance(expected, dict) else buffers(expected)
    if list(found) != list(wanted):
        msg = f"{what}: buffers are {list(found)}, expected {list(wanted)}"
        raise AssertionError(msg)
    for name, buffer in found.items():
        assert_same_bits(buffer, wanted[name], what=f"{what}: {name}")


class Refusal(NamedTuple):
    """An error of ours that a call raised."""

    kind: type[TeError]
    message: str


def refusal(call: Callable[[], object]) -> Refusal | None:
    """Return the error with which ``call`` refuses its arguments, or None if it takes them."""
    try:
        call()
    except TeError as error:
        return Refusal(type(error), str(error))
    return None
