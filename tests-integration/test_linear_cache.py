# SPDX-License-Identifier: Apache-2.0
"""The opaque layer is found in both caches by the next process, with its backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import te_proto
from te_proto.testing import new_quantizer_in_graph

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import json, sys, torch, te_proto
from te_linear import Linear
from te_proto.testing import count_compiles

torch.manual_seed(0)
layer = Linear(128, 128, recipe=sys.argv[1], mode=sys.argv[2], dtype=torch.bfloat16)
with count_compiles() as counted:
    x = torch.randn(128, 128).bfloat16().requires_grad_()
    torch.compile(layer, fullgraph=True, dynamic=True)(x).sum().backward()
names = ("fx_hits", "fx_misses", "fx_bypasses", "aot_hits", "aot_misses", "aot_bypasses")
print(json.dumps({name: getattr(counted, name) for name in names}))
"""


@new_quantizer_in_graph
@pytest.mark.parametrize("name", te_proto.available_formats())
def test_a_second_process_compiles_nothing(name: str, tmp_path: Path) -> None:
    def run(mode: str) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, name, mode],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
                "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found

    first, second = run("opaque"), run("opaque")
    assert (first["aot_hits"], first["aot_misses"], first["aot_bypasses"]) == (0, 1, 0)
    assert (second["aot_hits"], second["aot_misses"], second["aot_bypasses"]) == (1, 0, 0)
    assert (first["fx_misses"], first["fx_bypasses"]) == (2, 0)  # forward and backward
    assert (second["fx_misses"], second["fx_bypasses"]) == (0, 0)
