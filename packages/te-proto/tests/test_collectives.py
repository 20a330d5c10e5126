# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from te_proto.errors import UsageError
from te_proto.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

PROGRAM = """
import torch, torch.distributed as dist
from te_proto.collectives import all_reduce_max
from te_proto.testing import count_compiles

alone = [dist.new_group([r]) for r in (0, 1)][rank].group_name

x = torch.tensor([[3.0, -1.0, 0.0], [7.0, -5.0, float("inf")]])[rank]
before = x.clone()
assert all_reduce_max(x, group).tolist() == [7.0, -1.0, float("inf")]
assert all_reduce_max(x, alone).tolist() == x.tolist()
assert torch.equal(x, before)

with count_compiles() as counted:
    compiled = torch.compile(
        lambda t: all_reduce_max(t.abs(), group) * 2.0,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )
    for n in (4, 6, 8):
        up = torch.arange(n) * 1.0
        assert torch.equal(compiled(up - rank * n), torch.maximum(up, n - up) * 2.0)
assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0), counted
print("done")
"""


def test_maximum_over_two_processes_eager_and_compiled(tmp_path: Path) -> None:
    for rank in run_ranks(PROGRAM, tmp_path):
        assert (rank.code, rank.out) == (0, "done\n"), rank.err


CACHED = """
import torch, torch.distributed as dist
from te_proto.collectives import all_reduce_max
from te_proto.testing import count_compiles

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD.group_name
with count_compiles() as counts:
    run = torch.compile(lambda x: all_reduce_max(x, group), fullgraph=True)
    assert run(torch.tensor([2.0])).tolist() == [2.0]
print(counts.aot_hits, counts.aot_misses, counts.aot_bypasses)
"""


def test_graph_that_reduces_is_found_in_the_caches(
    fresh: Callable[..., str], tmp_path: Path
) -> None:
    # pytorch#189541: one that holds a process group bypasses them; a name does not
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    assert fresh(CACHED, **environment) == "0 1 0"
    assert fresh(CACHED, **environment) == "1 0 0"


def test_unknown_group_is_named() -> None:
    from te_proto.collectives import all_reduce_max

    with pytest.raises(UsageError) as raised:
        all_reduce_max(torch.ones(1), "absent")
    assert str(raised.value) == (
        "group must be the c10d name of a process group of this process, got 'absent'; pass its "
        "group_name after torch.distributed.init_process_group()"
    )
