# SPDX-License-Identifier: Apache-2.0
"""Everything that can be known of a linear layer without data, in thousands of generated cases.

Each case runs forward and backward for real and on fake tensors. Output, saved tensors and
gradients are compared in full, and with the plan. Ranks are those of torch's fake process group,
which sends nothing: shapes are real, and values are not looked at.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import te_proto
from te_linear import LinearConfig, LinearPlan, linear, quantize_weight
from te_linear.functional import plan_call
from te_proto import to_tensor_proto
from te_proto.errors import TeError
from te_proto.storage import QuantizedStorage
from te_proto.testing.facts import Refusal, assert_same_facts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

FORMATS = te_proto.available_formats()
PARTS = 4  # of the cases of a format, so that workers share them
CASES_OF_A_PART = 150
LAYERS = [
    (None, False, 1),
    *itertools.product(("column", "row"), (False, True), (1, 2, 4, 8)),
]


class Case(NamedTuple):
    layer: tuple[str | None, bool, int]
    grads: tuple[bool, bool, bool]
    rows: tuple[int, ...]
    x: str
    weight: str
    bias: bool
    output: bool
    original: bool
    mode: str


def cases(name: str) -> list[Case]:
    """Return those of all combinations that a checksum picks: the same ones in every run."""
    everything = itertools.product(
        LAYERS,
        itertools.product((False, True), repeat=3),
        ((128,), (32,), (64, 2), (16,), (8, 3)),
        ("plain", "tensor", "storage"),
        ("plain", "parameter", "cached"),
        (False, True),
        (False, True),
        (False, True),
        ("traced", "opaque"),
    )
    picked = sorted(everything, key=lambda c: zlib.crc32(f"{name}{c}".encode()))
    return [Case(*c) for c in picked[: PARTS * CASES_OF_A_PART]]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield {size: dist.new_group(list(range(size))).group_name for size in (1, 2, 4, 8)}
    dist.destroy_process_group()


class Outcome(NamedTuple):
    plan: LinearPlan
    output: Any
    saved: list[Tensor]
    gradients: list[Tensor | None]


def run(case: Case, config: LinearConfig, *, n: int, k: int) -> Outcome:
    torch.manual_seed(0)
    x = torch.randn(*case.rows, k, dtype=torch.bfloat16)
    weight = torch.randn(n, k, dtype=torch.bfloat16)
    bias = torch.randn(n, dtype=torch.bfloat16) if case.bias else None
    if case.x != "plain":
        columnwise = case.grads[1]  # without it there may be fewer rows
        quantizer = config.input.replace(columnwise=columnwise, internal=case.x == "storage")
        x = quantizer.quantize(x)
    if case.weight == "parameter":
        weight = config.weight.quantize(weight)
    cached = quantize_weight(weight, config) if case.weight == "cached" else None
    inputs = [x, weight, bias]
    for tensor, flag in zip(inputs, case.grads, strict=True):
        if isinstance(tensor, Tensor):
            tensor.requires_grad_(flag)
    options: dict[str, Any] = {"cached_weight": cached}
    plan = plan_call(x, weight, bias, config, cached)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = linear(x, weight, bias, config=config, mode=case.mode, **options)
    if plan.output.requires_grad:
        # an output quantizer passes it straight through
        torch.autograd.backward(y, torch.ones(y.shape, dtype=y.dtype))
    return Outcome(plan, y, saved, [getattr(t, "grad", None) for t in inputs])


def attempt(case: Case, config: LinearConfig, *, n: int, k: int) -> Outcome | Refusal:
    try:
        return run(case, config, n=n, k=k)
    except TeError as error:
        return Refusal(type(error), str(error))


def check_plan(what: str, outcome: Outcome) -> None:
    plan = outcome.plan
    found = [outcome.output, *outcome.gradients]
    wanted = [plan.output, plan.grad_input, plan.grad_weight, plan.grad_bias]
    for role, tensor, proto in zip(("output", "dx", "dw", "db"), found, wanted, strict=True):
        assert (tensor is None) == (proto is None), f"{what}: {role} is {tensor}"
        if proto is not None:
            assert to_tensor_proto(tensor) == proto.at_rest(), f"{what}: {role}"
    described = [spec for proto in plan.saved for spec in proto.inner_specs().values()]
    kept = [(tuple(t.shape), t.dtype) for t in outcome.saved]
    assert kept == [(tuple(s.shape), s.dtype) for s in described], f"{what}: saved"


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", FORMATS)
def test_fake_equals_real_equals_plan(name: str, part: int, groups: dict[int, str]) -> None:
    recipe = te_proto.get_recipe(name)
    taken = 0
    for case in cases(name)[part::PARTS]:
        kind, sequence, size = case.layer
        config = LinearConfig.from_recipe(
            recipe,
            output=recipe.input.replace(columnwise=False) if case.output else None,
            save_original_input=case.original,
            parallel_mode=kind,
            tp_size=size,
            tp_group=groups[size] if kind else None,
            sequence_parallel=sequence,
        )
        what, sizes = f"{name}: {case}", {"n": 128, "k": 256}
        with FakeTensorMode():
            fake = attempt(case, config, **sizes)
        real = attempt(case, config, **sizes)
        if isinstance(fake, Refusal) or isinstance(real, Refusal):
            assert fake == real, f"{what}: fake {fake}, real {real}"
            continue
        taken += 1
        assert fake.plan == real.plan, what
        check_plan(what, real)
        compare(what, fake, real)
    assert taken > CASES_OF_A_PART / 3  # most are no errors


def compare(what: str, fake: Outcome, real: Outcome) -> None:
    assert_same_facts(fake.output, real.output, f"{what}: output")
    for i, (a, b) in enumerate(zip(fake.saved, real.saved, strict=True)):
        assert_same_facts(a, b, f"{what}: saved {i}")
    for role, a, b in zip(("dx", "dw", "db"), fake.gradients, real.gradients, strict=True):
        assert (a is None) == (b is None), f"{what}: {role}"
        if a is not None:
            assert not isinstance(a, QuantizedStorage)
            assert_same_facts(a, b, f"{what}: {role}")
