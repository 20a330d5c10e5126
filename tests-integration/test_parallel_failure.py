# SPDX-License-Identifier: Apache-2.0
"""A rank that dies gives an error on the others, in forward and in backward, and no hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import te_proto
from te_proto.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

PROGRAM = """
import os, torch
from te_linear import Linear

name, mode, dies_in = arguments
layer = Linear(256, 256, recipe=name, dtype=torch.bfloat16, mode=mode, parallel_mode="column",
               tp_size=2, tp_group=group, sequence_parallel=True)
x = torch.randn(128, 256).bfloat16().requires_grad_()
layer(x).sum().backward()  # both are there
if rank == 1 and dies_in == "forward":
    os._exit(3)
y = layer(x)
if rank == 1:
    os._exit(3)
print("through forward")
y.sum().backward()
"""


@pytest.mark.parametrize("mode", ["traced", "opaque"])
@pytest.mark.parametrize("dies_in", ["forward", "backward"])
def test_the_other_rank_raises(mode: str, dies_in: str, tmp_path: Path) -> None:
    name = te_proto.available_formats()[-1]
    alive, dead = run_ranks(PROGRAM, tmp_path, name, mode, dies_in, timeout=90)
    assert dead.code == 3, dead.err
    assert alive.code == 1, alive.err
    assert "Connection closed by peer" in alive.err or "Connection reset by peer" in alive.err
    assert alive.out == ("through forward\n" if dies_in == "backward" else ""), alive.err
