# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from te_proto.testing import CompileCounts, count_compiles, poisoned_allocations
from te_proto.testing.plugin import cuda_absent

if TYPE_CHECKING:
    from pathlib import Path

# torch itself warns while Inductor starts
inductor = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@torch.library.custom_op("te_testing::allocate", mutates_args=())
def allocate(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.uint8)


ALLOCATIONS = {
    "empty": lambda: torch.empty(3, 5),
    "bf16": lambda: torch.empty(7, dtype=torch.bfloat16),
    "e8m0": lambda: torch.empty(7, dtype=torch.float8_e8m0fnu),
    "channels_last": lambda: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
    "empty_like": lambda: torch.empty_like(torch.zeros(4, 3).t()),
    "new_empty": lambda: torch.zeros(1).new_empty(9, dtype=torch.int64),
    "new_empty_strided": lambda: torch.zeros(1).new_empty_strided((2, 3), (1, 2)),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 4)),
    "empty_permuted": lambda: torch.empty_permuted((2, 3), (1, 0)),
    "scalar": lambda: torch.empty(()),
    "aten": lambda: torch.ops.aten.empty.memory_format([6], dtype=torch.float16),
    "custom op": lambda: allocate(torch.zeros(5)),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_poisoned_allocation_is_all_ones(poisoned: None, name: str) -> None:
    t = ALLOCATIONS[name]()
    assert set(t.untyped_storage().tolist()) == {0xFF}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_poisoning_keeps_the_layout(name: str) -> None:
    plain = ALLOCATIONS[name]()
    with poisoned_allocations():
        poisoned = ALLOCATIONS[name]()
    for field in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(plain, field) == getattr(poisoned, field)
    assert plain.stride() == poisoned.stride()


def test_poison_may_be_another_byte() -> None:
    with poisoned_allocations(0x01):
        assert set(torch.empty(3, 5).untyped_storage().tolist()) == {0x01}


def test_poisoning_ends() -> None:
    with poisoned_allocations():
        block = torch.empty(1 << 16, dtype=torch.uint8)
    block.zero_()
    del block
    # either fresh pages or the block just zeroed: never 0xFF again
    assert (torch.empty(1 << 16, dtype=torch.uint8) != 0xFF).any()


def test_results_do_not_change_under_poison(poisoned: None) -> None:
    x = torch.arange(12.0, requires_grad=True)
    (x.view(3, 4).t().contiguous() * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 12
    assert torch.zeros(2).tolist() == [0.0, 0.0]
    assert torch.cat([torch.ones(1), torch.full((1,), 3.0)]).tolist() == [1.0, 3.0]


@inductor
def test_compiled_graph_is_poisoned(poisoned: None) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(4) + x, x.new_empty(4)

    torch._dynamo.reset()
    used, returned = torch.compile(f, fullgraph=True)(torch.ones(4))
    assert used.isnan().all()
    assert set(returned.untyped_storage().tolist()) == {0xFF}


def test_one_graph_is_counted() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    with count_compiles() as c:
        compiled = torch.compile(f, backend="eager")
        compiled(torch.ones(3))
        assert c.graphs == 1
        compiled(torch.ones(3))
    assert c.graphs == 1
    assert c.breaks == 0
    assert c.recompiles == 0


def test_forced_break_is_counted() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    with count_compiles() as c:
        torch.compile(f, backend="eager")(torch.ones(3))
    assert (c.graphs, c.breaks, c.recompiles) == (2, 1, 0)
    assert "graph_break" in str(c.reasons)


def test_forced_recompile_is_counted() -> None:
    def f(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x + flag

    with count_compiles() as c:
        compiled = torch.compile(f, backend="eager")
        for flag in (True, False, True):
            compiled(torch.ones(3), flag)
        assert c.recompiles == 1
    assert (c.graphs, c.breaks, c.recompiles) == (2, 0, 1)


def test_counts_are_final_and_start_from_zero() -> None:
    with count_compiles() as first:
        torch.compile(torch.sin, backend="eager")(torch.ones(3))
    with count_compiles() as second:
        pass
    assert (first.graphs, second.graphs) == (1, 0)


@inductor
def test_cache_hit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 3 + 1

    with count_compiles() as cold:
        torch.compile(f)(torch.ones(3))
    with count_compiles() as warm:
        torch.compile(f)(torch.ones(3))
    assert (cold.fx_hits + cold.aot_hits, warm.fx_hits + warm.aot_hits > 0) == (0, True)
    assert cold.fx_misses == 1


def test_counted_fixture_counts(counted: CompileCounts) -> None:
    torch.compile(torch.cos, backend="eager")(torch.ones(2))
    assert counted.graphs == 1


def test_device_is_where_the_option_says(device: torch.device, pytestconfig: pytest.Config) -> None:
    assert device == torch.device(pytestconfig.getoption("--te-device"))


@pytest.mark.gpu
def test_gpu_marker_lets_the_test_run_only_with_cuda() -> None:
    assert torch.cuda.is_available()


def test_reason_is_torchs_own() -> None:
    reason = cuda_absent()
    if torch.cuda.is_available():
        assert reason is None
    elif torch.version.cuda is None:
        assert (
            reason
            == f"torch {torch.__version__} is built without CUDA (torch.version.cuda is None)"
        )
    else:
        assert "finds no GPU: " in str(reason)


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kit_imports_neither_torch_nor_triton(tmp_path: Path) -> None:
    code = (
        "import sys, te_proto.testing, te_proto.testing.plugin, te_proto.testing.interpreter, "
        "te_proto.testing.aot; assert not {'torch', 'triton'} & set(sys.modules)"
    )
    assert python("-c", code, cwd=tmp_path).stderr == ""


def test_fixtures_and_marker_outside_this_repository(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys, pytest\n"
        "@pytest.mark.gpu\n"
        "def test_gpu(): pass\n"
        "def test_triton(cpu_triton): pass\n"
    )
    hide = "import sys; sys.modules['triton'] = None; import pytest; "
    run = "sys.exit(pytest.main(['-qrs', '-pno:cacheprovider', '-pte_proto.testing.plugin', "
    out = python("-c", f"{hide}{run}'--strict-markers']))", cwd=tmp_path).stdout
    assert "triton is not installed" in out
    if reason := cuda_absent():
        assert reason in out
        refused = python("-c", f"{hide}{run}'--te-device=cuda']))", cwd=tmp_path)
        assert refused.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"--te-device=cuda: {reason}" in refused.stderr
