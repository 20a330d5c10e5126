# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_proto.errors import UsageError

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

PROGRAM = """
import sys, torch, torch.distributed as dist
from te_proto.collectives import all_reduce_max
from te_proto.testing import count_compiles

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
both = dist.group.WORLD.group_name
alone = [dist.new_group([r]) for r in (0, 1)][rank].group_name

x = torch.tensor([[3.0, -1.0, 0.0], [7.0, -5.0, float("inf")]])[rank]
before = x.clone()
assert all_reduce_max(x, both).tolist() == [7.0, -1.0, float("inf")]
assert all_reduce_max(x, alone).tolist() == x.tolist()
assert torch.equal(x, before)

with count_compiles() as counted:
    compiled = torch.compile(
        lambda t: all_reduce_max(t.abs(), both) * 2.0,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )
    for n in (4, 6, 8):
        up = torch.arange(n) * 1.0
        assert torch.equal(compiled(up - rank * n), torch.maximum(up, n - up) * 2.0)
assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0), counted
dist.destroy_process_group()
print("done")
"""


def test_maximum_over_two_processes_eager_and_compiled(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert (rank.returncode, out.strip()) == (0, "done"), err


def test_unknown_group_is_named() -> None:
    from te_proto.collectives import all_reduce_max

    with pytest.raises(UsageError) as raised:
        all_reduce_max(torch.ones(1), "absent")
    assert str(raised.value) == (
        "group must be the c10d name of a process group of this process, got 'absent'; pass its "
        "group_name after torch.distributed.init_process_group()"
    )
