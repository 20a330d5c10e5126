# SPDX-License-Identifier: Apache-2.0
"""Time quantize and dequantize of every installed format.

Each operation runs interleaved with what torchao does for the same result and with a copy that
reads and writes as many bytes; medians of the rounds that a busy machine did not disturb. What
gives a wrong result is not timed.

Prints a table and writes JSON. Exit status: 0; 1 if something of ours was not timed; 2 if an
argument is at fault.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import te_proto
from benchmarks.cases import MODES
from benchmarks.timing import Effort, Stopwatch, keep_heap

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPES = [(4096, 4096), (128, 4096)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments, checked; exits with status 2 if one is at fault."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="MxK", help="default: 4096x4096 128x4096"
    )
    parser.add_argument(
        "--formats", nargs="+", metavar="FORMAT", help="default: all that are installed"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: both")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="128x4096 alone, fewer rounds")
    parser.add_argument(
        "--out", type=Path, help="JSON file; default: benchmarks/results/<cpu>-<date>.json"
    )
    options = parser.parse_args(arguments)
    installed = te_proto.available_formats()
    if not installed:
        parser.error("no format is installed; pip install te-mxfp8, for one")
    if unknown := sorted(set(options.formats or ()) - set(installed)):
        names = ", ".join(installed)
        parser.error(f"--formats must be among those installed, {names}, got {', '.join(unknown)}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    options.formats = options.formats or installed
    options.shapes = options.shapes or (SHAPES[1:] if options.quick else SHAPES)
    return options


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        msg = f"must read like 4096x4096, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(rows), int(columns)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    options = parse(arguments)

    import torch

    from benchmarks import report
    from benchmarks.run import measure
    from benchmarks.subjects import has_peers

    # a peer that fails is one line of the table; its log and warnings would be pages
    logging.disable()
    warnings.simplefilter("ignore")
    # the key of a graph on disk is not the code of a plugin that made it: it may be of an older one
    torch.compiler.config.force_disable_caches = True
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    effort = Effort(rounds=3, sample=0.002) if options.quick else Effort()
    threads = torch.get_num_threads()
    print(f"{report.cpu_name()}, {threads} threads, torch {torch.__version__}")
    if not has_peers():
        print("torchao is not installed: no peers")
    print(report.header(), flush=True)
    path = options.out or report.default_path()
    rows = []
    for row in measure(options.formats, options.shapes, options.modes, Stopwatch(effort)):
        rows.append(row)
        for line in report.lines(row):
            print(line, flush=True)
        report.write(path, rows, effort, threads)  # each time: a run takes minutes and may be ended
    print(f"wrote {path}")
    return 1 if any(row.failure is not None for row in rows) else 0


if __name__ == "__main__":
    keep_heap()
    sys.exit(main())
