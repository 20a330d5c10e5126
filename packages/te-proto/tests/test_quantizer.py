# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import dataclasses
import enum
import math
import pickle
import re
import sys
from typing import Any

import pytest
import torch
from te_toy import Rounding, ToyQuantizer
from torch._library.opaque_object import is_opaque_value_type

import te_proto.quantizer
from te_proto import Quantizer, Recipe
from te_proto.errors import (
    QuantizerError,
    ShapeError,
)

ODD = ToyQuantizer(rounding=Rounding.ZERO, ceiling=-math.inf, note='it\'s "odd"', block=0)


class OptionsQuantizer(ToyQuantizer):
    bias: float = 0.5


class SamePlain(ToyQuantizer):
    """The same fields as its base: only the class differs."""


# -- what a field may be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("Tuple", tuple), ("Tensor", torch.Tensor), ("Maybe", "int | None")]
)
def test_field_that_is_no_plain_value_is_refused_at_class_creation(name: str, kind: Any) -> None:
    rule = (
        f"^{name}Quantizer.extra is a .*: a quantizer's field must be bool, int, float, str or an "
        "Enum, so that quantizers are values; pass anything else as an argument of the call$"
    )
    with pytest.raises(TypeError, match=rule):
        type(f"{name}Quantizer", (ToyQuantizer,), {"__annotations__": {"extra": kind}, "extra": ()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": "4"}, "toy: option block must be a int, got '4'"),
        ({"block": True}, "toy: option block must be a int, got True"),
        ({"rowwise": 1}, "toy: option rowwise must be a bool, got 1"),
        ({"rounding": "ZERO"}, "toy: option rounding must be a Rounding, got 'ZERO'"),
        ({"ceiling": False}, "toy: option ceiling must be a float, got False"),
        ({"ceiling": math.nan}, "toy: option ceiling must be a number, got nan"),
        ({"note": None}, "toy: option note must be a str, got None"),
    ],
)
def test_option_of_another_type_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerError, match=f"^{re.escape(message)}$"):
        ToyQuantizer(**options)


def test_a_float_option_takes_an_int() -> None:
    assert ToyQuantizer(ceiling=2) == ToyQuantizer(ceiling=2.0)


def test_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        ToyQuantizer(blocks=4)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        ToyQuantizer(True)


# -- a quantizer is a value ---------------------------------------------------------------------


def test_quantizer_is_frozen() -> None:
    q = ToyQuantizer()
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.rowwise = False
    assert q.rowwise


def test_equality_and_hash_are_those_of_the_fields() -> None:
    assert ToyQuantizer(block=8) == ToyQuantizer(block=8)
    assert hash(ToyQuantizer(block=8)) == hash(ToyQuantizer(block=8))
    others = [
        ToyQuantizer(),
        *(ToyQuantizer(**{name: True}) for name in ("internal", "optimize_for_gemm")),
        *(ToyQuantizer(**{name: False}) for name in ("rowwise", "columnwise")),
        ToyQuantizer(block=8),
        ToyQuantizer(rounding=Rounding.ZERO),
        ToyQuantizer(ceiling=1.0),
        ToyQuantizer(note="x"),
    ]
    assert len(set(others)) == len(others)


def test_subclass_is_not_equal_to_its_base() -> None:
    assert SamePlain() != ToyQuantizer()
    assert ToyQuantizer() != SamePlain()


@pytest.mark.parametrize("q", [ToyQuantizer(), ODD, OptionsQuantizer(bias=-0.0)], ids=str)
@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(lambda q: pickle.loads(pickle.dumps(q)), id="pickle"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda q: type(q).from_state(q.state()), id="state"),
        pytest.param(lambda q: q.replace(), id="replace"),
        pytest.param(lambda q: eval(*q.__fx_repr__()), id="fx_repr"),
    ],
)
def test_duplicate_is_equal_with_equal_types(q: Quantizer, duplicate: Any) -> None:
    other = duplicate(q)
    assert type(other) is type(q)
    assert other == q
    assert hash(other) == hash(q)
    assert str(other) == str(q)


def test_fx_repr_names_only_classes_because_a_module_disables_the_disk_cache() -> None:
    source, names = ODD.__fx_repr__()
    assert all(isinstance(value, type) for value in names.values())
    assert set(names.values()) == {ToyQuantizer, Rounding}
    assert "ceiling=float('-inf')" in source
    pickle.dumps(names)


def test_state_is_plain_values_only() -> None:
    assert ODD.state() == {
        "rowwise": True,
        "columnwise": True,
        "internal": False,
        "optimize_for_gemm": False,
        "block": 0,
        "rounding": "ZERO",
        "ceiling": -math.inf,
        "note": 'it\'s "odd"',
    }


def test_state_without_a_field_takes_its_default() -> None:
    assert ToyQuantizer.from_state({"note": "old"}) == ToyQuantizer(note="old")


def test_state_with_an_unknown_option_says_what_to_install() -> None:
    message = (
        "toy: the saved quantizer has options ['shift', 'zoom'] that ToyQuantizer does not have; "
        "install the version of the plugin that wrote it, or a newer one"
    )
    with pytest.raises(QuantizerError, match=f"^{re.escape(message)}$"):
        ToyQuantizer.from_state({"zoom": 1, "shift": 2, "block": 4})


def test_state_with_an_unknown_enum_name_names_the_option_and_what_there_is() -> None:
    message = "toy: option rounding must be one of NEAREST, ZERO, got 'UP'"
    with pytest.raises(QuantizerError, match=f"^{re.escape(message)}"):
        ToyQuantizer.from_state({"rounding": "UP"})


def test_with_usage_changes_what_is_given_and_only_that() -> None:
    q = ToyQuantizer(rowwise=True, columnwise=False, note="kept")
    assert q.with_usage() == q
    assert q.with_usage(columnwise=True) == ToyQuantizer(note="kept")
    assert q.with_usage(rowwise=False) == ToyQuantizer(rowwise=False, columnwise=False, note="kept")
    assert q == ToyQuantizer(rowwise=True, columnwise=False, note="kept")


def test_replace_checks_the_new_value() -> None:
    with pytest.raises(QuantizerError, match="^toy: option block must be a int, got 1.5$"):
        ToyQuantizer().replace(block=1.5)


def test_alignment_is_that_of_the_planes_that_are_on() -> None:
    q = ToyQuantizer(block=8)
    assert q.alignment() == (8, 8)
    assert q.with_usage(columnwise=False).alignment() == (1, 8)
    assert q.with_usage(rowwise=False).alignment() == (8, 1)


def test_every_quantizer_class_is_an_opaque_value_to_torch() -> None:
    assert is_opaque_value_type(Quantizer)
    assert is_opaque_value_type(ToyQuantizer)
    assert is_opaque_value_type(OptionsQuantizer)


def test_no_quantizer_has_a_static_method() -> None:
    # calling one through an instance crashes torch's guards (pytorch#182741, pytorch#188544)
    static = [
        f"{base.__name__}.{name}"
        for cls in (Quantizer, ToyQuantizer)
        for base in cls.__mro__
        if issubclass(base, Quantizer)
        for name, member in vars(base).items()
        if isinstance(member, staticmethod)
    ]
    assert static == []


def test_recipe_is_a_frozen_value() -> None:
    make = lambda name: Recipe(name=name, input=ODD, weight=ToyQuantizer(), grad_output=ODD)  # noqa: E731
    assert make("a") == make("a") != make("b")
    assert hash(make("a")) == hash(make("a"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        make("a").weight = ODD


# -- what the base gives ------------------------------------------------------------------------


def test_alloc_tensors_are_the_described_buffers() -> None:
    q = ToyQuantizer()
    made = q.alloc_tensors((8, 12), "meta")
    assert {n: (tuple(t.shape), t.dtype) for n, t in made.items()} == {
        "rowwise_data": ((8, 12), torch.int8),
        "rowwise_scale_inv": ((8, 3), torch.float32),
        "columnwise_data": ((8, 12), torch.int8),
        "columnwise_scale_inv": ((2, 12), torch.float32),
    }
    assert {str(t.device) for t in made.values()} == {"meta"}
    with pytest.raises(ShapeError, match="^toy: K must be a multiple of 4, got 7 in"):
        q.alloc_tensors((8, 7), "meta")


def test_make_empty_has_dtype_device_and_flag() -> None:
    q = ToyQuantizer().make_empty((8, 12), dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert (q.shape, q.dtype, q.device.type, q.requires_grad) == (
        (8, 12),
        torch.bfloat16,
        "meta",
        True,
    )


def test_enum_classes_of_one_name_do_not_mix_in_fx_repr() -> None:
    class Inner:
        class Rounding(enum.Enum):
            UP = 1

    namespace = {"__annotations__": {"other": Inner.Rounding}, "other": Inner.Rounding.UP}
    cls = type("TwoRoundings", (ToyQuantizer,), {**namespace, "__module__": __name__})
    q = cls(rounding=Rounding.ZERO)
    assert eval(*q.__fx_repr__()) == q


def test_key_of_compile_caches_tells_releases_and_cpus_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = ToyQuantizer()._stable_hash_for_caching()
    assert ToyQuantizer()._stable_hash_for_caching() == key
    module = sys.modules[ToyQuantizer.__module__]
    for target, name, value in (
        (te_proto.quantizer, "__version__", "9.9"),
        (module, "__version__", "9.9"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value, raising=False)
            assert ToyQuantizer()._stable_hash_for_caching() != key
