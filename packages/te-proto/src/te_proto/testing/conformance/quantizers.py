# SPDX-License-Identifier: Apache-2.0
"""A quantizer is a value: equality, hash, copies, messages, and no use changes it."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._library.opaque_object import is_opaque_value_type

from te_proto.errors import DtypeError, LayoutError, QuantizerError, ShapeError, UsageError
from te_proto.testing.conformance.base import Case, Kit, call_arguments
from te_proto.testing.conformance.draws import cases, choices
from te_proto.testing.facts import (
    assert_same_bytes,
    assert_same_facts,
    copied,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_proto.quantizer import Quantizer


class QuantizerConformance(Kit):
    """The quantizer by itself."""

    # -- values -----------------------------------------------------------------------------------

    def test_equal_fields_are_an_equal_value(self) -> None:
        """Of every form in which a quantizer travels: state, pickle, source of a graph."""
        for quantizer in self.variants():
            source, classes = quantizer.__fx_repr__()
            again = {
                "replace()": quantizer.replace(),
                "from_state(state())": type(quantizer).from_state(quantizer.state()),
                "pickle": pickle.loads(pickle.dumps(quantizer)),
                "__fx_repr__": eval(source, dict(pickle.loads(pickle.dumps(classes)))),
            }
            for how, other in again.items():
                assert type(other) is type(quantizer), f"{quantizer}: {how} is {other}"
                assert other == quantizer, f"{quantizer}: not equal to its {how}, {other}"
                fields = {n: getattr(other, n) for n in type(quantizer)._field_types()}
                for name, value in fields.items():
                    kept = getattr(quantizer, name)
                    assert value == kept, f"{quantizer}: {how} has {name}={value!r}, not {kept!r}"
                assert hash(other) == hash(quantizer), f"{quantizer}: {how} has another hash"
                key = quantizer._stable_hash_for_caching()
                assert other._stable_hash_for_caching() == key, f"{quantizer}: {how}: key of caches"

    def test_every_field_counts_in_equality(self) -> None:
        """A forgotten one would let a graph, or a cache on disk, serve another layout."""
        for quantizer in self.starts():
            for name, other in self._changed(quantizer):
                what = f"{quantizer}, changed in {name} alone"
                assert other != quantizer, f"{what}: is equal"
                assert other.state() != quantizer.state(), f"{what}: has the same state()"
                keys = {q._stable_hash_for_caching() for q in (other, quantizer)}
                assert len(keys) == 2, f"{what}: has the same key of compile caches"
                sources = {q.__fx_repr__()[0] for q in (other, quantizer)}
                assert len(sources) == 2, f"{what}: has the same source in a graph"

    def test_is_frozen(self) -> None:
        """Another option is another value."""
        for quantizer in self.starts():
            for name in type(quantizer)._field_types():
                value = getattr(quantizer, name)
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(quantizer, name, value)
            assert is_opaque_value_type(type(quantizer)), f"{quantizer}: no value to torch"

    def test_with_usage_changes_the_usage_alone(self) -> None:
        """``None`` keeps one as it is."""
        for quantizer in self.variants():
            assert quantizer.with_usage() == quantizer, f"{quantizer}: with_usage()"
            for name in ("rowwise", "columnwise"):
                for on in (False, True):
                    other = quantizer.with_usage(**{name: on})
                    expected = quantizer.state() | {name: on}
                    assert other.state() == expected, f"{quantizer}: with_usage({name}={on})"

    def test_no_static_method_for_guards_to_trip_over(self) -> None:
        """Calling one through an instance crashes dynamo: pytorch/pytorch#188544."""
        cls = type(self.starts()[0])
        members = {n: v for base in reversed(cls.__mro__) for n, v in vars(base).items()}
        static = [n for n, v in members.items() if isinstance(v, staticmethod) and n[:2] != "__"]
        assert static == [], f"{cls.__name__}: static methods {static}"

    def test_state_of_another_version_is_refused_by_name(self) -> None:
        """An option that the class does not have, and a value that an option does not have."""
        for quantizer in self.starts():
            cls, state = type(quantizer), quantizer.state()
            wrong = {"no_such_option": state | {"no_such_option": True}}
            for name, kind in cls._field_types().items():
                if issubclass(kind, enum.Enum):
                    wrong[name] = state | {name: "NO_SUCH_VALUE"}
            for name, other in wrong.items():
                found = refusal(lambda: cls.from_state(other))  # noqa: B023
                assert found, f"{cls.__name__}: from_state takes {other}"
                assert found.kind is QuantizerError, f"{cls.__name__}: {found}"
                for part in (f"{self.format_name}: ", name, "install the version"):
                    assert part in found.message, f"{cls.__name__}: {found.message!r}"
            older = {"rowwise": False}  # what it lacks takes its default
            expected = cls().replace(**older)
            assert cls.from_state(older) == expected, f"{cls.__name__}: of {older}"

    # -- use --------------------------------------------------------------------------------------

    def test_use_changes_no_quantizer(self) -> None:
        """Twice forward and backward, one of them without grad: NVIDIA/TransformerEngine#2222."""

        def check(case: Case) -> None:
            q = case.quantizer
            before, number, state = q.replace(), hash(q), dict(vars(q))
            outputs = []
            for grad in (True, False, True):
                x = case.input().requires_grad_(grad)
                with torch.set_grad_enabled(grad):
                    made = self.quantize(q, x)
                    outputs.append(copied(made))
                    if grad and not q.internal:
                        made.dequantize().sum().backward()
                self.quantize_into(q, case.input(1), case.proto().create_tensor())
                assert q == before, f"{case}: changed from {before}"
                assert hash(q) == number, f"{case}: its hash changed"
                assert dict(vars(q)) == state, f"{case}: holds {vars(q)}, held {state}"
                assert made.quantizer == before.at_rest(), f"{case}: tensor has {made.quantizer}"
            for again in outputs[1:]:
                assert_same_bytes(again, outputs[0], f"{case}: quantized again")

        self.explore(check, cases(self), self.fixed())

    def test_input_is_not_written(self) -> None:
        """Neither by a call nor by a write into what it returned."""

        def check(case: Case) -> None:
            x = case.input(nonfinite=self.nonfinite)
            kept = x.clone()
            made = self.quantize(case.quantizer, x)
            self.quantize_into(case.quantizer, x, case.proto().create_tensor())
            for buffer in made.inner_tensors().values():
                buffer.zero_()
            assert_same_bytes(x, kept, f"{case}: x")

        self.explore(check, cases(self), self.fixed())

    def test_noop_is_exactly_one(self) -> None:
        """Only 1.0 leaves every byte as it is, decided by the tensor."""

        def check(case: Case) -> None:
            old = self.quantize(case.quantizer, case.input(1))
            new = self.quantize(case.quantizer, case.input(2))
            for value in (1.0, 0.0, 2.0, -1.0, float("nan")):
                out = case.proto().create_tensor()
                for name, buffer in out.inner_tensors().items():
                    buffer.copy_(old.inner_tensors()[name])
                self.quantize_into(case.quantizer, case.input(2), out, torch.tensor(value))
                expected = old if value == 1.0 else new
                assert_same_bytes(out, expected, f"{case}: noop={value}")

        self.explore(check, None, self.fixed())

    def test_seed_alone_decides_what_is_rounded_by_chance(self) -> None:
        """Equal seeds and offsets give equal bytes, others give others."""
        found = [c for c in self.fixed(tiles=2) if "rng" in c.quantizer.call_arguments()]
        if not found:
            pytest.skip(f"{self.format_name}: no quantizer rounds by chance")

        def check(case: Case) -> None:
            x = torch.linspace(-1.0, 1.0, case.proto().numel).view(case.shape).to(case.dtype)
            at = torch.tensor
            made = {
                key: copied(case.quantizer.quantize(x, rng=at(key)))
                for key in ((1, 0), (2, 0), (1, 4))
            }
            again = case.quantizer.quantize(x, rng=at((1, 0)))
            assert_same_bytes(again, made[1, 0], f"{case}: the same rng")
            for key in ((2, 0), (1, 4)):
                same = all(torch.equal(t, made[1, 0][n]) for n, t in made[key].items())
                assert not same, f"{case}: rng {key} and (1, 0) give the same bytes"

        self.explore(check, None, found)

    # -- messages ---------------------------------------------------------------------------------

    def test_refused_option_names_format_option_and_value(self) -> None:
        """Of every field a value of another type, and an element format that there is not."""
        for quantizer in self.starts():
            types = type(quantizer)._field_types()
            wrong: list[tuple[str, Any]] = [(name, b"bytes") for name in types]
            if "dtype" in types:
                wrong.append(("dtype", "e9m9"))
            wrong += [(name, float("nan")) for name, kind in types.items() if kind is float]
            for name, value in wrong:
                found = refusal(lambda: quantizer.replace(**{name: value}))  # noqa: B023
                what = f"{type(quantizer).__name__}({name}={value!r})"
                assert found, f"{what}: is taken"
                assert found.kind is QuantizerError, f"{what}: {found}"
                assert found.message.startswith(f"{self.format_name}: option {name} "), (
                    f"{what}: {found.message!r}"
                )
                assert f"got {value!r}" in found.message, f"{what}: {found.message!r}"

    def test_options_that_do_not_go_together_are_refused_by_name(self) -> None:
        """What one flag more makes of a quantizer is a quantizer, or a message about that flag."""
        for start in self.starts():
            for quantizer in (start, *(other for _, other in self._changed(start))):
                for name, values in choices(self, quantizer).items():
                    for value in values:
                        found = refusal(lambda: quantizer.replace(**{name: value}))  # noqa: B023
                        if found is None:
                            continue
                        what = f"{quantizer} with {name}={value!r}"
                        assert found.kind is QuantizerError, f"{what}: {found}"
                        assert found.message.startswith(f"{self.format_name}: option "), (
                            f"{what}: {found.message!r}"
                        )

    def test_refused_call_names_format_argument_and_value(self) -> None:
        """Dtype, usage, group, rng, out and noop."""
        case = self.fixed()[0]
        q, x = case.quantizer, case.input()
        out = self.quantize(q, x)
        other = torch.zeros(*case.shape, *q.alignment(), dtype=case.dtype)
        one = torch.ones(2)
        calls = {
            "int64": (lambda: self.quantize(q, x.long()), DtypeError, ("x must be", "got int64")),
            "no usage": (
                lambda: self.quantize(q.with_usage(rowwise=False, columnwise=False), x),
                UsageError,
                ("neither rowwise nor columnwise",),
            ),
            "out of another quantizer": (
                lambda: self.quantize_into(q.replace(optimize_for_gemm=True), x, out),
                LayoutError,
                ("out must be described by",),
            ),
            "out of another shape": (
                lambda: self.quantize_into(q, other, out),
                ShapeError,
                ("out must have the shape of x", str(tuple(other.shape)), str(case.shape)),
            ),
            "two noops": (
                lambda: self.quantize_into(q, x, out, one),
                Exception,
                ("noop must be one float32 element", "(2,)"),
            ),
        }
        for name, value in (("group", "no such group"), ("rng", torch.tensor([0, 0]))):
            if name not in q.call_arguments():
                calls[name] = (
                    lambda name=name, value=value: q.quantize(x, **{name: value}),  # type: ignore[misc]
                    UsageError,
                    (f"takes no {name}", "got "),
                )
        for what, (call, kind, parts) in calls.items():
            found = refusal(call)
            assert found, f"{case}: {what} is taken"
            assert issubclass(found.kind, kind), f"{case}: {what}: {found}"
            for part in (f"{self.format_name}: ", *parts):
                assert part in found.message, f"{case}: {what}: no {part!r} in {found.message!r}"

    def test_missing_call_argument_is_asked_for(self) -> None:
        """A quantizer that needs a group or a seed says so, and names a group that is not there."""
        for quantizer in self.variants():
            x = torch.zeros(self.shape_for(quantizer), dtype=torch.bfloat16)
            if "group" in quantizer.call_arguments():
                with call_arguments(quantizer, x.device) as call:
                    found = refusal(lambda: quantizer.quantize(x, **call | {"group": "absent"}))  # noqa: B023
                assert found, f"{quantizer}: quantizes over a group that is not there"
                assert found.kind is UsageError, f"{quantizer}: {found}"
                for part in ("group must be the c10d name", "got 'absent'"):
                    assert part in found.message, f"{quantizer}: {found.message!r}"
            for name in quantizer.call_arguments():
                found = refusal(lambda: quantizer.quantize(x))  # noqa: B023
                assert found, f"{quantizer}: quantizes without {name}"
                assert found.kind is UsageError, f"{quantizer}: {found}"
                assert " needs " in found.message, f"{quantizer}: {found.message!r}"

    # -- the tensor's own -------------------------------------------------------------------------

    def test_what_a_call_brings_stays_in_no_tensor(self) -> None:
        """The tensor can be written to later without it."""

        def check(case: Case) -> None:
            rest = case.quantizer.at_rest()
            assert rest.at_rest() == rest, f"{case}: at_rest() of {rest} is another"
            assert not rest.call_arguments(), f"{case}: {rest} needs {rest.call_arguments()}"
            made = self.quantize(case.quantizer, case.input())
            made.quantizer.quantize_into(case.input(1), made)
            assert_same_facts(made, case.proto().create_tensor(), f"{case}: written again")

        self.explore(check, cases(self), self.fixed())

    # -- helpers ----------------------------------------------------------------------------------

    def _changed(self, quantizer: Quantizer) -> Iterator[tuple[str, Quantizer]]:
        """Return quantizers that differ in one field each, where the format has such."""
        base = {"rowwise": (False, True), "columnwise": (False, True), "internal": (False, True)}
        known: dict[str, tuple[Any, ...]] = base | choices(self, quantizer)
        for start in self.starts():  # and what the other starts have, of strings and numbers
            for name in type(quantizer)._field_types():
                known[name] = (*known.get(name, ()), getattr(start, name))
        for name, values in known.items():
            for value in values:
                if value == getattr(quantizer, name):
                    continue
                try:
                    other = quantizer.replace(**{name: value})
                except QuantizerError:
                    continue
                if getattr(other, name) == value:  # not set back, for it means nothing alone
                    yield name, other
