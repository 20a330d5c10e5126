# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from te_toy import ToyQuantizer, codes_of, proto, values
from te_toy_ops import (
    all_forms,
    assert_same,
    buffers_of,
    dequantize,
    every_argument,
    fill_both,
    quantize,
    quantize_into,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_proto import QuantizedStorage, custom_op, to_tensor_proto
from te_proto.errors import UsageError

Q = ToyQuantizer()
INTERNAL = Q.replace(internal=True)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_PROTO_CHECK", "1")


# -- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [Q, INTERNAL, Q.with_usage(columnwise=False)], ids=["t", "s", "row"])
def test_op_gives_what_the_function_gives(q: Any) -> None:
    x = values(8, 12)
    assert_same(quantize(x, q), q.quantize(x))
    assert_same(dequantize(q.quantize(x)), q.quantize(x).dequantize())
    assert_same(dequantize(q.quantize(x), torch.float16), q.quantize(x).dequantize(torch.float16))


def test_every_kind_of_argument_and_result_goes_through() -> None:
    given = every_argument()
    filled, t, s, kept = all_forms(**given)
    assert_same(filled, torch.full((2, 8, 3), 5.5, dtype=torch.bfloat16))
    assert_same(t, given["t"])
    assert_same(s, INTERNAL.quantize(given["x"]))
    assert_same(kept, INTERNAL.quantize(given["s"].dequantize()[:8]))
    given |= {"extra": torch.ones(2), "flag": False, "sizes": [2], "factor": float("inf"), "n": 0}
    assert_same(all_forms(*given.values())[0], torch.empty(2, 0, dtype=torch.bfloat16))


def test_presence_of_an_argument_is_part_of_the_call() -> None:
    without, given = (
        all_forms(**every_argument() | {"extra": e})[0] for e in (None, torch.full((2,), 2.0))
    )
    assert torch.equal(given, without + 4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_shapes_travel_for_every_rank(rank: int) -> None:
    x = values(*(4,) * rank)
    q = ToyQuantizer(block=0)
    assert_same(dequantize(quantize(x, q)), q.quantize(x).dequantize())


@pytest.mark.parametrize("internal", [False, True])
def test_op_that_mutates_writes_into_the_buffers(internal: bool) -> None:
    out = Q.replace(internal=internal).quantize(values(8, 8))
    at = [t.data_ptr() for t in out.inner_tensors().values()]
    assert quantize_into(values(8, 8, seed=1), out, times=2) is None
    assert [t.data_ptr() for t in out.inner_tensors().values()] == at
    assert codes_of(out) == codes_of(Q.quantize(values(8, 8, seed=1) * 2))


def test_op_may_mutate_plain_and_quantized_arguments() -> None:
    a, b = torch.zeros(8, 8), Q.quantize(torch.zeros(8, 8))
    version = a._version
    fill_both(a, b, values(8, 8))
    assert torch.equal(a, values(8, 8))
    assert a._version > version  # autograd is told
    assert codes_of(b) == codes_of(Q.quantize(values(8, 8)))


def test_op_that_mutates_refuses_a_slice() -> None:
    q = Q.quantize(values(8, 8))
    before = codes_of(q)
    with pytest.raises(UsageError, match="so a write would not reach the whole"):
        quantize_into(values(4, 8), q[4:8])
    assert codes_of(q) == before


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((values(4, 8),), {}),
        ((values(4, 8), Q, 1), {}),
        ((values(4, 8), Q), {"n": 1}),
        ((values(4, 8), Q), {"q": Q}),
    ],
    ids=["missing", "too-many", "unknown", "twice"],
)
def test_arguments_are_bound_as_in_python(args: Any, kwargs: Any) -> None:
    message = (
        f"te_toy::quantize: takes the arguments ('x', 'q'), got {len(args)} positional and "
        f"{tuple(kwargs)}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        quantize(*args, **kwargs)


@pytest.mark.parametrize(
    ("value", "kind"), [({"a": 1}, "dict"), ([values(2)], "list"), ((1.5,), "tuple")]
)
def test_argument_of_another_kind_is_refused_by_name(value: Any, kind: str) -> None:
    message = (
        f"argument q is a {kind}; an op takes tensors, quantizers, None, numbers, strings, dtypes, "
        "devices and sequences of ints"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        quantize(values(4, 8), value)


EITHER = (
    "te_toy::none: an op either has outputs, a function of prototypes, "
    "or names the arguments it mutates"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            EITHER,
        ),
        (
            {"outputs": lambda x: x, "mutates": ("x",)},
            EITHER,
        ),
        ({"mutates": ("y",)}, "te_toy::none: mutates names ['y'], but the arguments are ['x']"),
    ],
    ids=["neither", "both", "unknown"],
)
def test_definition_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        custom_op("te_toy::none", **options)(lambda x: x)


# -- fakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fake_results_have_the_layout_of_real_ones(device: str) -> None:
    real = [
        *all_forms(**every_argument()),
        quantize(values(8, 12), Q),
        dequantize(Q.quantize(values(4, 8))),
    ]
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, (Tensor, QuantizedStorage)):
                return to_tensor_proto(value).replace(device=device).create_tensor()
            return torch.device(device) if isinstance(value, torch.device) else value

        given = {n: fake(v) for n, v in every_argument().items()}
        made = [
            *all_forms(**given),
            quantize(fake(values(8, 12)), Q),
            dequantize(fake(Q.quantize(values(4, 8)))),
        ]
        assert mode is not None
    for a, b in zip(made, real, strict=True):
        assert type(a) is type(b) or not isinstance(b, QuantizedStorage)
        assert to_tensor_proto(a) == to_tensor_proto(b).replace(device=device)
        assert [t.stride() for t in buffers_of(a)] == [t.stride() for t in buffers_of(b)]


def test_meta_tensors_give_meta_results() -> None:
    out = quantize(torch.empty(8, 12, device="meta"), Q)
    assert to_tensor_proto(out) == proto((8, 12), Q, device="meta")
