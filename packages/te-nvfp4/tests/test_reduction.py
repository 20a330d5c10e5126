# SPDX-License-Identifier: Apache-2.0
"""Amaxes taken over a process group, whose name comes with the call and stays nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_nvfp4 import NVFP4Quantizer
from te_proto.errors import UsageError
from te_proto.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

PROGRAM = """
import torch
from te_nvfp4 import NVFP4Quantizer
from te_proto.testing import assert_same_bits, count_compiles

def inputs(m):
    made = [torch.randn(m, 96, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    made[-1] *= 2.0 ** 5
    return [x.bfloat16() for x in made]

def check(found, whole, rows):
    # a part of the whole, under the amaxes of the whole
    for name in ("amax_rowwise", "amax_columnwise"):
        assert_same_bits(getattr(found, name), getattr(whole, name), what=name)
    part = whole[rows]
    for name, buffer in part.inner_tensors().items():
        assert_same_bits(getattr(found, name), buffer, what=name)

rht = {"with_rht": True, "with_post_rht_amax": True}
for fields in ({}, {"with_2d_quantization": True}, rht):
    plain = NVFP4Quantizer(**fields)
    q = NVFP4Quantizer(with_amax_reduction=True, **fields)
    both = inputs(32)
    mine = slice(32 * rank, 32 * rank + 32)
    t = q.quantize(both[rank], group=group)
    check(t, plain.quantize(torch.cat(both)), mine)
    assert t.quantizer == plain

    # a rank without elements takes part and gets the amaxes of the other
    t = q.quantize(both[1] if rank else both[0][:0], group=group)
    other = plain.quantize(both[1])
    for name in ("amax_rowwise", "amax_columnwise"):
        assert_same_bits(getattr(t, name), getattr(other, name), what=name)

    # a rank that skips takes part too, and counts for nothing
    out = q.quantize(both[rank], group=group)
    kept = {n: t.clone() for n, t in out.inner_tensors().items()}
    q.quantize_into(both[rank] * 0.5, out, torch.tensor(float(rank == 1)), group=group)
    own = kept if rank else plain.quantize(both[0] * 0.5).inner_tensors()
    for name, buffer in own.items():
        assert_same_bits(getattr(out, name), buffer, what=name)

q = NVFP4Quantizer(with_amax_reduction=True, rowwise=False)
with count_compiles() as counted:
    compiled = torch.compile(
        lambda x: q.quantize(x, group=group).amax_columnwise,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )
    for m in (32, 64, 96):
        both = inputs(m)
        amax = torch.cat(both).abs().amax().float().view(1)
        assert_same_bits(compiled(both[rank]), amax)
assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0), counted
print("done")
"""


def test_amaxes_are_those_of_the_larger_of_two_processes(tmp_path: Path) -> None:
    for rank in run_ranks(PROGRAM, tmp_path):
        assert (rank.code, rank.out) == (0, "done\n"), rank.err


REDUCING = NVFP4Quantizer(with_amax_reduction=True)


@pytest.mark.parametrize(
    ("quantizer", "call", "message"),
    [
        pytest.param(REDUCING, {}, "needs group with the call, got None", id="missing"),
        pytest.param(
            NVFP4Quantizer(), {"group": "mine"}, "takes no group with the call, got mine", id="idle"
        ),
    ],
)
def test_group_is_given_where_it_is_used_and_nowhere_else(
    quantizer: NVFP4Quantizer, call: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        quantizer.quantize(torch.ones(32, 32), **call)
    assert str(raised.value) == f"nvfp4: {quantizer} {message}"
