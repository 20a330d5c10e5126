# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from te_proto.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)


def test_ranks_find_each_other_and_their_arguments(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
print(dist.get_world_size(), dist.get_rank(), size, group == dist.group.WORLD.group_name)
print(rank, arguments)
"""
    ended = run_ranks(program, tmp_path, "a", "b c", size=3)
    for rank, (code, out, err) in enumerate(ended):
        assert code == 0, err
        assert out == f"3 {rank} 3 True\n{rank} ['a', 'b c']\n"


def test_a_rank_that_raises_ends_with_1_and_its_traceback(tmp_path: Path) -> None:
    raises, other = run_ranks("print('so far')\nif rank == 0: raise ValueError('mine')", tmp_path)
    assert (raises.code, raises.out) == (1, "so far\n")
    assert raises.err.endswith("ValueError: mine\n")
    assert other.code == 1, "it waited for a rank that is gone"


def test_a_rank_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(subprocess.TimeoutExpired):
        run_ranks("import time; time.sleep(600)", tmp_path, timeout=0.5)
    assert [rank.returncode for rank in started] == [-signal.SIGKILL] * 2
