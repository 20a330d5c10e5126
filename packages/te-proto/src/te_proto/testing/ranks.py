# SPDX-License-Identifier: Apache-2.0
"""Programs of several processes on one machine, joined by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_AROUND = """
import os, sys, traceback, torch, torch.distributed as dist

program, store, rank, size = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
given = {"__name__": "__main__", "rank": rank, "size": size, "arguments": sys.argv[5:]}
try:
    exec(program, given | {"group": dist.group.WORLD.group_name})
    dist.barrier()
    failed = 0
except Exception:
    traceback.print_exc()
    failed = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(failed)  # gloo's threads may still run, and torch aborts where it ends below them
"""


class Ended(NamedTuple):
    """How one rank ended."""

    code: int
    out: str
    err: str


def run_ranks(
    program: str, folder: Path, *arguments: str, size: int = 2, timeout: float = 300.0
) -> list[Ended]:
    """Run ``program`` once a rank, each with one thread, and return how each ended, by rank.

    The source finds ``rank`` and ``size`` (ints), ``group`` (the c10d name of the group of all)
    and ``arguments`` (a list of strings). What it raises ends its rank with code 1 and the
    traceback in ``err``; what it prints is in ``out``.

    ``folder`` is an empty one for the files of this run. No rank outlives the call, not even where
    it raises: ``subprocess.TimeoutExpired`` when one takes more than ``timeout`` seconds.
    """
    # one machine: no name of a host has to resolve
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(size):
            command = [sys.executable, "-c", _AROUND, program, str(folder / "store")]
            with (
                (folder / f"{rank}.out").open("w") as out,
                (folder / f"{rank}.err").open("w") as err,
            ):
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), str(size), *arguments],
                        env=environment,
                        stdout=out,
                        stderr=err,
                    )
                )
        codes = [process.wait(timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [
        Ended(code, (folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text())
        for rank, code in enumerate(codes)
    ]
