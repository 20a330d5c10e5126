# SPDX-License-Identifier: Apache-2.0
"""A rank that dies gives an error on the others, in forward and in backward, and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import te_proto

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

PROGRAM = """
import os, sys, torch, torch.distributed as dist
from te_linear import Linear

torch.set_num_threads(1)
rank, store, name, mode, dies_in = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
layer = Linear(256, 256, recipe=name, dtype=torch.bfloat16, mode=mode, parallel_mode="column",
               tp_size=2, tp_group=dist.group.WORLD.group_name, sequence_parallel=True)
x = torch.randn(128, 256).bfloat16().requires_grad_()
layer(x).sum().backward()  # both are there
if rank == 1 and dies_in == "forward":
    os._exit(3)
try:
    y = layer(x)
    if rank == 1:
        os._exit(3)
    print("through forward", flush=True)
    y.sum().backward()
except RuntimeError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)  # at a usual exit torch may abort while it ends its threads
"""


@pytest.mark.parametrize("mode", ["traced", "opaque"])
@pytest.mark.parametrize("dies_in", ["forward", "backward"])
def test_the_other_rank_raises(mode: str, dies_in: str, tmp_path: Path) -> None:
    name = te_proto.available_formats()[-1]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                str(rank),
                str(tmp_path / "store"),
                name,
                mode,
                dies_in,
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        (out, err), (_, dead) = (r.communicate(timeout=90) for r in ranks)
    finally:
        for r in ranks:
            r.kill()
    assert ranks[1].returncode == 3, dead
    assert ranks[0].returncode == 1, err
    assert "Connection closed by peer" in err or "Connection reset by peer" in err, err
    assert out.strip() == ("through forward" if dies_in == "backward" else ""), err
