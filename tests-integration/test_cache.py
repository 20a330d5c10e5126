# SPDX-License-Identifier: Apache-2.0
"""What one process compiled, the next one finds in Inductor's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_proto
from te_proto.testing import new_quantizer_in_graph

PROGRAM = """
import json, sys, torch, te_proto
from te_linear import Linear
from te_proto.testing import count_compiles

name = sys.argv[1]
recipe = te_proto.get_recipe(name)
torch.manual_seed(0)
layer = Linear(64, 96, recipe=recipe)

def create(x):
    return te_proto.TensorProto(
        shape=x.shape, dtype=x.dtype, quantizer=recipe.weight, device=x.device
    ).create_tensor()

def step(x):
    return layer(x)

cases = {
    "create_tensor": (create, torch.randn(32, 64).bfloat16()),
    "quantize": (recipe.input.quantize, torch.randn(32, 64).bfloat16()),
    "dequantize": (lambda q: q.dequantize(), recipe.input.quantize(torch.randn(32, 64).bfloat16())),
    "linear": (step, torch.randn(32, 64).bfloat16().requires_grad_()),
}
found = {}
for case, (fn, x) in cases.items():
    with count_compiles() as counted:
        y = torch.compile(fn, fullgraph=True, dynamic=True)(x)
        if case == "linear":
            y.sum().backward()
    found[case] = [counted.graphs, counted.fx_hits, counted.fx_misses, counted.fx_bypasses]
print(json.dumps(found))
"""


@new_quantizer_in_graph
@pytest.mark.parametrize("name", te_proto.available_formats())
def test_a_second_process_hits_the_cache(name: str, tmp_path: Path) -> None:
    def run() -> dict[str, list[int]]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, name],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
                # each new cache would make them again, which takes longer than its few kernels
                "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
        return found

    graphs = {"create_tensor": 1, "quantize": 1, "dequantize": 1, "linear": 2}  # with backward
    assert run() == {case: [1, 0, count, 0] for case, count in graphs.items()}
    assert run() == {case: [1, count, 0, 0] for case, count in graphs.items()}
