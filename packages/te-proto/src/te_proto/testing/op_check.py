# SPDX-License-Identifier: Apache-2.0
"""A check of a custom op against its own description, for the tests of whoever writes one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_proto._check import each
from te_proto.proto import to_tensor_proto
from te_proto.storage import QuantizedStorage
from te_proto.testing.compiles import count_compiles
from te_proto.testing.facts import assert_same_bytes, assert_same_facts, copied, pointers
from te_proto.testing.poison import poisoned_allocations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_proto.custom_ops import CustomOp

_TENSORS = (Tensor, QuantizedStorage)


def check_op(op: CustomOp, *args: Any, **kwargs: Any) -> Any:
    """Raise unless an op does for real what it says of itself, and return what it gives.

    Everything known of the results without their data is compared, in flatten order, between the
    real call, fake tensors, the meta device, and graphs with fixed and with dynamic sizes, whose
    bytes must be those of the real call too. Beyond that: the real call gives the same bytes
    whatever memory held, shares no memory with an argument, changes only the arguments that the op
    says it mutates, and those in place; ``torch.library.opcheck`` accepts it; if it is
    differentiable, a graph gives the gradients of the real call, each of the shape and dtype of
    its argument.

    Write one call for each form the arguments may take::

        def test_scale():
            check_op(scale, quantizer.quantize(torch.randn(64, 96)), 2.0)

    Args:
        op: made by :func:`te_proto.custom_op`; same arguments must give the same bytes.
        args: of the op, on one device. What it mutates is copied first, and stays as it is.
        kwargs: of the op.

    Raises:
        AssertionError: naming op, way of running it, result and what differs.
        LayoutError: the real result is not what ``outputs`` describes.
    """
    values = op.bind(*args, **kwargs)
    real = _check_real(op, values)
    _check_fakes(op, values, real)
    for dynamic in (False, True):
        _check_compiled(op, values, real, dynamic=dynamic)
    outcome = torch.library.opcheck(*op.under(*_with_copies(op, values)))
    assert set(outcome.values()) == {"SUCCESS"}, f"{op.name}: opcheck: {outcome}"
    if op.differentiable:
        _check_gradients(op, values)
    return real


def _check_real(op: CustomOp, values: list[Any]) -> Any:
    before = [copied(v) if isinstance(v, _TENSORS) else v for v in values]
    results = []
    for byte in (0x00, 0xFF):
        given = _with_copies(op, values)
        places = [pointers(v) if isinstance(v, _TENSORS) else None for v in given]
        with poisoned_allocations(byte), mock.patch.dict(os.environ, TE_PROTO_CHECK="1"):
            result = op(*given)
        for name, value, old, place in zip(op.argument_names, given, before, places, strict=True):
            if name in op.mutates:
                assert pointers(value) == place, f"{op.name}: {name} is moved, not written in place"
            elif isinstance(value, _TENSORS):
                assert_same_bytes(value, old, f"{op.name}: argument {name} is changed")
        results.append(_outcome(op, given, result))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        what = f"{op.name}: result {i} depends on what memory held, or on the call"
        assert_same_bytes(a, b, what)
    return result if not op.mutates else results[-1]


def _check_fakes(op: CustomOp, values: list[Any], real: Any) -> None:
    mode = FakeTensorMode()
    fakes = [_mapped(v, mode.from_tensor) for v in values]
    with mode:
        _compare(op, "fake", _outcome(op, fakes, op(*fakes)), real)
    device = torch.device("meta")
    places = {v.device for v in values if isinstance(v, _TENSORS)}
    metas = [
        device
        if isinstance(v, torch.device) and v in places
        else _mapped(v, lambda t: t.to(device))
        for v in values
    ]
    _compare(op, "meta", _outcome(op, metas, op(*metas)), real, ignore=("device",))


def _check_compiled(op: CustomOp, values: list[Any], real: Any, *, dynamic: bool) -> None:
    mode = "graph with dynamic sizes" if dynamic else "graph with fixed sizes"
    given = _with_copies(op, values)
    with count_compiles() as counts:
        run = torch.compile(lambda *a: op(*a), fullgraph=True, dynamic=dynamic, backend="aot_eager")
        outcome = _outcome(op, given, run(*given))
        assert counts.graphs <= 1, f"{op.name}: {mode}: {counts}"
    _compare(op, mode, outcome, real)
    for i, (found, expected) in enumerate(zip(outcome, each(real), strict=True)):
        assert_same_bytes(found, expected, f"{op.name}: {mode}: result {i}")


def _check_gradients(op: CustomOp, values: list[Any]) -> None:
    wanted = [
        (name, v)
        for name, v in zip(op.argument_names, values, strict=True)
        if isinstance(v, Tensor) and v.requires_grad
    ]
    assert wanted, f"{op.name}: differentiable, but no argument requires grad; give one that does"

    def gradients(run: Callable[..., Any]) -> Sequence[Tensor | None]:
        results = [t for t in each(run(*values)) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.ones_like(t) for t in results]
        return torch.autograd.grad(results, [v for _, v in wanted], seeds, allow_unused=True)

    real = gradients(op)
    with count_compiles():
        compiled = gradients(torch.compile(_called(op), fullgraph=True, backend="aot_eager"))
    for (name, value), found, expected in zip(wanted, compiled, real, strict=True):
        what = f"{op.name}: gradient of {name}"
        assert (found is None) == (expected is None), f"{what}: {found} in a graph, got {expected}"
        if expected is None:
            continue
        assert_same_facts(expected, torch.empty_like(value), f"{what}, beside the argument")
        assert_same_facts(found, expected, f"{what} in a graph")
        assert_same_bytes(found, expected, f"{what} in a graph")


def _called(op: CustomOp) -> Callable[..., Any]:
    return lambda *given: op(*given)


def _outcome(op: CustomOp, given: list[Any], result: Any) -> list[Any]:
    """Return the results, or what was written."""
    if not op.mutates:
        return list(each(result))
    return [v for n, v in zip(op.argument_names, given, strict=True) if n in op.mutates]


def _compare(
    op: CustomOp, mode: str, found: Sequence[Any], real: Any, *, ignore: Sequence[str] = ()
) -> None:
    expected = list(each(real))
    assert len(found) == len(expected), f"{op.name}: {mode}: {len(found)} results"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_same_facts(a, b, f"{op.name}: {mode}: result {i}", ignore=ignore)
        if not ignore:
            assert to_tensor_proto(a) == to_tensor_proto(b), f"{op.name}: {mode}: result {i}"


def _with_copies(op: CustomOp, values: list[Any]) -> list[Any]:
    """Return the arguments with copies of those that the op mutates."""
    return [
        _mapped(v, torch.clone) if n in op.mutates else v
        for n, v in zip(op.argument_names, values, strict=True)
    ]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with its tensors changed; what is no tensor stays."""
    if not isinstance(value, _TENSORS):
        return value
    if not isinstance(value, QuantizedStorage):
        return change(value.detach()).requires_grad_(value.requires_grad)
    inner = {name: change(t) for name, t in QuantizedStorage.inner_tensors(value).items()}
    context = value.__tensor_flatten__()[1]
    return context.build(inner, value.shape, requires_grad=getattr(value, "requires_grad", False))
