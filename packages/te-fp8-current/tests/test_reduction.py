# SPDX-License-Identifier: Apache-2.0
"""The maximum taken over a process group, whose name comes with the call and stays nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_proto import TensorProto, custom_op, to_tensor_proto
from te_proto.errors import LayoutError, UsageError
from te_proto.testing import run_ranks

NEEDS_GROUP = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

PROGRAM = """
import torch
from te_fp8_current import Float8CurrentScalingQuantizer, reference
from te_proto.testing import assert_same_bits, count_compiles

def inputs(m, ranks=(0, 1)):
    made = [torch.randn(m, 24, generator=torch.Generator().manual_seed(r)) for r in ranks]
    made[-1] *= 2.0 ** 5
    return made

def expected(x, amax, quantizer):
    return reference.quantize(
        x, amax, dtype=quantizer.dtype, force_pow_2_scales=quantizer.force_pow_2_scales,
        amax_epsilon=quantizer.amax_epsilon, data=True, transpose=quantizer.separate_transpose,
    )

def check(q, buffers):
    found = q.inner_tensors() if hasattr(q, "inner_tensors") else q
    assert list(found) == list(buffers)
    for name, buffer in buffers.items():
        assert_same_bits(found[name], buffer, what=name)

for fields in ({}, {"separate_transpose": True, "force_pow_2_scales": True, "dtype": "e5m2"}):
    quantizer = Float8CurrentScalingQuantizer(with_amax_reduction=True, **fields)
    both = inputs(6)
    amax = torch.cat(both).abs().amax().reshape(1)
    q = quantizer.quantize(both[rank], group=group)
    check(q, expected(both[rank], amax, quantizer))
    assert q.quantizer == quantizer.replace(with_amax_reduction=False)

    # a rank without elements takes part and gets the scale of the other
    mine = both[1] if rank else torch.empty(0, 24)
    q = quantizer.quantize(mine, group=group)
    check(q, expected(mine, both[1].abs().amax().reshape(1), quantizer))

    # a rank that skips takes part too, and counts for nothing
    out = quantizer.quantize(both[rank], group=group)
    kept = {n: t.clone() for n, t in out.inner_tensors().items()}
    quantizer.quantize_into(
        both[rank] * 0.5, out, torch.tensor(float(rank == 1)), group=group
    )
    own = (both[0] * 0.5).abs().amax().reshape(1)
    check(out, kept if rank else expected(both[0] * 0.5, own, quantizer))

with count_compiles() as counted:
    compiled = torch.compile(
        lambda x: quantizer.quantize(x, group=group), fullgraph=True, dynamic=True
    )
    for m in (32, 64, 96, 160):
        both = inputs(m)
        q = compiled(both[rank])
        check(q, expected(both[rank], torch.cat(both).abs().amax().reshape(1), quantizer))
assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0), counted
print("done")
"""


@NEEDS_GROUP
def test_scale_is_that_of_the_larger_of_two_processes(tmp_path: Path) -> None:
    for rank in run_ranks(PROGRAM, tmp_path):
        assert (rank.code, rank.out) == (0, "done\n"), rank.err


REDUCING = Quantizer(with_amax_reduction=True)


@pytest.fixture
def of_one(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for a group of this process alone; the list collects the names it is called by."""
    names: list[str] = []

    def reduce(x: torch.Tensor, group: str) -> torch.Tensor:
        names.append(group)
        return x * 2.0

    monkeypatch.setattr("te_proto.collectives.all_reduce_max", reduce)
    return names


def test_group_is_passed_by_name_and_its_maximum_used(of_one: list[str]) -> None:
    q = REDUCING.quantize(torch.tensor([3.5, -7.0]), group="mine")
    assert of_one == ["mine"]
    assert q.fp8_scale_inv.tolist() == [14.0 / 448]
    assert q.fp8_data.tolist() == [0x6E, 0xF6]  # 112 and -224


def test_no_group_is_asked_for_later(of_one: list[str]) -> None:
    q = REDUCING.quantize(torch.ones(4, 6), group="mine")
    assert q.quantizer == Quantizer()
    q.quantize_(torch.full((4, 6), 7.0))
    q.copy_(torch.full((4, 6), 3.5))
    q.new_zeros((2, 2))
    assert q.dequantize().unique().tolist() == [3.5]
    assert of_one == ["mine"]


def test_prototype_makes_the_tensor_that_the_call_makes(of_one: list[str]) -> None:
    proto = TensorProto(shape=(4, 6), dtype=torch.float32, quantizer=REDUCING, device="cpu")
    made, real = proto.create_tensor(), REDUCING.quantize(torch.ones(4, 6), group="mine")
    assert to_tensor_proto(made) == to_tensor_proto(real) == proto.at_rest()
    assert proto.at_rest() == proto.replace(quantizer=Quantizer())
    assert made.__tensor_flatten__() == real.__tensor_flatten__()
    assert proto.create_metadata() == real.__tensor_flatten__()[1]


def test_op_that_is_described_by_the_call_returns_the_tensor_at_rest(
    of_one: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_PROTO_CHECK", "1")

    @custom_op(
        "te_fp8_current_tests::reduce",
        outputs=lambda x: TensorProto(
            shape=x.shape, dtype=x.dtype, quantizer=REDUCING, device=x.device
        ),
    )
    def reduce(x: torch.Tensor) -> Any:
        return REDUCING.quantize(x, group="mine")

    assert reduce(torch.ones(4, 6)).quantizer == Quantizer()


def test_out_of_the_quantizer_at_rest_is_filled(of_one: list[str]) -> None:
    out = REDUCING.make_empty((4, 6), device="cpu")
    REDUCING.quantize_into(torch.full((4, 6), 7.0), out, group="mine")
    assert out.fp8_scale_inv.tolist() == [14.0 / 448]
    with pytest.raises(LayoutError, match="out must be described by"):
        REDUCING.replace(dtype="e5m2").quantize_into(torch.ones(4, 6), out, group="mine")


@pytest.mark.parametrize(
    ("quantizer", "call", "message"),
    [
        pytest.param(REDUCING, {}, "needs group with the call, got None", id="missing"),
        pytest.param(
            Quantizer(), {"group": "mine"}, "takes no group with the call, got mine", id="idle"
        ),
    ],
)
def test_group_is_given_where_it_is_used_and_nowhere_else(
    quantizer: Quantizer, call: dict[str, Any], message: str
) -> None:
    out = Quantizer().quantize(torch.ones(2, 2))
    for run in (
        lambda: quantizer.quantize(torch.ones(2, 2), **call),
        lambda: quantizer.quantize_into(torch.ones(2, 2), out, **call),
    ):
        with pytest.raises(UsageError) as raised:
            run()
        assert str(raised.value) == f"fp8_current: {quantizer} {message}"
