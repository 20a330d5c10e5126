# SPDX-License-Identifier: Apache-2.0
"""Copies, moves, writes in place, planes that come and go: no plane is stale, no memory lost."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import TYPE_CHECKING, Any

import torch

from te_proto.errors import QuantizerError, UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.proto import to_tensor_proto
from te_proto.tensor import fallback
from te_proto.testing.conformance.base import USAGES, Case, Kit
from te_proto.testing.conformance.draws import cases, choices
from te_proto.testing.facts import (
    assert_same_bytes,
    assert_same_facts,
    buffers,
    pointers,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from te_proto.quantizer import Quantizer


class CopyConformance(Kit):
    """The tensor's life after it was quantized."""

    # -- into memory that stays -------------------------------------------------------------------

    def test_copy_in_place_writes_every_plane(self) -> None:
        """From plain, quantized, other usages: NVIDIA/TransformerEngine#2951.

        No plane is left stale and no buffer moves; what cannot be written raises before it writes.
        """

        def check(case: Case) -> None:
            for what, source in self._sources(case).items():
                expected = self._expected(case, source)
                for how, write in _WRITES.items():
                    made = self.quantize(case.quantizer, case.input())
                    before = pointers(made)
                    label = f"{case}: {how} from {what}"
                    with fallback("error"):
                        write(made, source)
                    assert pointers(made) == before, f"{label}: a buffer moved"
                    # of the same layout the codes are taken as they are
                    taken = how != "quantize_" and _held_alike(source, made)
                    assert_same_bytes(made, taken or expected, label)
                    assert_same_facts(made, expected, label)

        self.explore(check, cases(self, internal=(False,)), self._fixed())

    def test_load_state_dict_keeps_the_memory(self) -> None:
        """Of a parameter, from every kind of value; no key beyond the module's own.

        A frozen one stays frozen: pytorch/ao#1873.
        """

        def check(case: Case) -> None:
            for what, source in self._sources(case, options=True).items():
                layer = torch.nn.Linear(1, 1, bias=False)
                weight = self.quantize(case.quantizer, case.input())
                frozen = what != "plain"
                layer.weight = torch.nn.Parameter(weight, requires_grad=not frozen)
                before = pointers(layer.weight)
                assert list(layer.state_dict()) == ["weight"], f"{case}: {list(layer.state_dict())}"
                layer.load_state_dict({"weight": source})
                label = f"{case}: load_state_dict from {what}"
                assert pointers(layer.weight) == before, f"{label}: a buffer moved"
                assert layer.weight.requires_grad != frozen, f"{label}: frozen={frozen} is lost"
                taken = _held_alike(source, layer.weight)
                assert_same_bytes(layer.weight, taken or self._expected(case, source), label)

        self.explore(check, None, self._fixed()[:6])

    def test_assigned_data_is_taken_over(self) -> None:
        """``.data`` shares the buffers, and assigning takes others."""
        for case in self._fixed():
            made = self.quantize(case.quantizer, case.input())
            other = self.quantize(case.quantizer, case.input(1))
            assert pointers(made.data) == pointers(made), f"{case}: .data copies"
            made.data = other
            assert_same_bytes(made, other, f"{case}: .data = tensor")

    def test_write_in_place_requantizes_every_plane(self) -> None:
        """``zero_``, ``mul_`` and kin write through, in the memory that is there."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            before = pointers(made)
            with fallback("allow"):
                made.zero_()
            assert pointers(made) == before, f"{case}: zero_() moved a buffer"
            for plane, values in self.planes(made).items():
                assert not values.any(), f"{case}: zero_() left the {plane} plane stale"

        self.explore(check, cases(self, internal=(False,)), self._fixed())

    # -- usages -----------------------------------------------------------------------------------

    def test_planes_are_dropped_and_never_invented(self) -> None:
        """What is kept is the same buffer; what is asked for and absent is derived or refused."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            planes, places = self.planes(made), pointers(made)
            for row, column in USAGES:
                usage = {"rowwise": row, "columnwise": column}
                label = f"{case}: with_usage({usage})"
                refused = refusal(lambda: made.with_usage(**usage))  # noqa: B023
                if refused:
                    held = all(getattr(case.quantizer, p) >= on for p, on in usage.items())
                    assert not held, f"{label}: is refused, {refused.message}"
                    assert refused.kind is UsageError, f"{label}: {refused}"
                    message = refused.message
                    assert message.startswith(f"{self.format_name}: "), f"{label}: {message!r}"
                    continue
                other = made.with_usage(**usage)
                assert other.quantizer == made.quantizer.with_usage(**usage), f"{label}: quantizer"
                assert_same_facts(other, to_tensor_proto(other).create_tensor(), label)
                for plane, values in self.planes(other).items():
                    # a plane that was derived is the exact image of the one that was held
                    expected = planes.get(plane, next(iter(planes.values())))
                    assert_same_bytes(values, expected, f"{label}: {plane} plane")
                kept = {n: p for n, p in pointers(other).items() if n in places}
                same = {n: p for n, p in places.items() if n in kept}
                assert kept == same, f"{label}: copies buffers that stay"
            assert made.quantizer == case.quantizer.at_rest(), f"{case}: with_usage() changed it"

        self.explore(check, cases(self), self.fixed())

    def test_update_usage_changes_tensor_and_quantizer_together(self) -> None:
        """A plane dropped in place is gone from both: NVIDIA/TransformerEngine#1593."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            if not (case.quantizer.rowwise and case.quantizer.columnwise):
                return
            expected = made.with_usage(columnwise=False)
            made.update_usage(columnwise=False)
            assert not made.quantizer.columnwise, f"{case}: the quantizer does not follow"
            assert_same_facts(made, expected, f"{case}: update_usage(columnwise=False)")
            assert_same_bytes(made, expected, f"{case}: update_usage(columnwise=False)")

        self.explore(check, cases(self), self.fixed())

    # -- elsewhere --------------------------------------------------------------------------------

    def test_move_takes_every_inner_tensor_along(self) -> None:
        """To another device, in every form that torch has: pytorch/ao#1310."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            other = torch.empty(1, device="meta", dtype=case.dtype)
            forms: dict[str, Callable[[Any], Any]] = {
                'to("meta")': lambda t: t.to("meta"),
                'to(device="meta")': lambda t: t.to(device="meta"),
            }
            if not case.quantizer.internal:
                forms |= {
                    "to(other)": lambda t: t.to(other),
                    'to("meta", dtype)': lambda t: t.to("meta", case.dtype, copy=True),
                }
            expected = case.proto("meta").create_tensor()
            for name, move in forms.items():
                with fallback("error"):
                    moved = move(made)
                assert_same_facts(moved, expected, f"{case}: {name}")
                devices = {n: t.device.type for n, t in buffers(moved).items()}
                left = [n for n, device in devices.items() if device != "meta"]
                assert not left, f"{case}: {name} leaves {left} behind"
            for name, again in (
                ('to("cpu")', made.to("cpu")),
                ('to(device="cpu", copy=True)', made.to(device="cpu", copy=True)),
            ):
                assert_same_facts(again, made, f"{case}: {name}")
                assert_same_bytes(again, made, f"{case}: {name}")
            if not case.quantizer.internal:
                assert_same_bytes(made.cpu(), made, f"{case}: cpu()")
                layer = torch.nn.Linear(1, 1, bias=False)
                layer.weight = torch.nn.Parameter(made.detach(), requires_grad=False)
                assert_same_facts(layer.to("meta").weight, expected, f"{case}: Module.to()")

        self.explore(check, cases(self), self.fixed())

    def test_dtype_is_nominal(self) -> None:
        """Another one changes what a tensor says it is, and no code."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            for dtype in INPUT_DTYPES:
                with fallback("error"):
                    other = made.to(dtype)
                assert other.dtype == dtype, f"{case}: to({dtype}) says {other.dtype}"
                assert to_tensor_proto(other).dtype == dtype, f"{case}: prototype of to({dtype})"
                assert_same_bytes(other, made, f"{case}: to({dtype})")
                plain = other.dequantize()
                assert plain.dtype == dtype, f"{case}: to({dtype}).dequantize() is {plain.dtype}"
                assert_same_bytes(plain, made.dequantize(dtype), f"{case}: to({dtype})")

        self.explore(check, cases(self, internal=(False,)), self._fixed())

    def test_deepcopy_is_independent_and_complete(self) -> None:
        """Bytes, attributes, gradient and ties: huggingface/optimum-quanto#358."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            made.note = ["kept"]
            if not case.quantizer.internal:
                made.requires_grad_()
                made.dequantize().sum().backward()
            for how, again in {
                "deepcopy": copy.deepcopy(made),
                "pickle": pickle.loads(pickle.dumps(made)),
            }.items():
                label = f"{case}: {how}"
                assert_same_facts(again, made, label)
                assert_same_bytes(again, made, label)
                shared = {p for p in pointers(again).values() if p} & set(pointers(made).values())
                assert not shared, f"{label}: shares memory"
                assert getattr(again, "note", None) == ["kept"], f"{label}: attributes are lost"
                assert again.note is not made.note, f"{label}: attributes are shared"
                if how == "deepcopy" and not case.quantizer.internal:
                    assert again.grad is not None, f"{label}: the gradient is lost"
                    assert_same_bytes(again.grad, made.grad, f"{label}: gradient")
            for tensor in {id(t): t for t in copy.deepcopy([made, made])}.values():
                assert_same_bytes(tensor, made, f"{case}: deepcopy of a list")
            assert len({id(t) for t in copy.deepcopy([made, made])}) == 1, f"{case}: ties are lost"

        self.explore(check, cases(self), self.fixed())

    def test_module_with_tied_weights_is_copied(self) -> None:
        """The two layers share one parameter before and after."""
        case = self._fixed()[0]
        weight = torch.nn.Parameter(self.quantize(case.quantizer, case.input()))
        tied = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        for layer in tied:
            layer.weight = weight
        copied_ = copy.deepcopy(tied)
        assert copied_[0].weight is copied_[1].weight, f"{case}: the tie is lost"
        assert copied_[0].weight is not weight, f"{case}: the parameter is shared"
        assert isinstance(copied_[0].weight, torch.nn.Parameter), f"{case}: is no parameter"
        assert_same_bytes(copied_[0].weight.data, weight.data, f"{case}: of a module")

    def test_empty_like_is_quantized_and_zeros_like_is_plain(self) -> None:
        """A moment of an optimizer must not be quantized unasked; ``new_zeros`` is zero.

        It must be there: axolotl-ai-cloud/axolotl#2744.
        """

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            with fallback("error"):
                assert_same_facts(torch.empty_like(made), made, f"{case}: empty_like")
                assert_same_facts(made.new_empty(case.shape), made, f"{case}: new_empty")
                plain = torch.zeros_like(made)
                zeros = made.new_zeros(case.shape)
            assert_same_facts(plain, torch.zeros(case.shape, dtype=case.dtype), f"{case}: zeros")
            assert_same_facts(zeros, made, f"{case}: new_zeros")
            for plane, values in self.planes(zeros).items():
                assert not values.any(), f"{case}: new_zeros has values in the {plane} plane"

        self.explore(check, cases(self, internal=(False,)), self._fixed())

    def test_new_tensor_has_the_layout_of_its_own_shape(self) -> None:
        """With the padding of that shape; another dtype is nominal, and none of the codes."""
        for case in self._fixed()[:6]:
            made = self.quantize(case.quantizer, case.input())
            shape = self.shape_for(case.quantizer, extra=3)
            for dtype in INPUT_DTYPES:
                q = case.quantizer.at_rest()
                wanted = Case(q, shape, dtype).proto().create_tensor()
                what = f"{case}: of shape {shape} and {dtype}"
                with fallback("error"):
                    zeros = made.new_zeros(shape, dtype=dtype)
                    assert_same_facts(made.new_empty(shape, dtype=dtype), wanted, what)
                assert_same_facts(zeros, wanted, what)
                assert not zeros.dequantize().any(), f"{what}: new_zeros has values"

    def test_optimizer_writes_quantized_parameters(self) -> None:
        """In one step or fused, beside a parameter without elements, moments plain.

        Seen in NVIDIA/TransformerEngine#2533, and with empty shards in #3212, #3318 and #3348.
        """

        def check(case: Case) -> None:
            empty = Case(case.quantizer, (0, case.shape[-1]), case.dtype)
            found = [c for c in (empty, case) if self.refused(c) is None]
            for how, options in _STEPS.items():
                ours = [
                    torch.nn.Parameter(self.quantize(c.quantizer, torch.ones_like(c.input())))
                    for c in found
                ]
                plain = [torch.nn.Parameter(p.dequantize().detach()) for p in ours]
                before = [pointers(p) for p in ours]
                steps = [torch.optim.Adam(p, lr=0.25, **options) for p in (ours, plain)]  # type: ignore[arg-type]
                for c, p, q in zip(found, ours, plain, strict=True):
                    p.grad = torch.linspace(-2, 3, c.proto().numel).view(c.shape).to(c.dtype)
                    q.grad = p.grad.clone()
                with fallback("allow"):
                    for step in steps:
                        step.step()
                for c, p, q, places in zip(found, ours, plain, before, strict=True):
                    what = f"{c}: after a step, {how}"
                    assert pointers(p) == places, f"{what}: a buffer moved"
                    assert_same_bytes(p.data, c.quantizer.at_rest().quantize(q.detach()), what)
                    kinds = {type(t) for t in steps[0].state[p].values()}
                    assert kinds == {torch.Tensor}, f"{what}: moments are {kinds}"

        self.explore(check, None, self._fixed()[:4])

    # -- helpers ----------------------------------------------------------------------------------

    def _fixed(self) -> list[Case]:
        return self.fixed(internal=(False,))

    def _expected(self, case: Case, source: Any) -> Any:
        """Return what the values of ``source`` are in a tensor of the case."""
        plain = source.dequantize() if hasattr(source, "quantizer") else source
        return case.quantizer.at_rest().quantize(plain.to(case.dtype))

    def _sources(self, case: Case, *, options: bool = False) -> dict[str, Tensor]:
        """Return every kind of value that is copied into a tensor of the case.

        Args:
            case: of the tensor.
            options: also of quantizers that differ in one option, so bytes mean something else.
        """
        x = case.input(2)
        found = {"plain": x, "float32": x.float(), "bfloat16": x.bfloat16()}
        found["the same quantizer"] = self.quantize(case.quantizer, x)
        for row, column in USAGES:
            other = case.quantizer.with_usage(rowwise=row, columnwise=column)
            if self.refused(Case(other, case.shape, case.dtype)) is None:
                found[f"rowwise={row}, columnwise={column}"] = self.quantize(other, x)
        others = self._with_another_option(case.quantizer) if options else []
        for other in (*self.starts(), *others):
            if self.refused(Case(other, case.shape, case.dtype)) is None:
                found[str(other)] = self.quantize(other, x)
        return found

    def _with_another_option(self, quantizer: Quantizer) -> list[Quantizer]:
        """Return quantizers that differ in one option, and go with this shape and dtype or not."""
        found = []
        for name, values in choices(self, quantizer).items():
            for value in values:
                with contextlib.suppress(QuantizerError):
                    found.append(quantizer.replace(**{name: value}))
        return [other for other in found if other != quantizer]


def _held_alike(source: Any, made: Any) -> dict[str, Tensor] | None:
    """Return the buffers of ``source`` that ``made`` has, if they mean the same in both."""
    q = getattr(source, "quantizer", None)
    mine = made.quantizer
    if q is None or q.replace(rowwise=mine.rowwise, columnwise=mine.columnwise) != mine:
        return None
    held = buffers(source)
    return {n: held[n] for n in buffers(made)} if set(buffers(made)) <= set(held) else None


def _set_data(made: Tensor, source: Tensor) -> None:
    made.data.copy_(source)


_STEPS: dict[str, dict[str, bool]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

_WRITES: dict[str, Callable[[Any, Any], object]] = {
    "copy_": lambda made, source: made.copy_(source),
    "detach().copy_": lambda made, source: made.detach().copy_(source),
    "data.copy_": _set_data,
    "quantize_": lambda made, source: made.quantize_(
        source if hasattr(source, "quantizer") else source.to(made.dtype)
    ),
}
