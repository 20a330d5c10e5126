# SPDX-License-Identifier: Apache-2.0
"""What a run leaves: a table while it goes, and JSON at its end."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import te_proto
from benchmarks.timing import HEAP

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.timing import Effort

RESULTS = Path(__file__).parent / "results"
WIDTHS = (11, 26, 10, 8, 10, 9, 9, 9, 30, 9, 9, 0)
HEAD = (
    *("format", "case", "shape", "mode", "op"),
    *("ours ms", "copy ms", "ours/copy", "peer", "peer ms", "ours/peer", "note"),
)
_NUMBERS = ("ours ms", "copy ms", "ours/copy", "peer ms", "ours/peer")


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """A peer beside one row of ours.

    Attributes:
        name: of the peer.
        ms: milliseconds of one call, None if it was not timed.
        failure: why it was not: the first line of what it raised, or how its result is wrong.
        ours_over_peer: time of ours over time of the peer.
    """

    name: str
    ms: float | None = None
    failure: str | None = None
    ours_over_peer: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        format: format id.
        case: name of the case.
        shape: of the input.
        mode: ``"eager"`` or ``"compiled"``.
        op: ``"quantize"`` or ``"dequantize"``.
        nbytes: read and written by ours: the plain tensor and the quantized one.
        ms: milliseconds of one call of ours, None if it was not timed.
        failure: why it was not.
        copy_ms: milliseconds of a copy that reads and writes ``nbytes`` in all.
        ours_over_copy: time of ours over time of the copy.
        peers: in the order of the case's.
        rounds: that the medians are of.
        discarded: rounds that are not among them.
        disturbed: the machine was too busy for enough undisturbed rounds.
    """

    format: str
    case: str
    shape: tuple[int, int]
    mode: str
    op: str
    nbytes: int = 0
    ms: float | None = None
    failure: str | None = None
    copy_ms: float | None = None
    ours_over_copy: float | None = None
    peers: tuple[PeerResult, ...] = ()
    rounds: int = 0
    discarded: int = 0
    disturbed: bool = False


def header() -> str:
    """Return the head of the table."""
    return _line(HEAD)


def lines(row: Row) -> Iterable[str]:
    """Yield the lines of ``row``, one for each peer."""
    start = (row.format, row.case, f"{row.shape[0]}x{row.shape[1]}", row.mode, row.op)
    if row.failure is not None:
        yield _line((*start, f"fails: {row.failure}"))
        return
    ours = (_number(row.ms, 3), _number(row.copy_ms, 3), _number(row.ours_over_copy, 2))
    note = f"disturbed, {row.rounds + row.discarded} rounds" if row.disturbed else ""
    for i, peer in enumerate(row.peers or (PeerResult(name="-"),)):
        known = (*start, *ours) if i == 0 else ("",) * 8
        if peer.failure is not None:
            theirs = (f"fails: {peer.failure}", "")
        else:
            theirs = (_number(peer.ms, 3), _number(peer.ours_over_peer, 2))
        yield _line((*known, peer.name, *theirs, note if i == 0 else ""))


def write(path: Path, rows: Sequence[Row], effort: Effort, threads: int) -> None:
    """Write ``rows`` and what they were measured on as JSON."""
    result = {
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": threads,
            "system": platform.system(),
            "python": platform.python_version(),
            "heap_kept": all(os.environ.get(name) == value for name, value in HEAP.items()),
        },
        "date": date.today().isoformat(),
        "versions": {name: _version(name) for name in _distributions()},
        "effort": dataclasses.asdict(effort),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def default_path() -> Path:
    """Return where a run writes unless it is told: results/<cpu>-<date>.json."""
    cpu = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return RESULTS / f"{cpu}-{date.today().isoformat()}.json"


def cpu_name() -> str:
    """Return what the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _distributions() -> tuple[str, ...]:
    ours = (te_proto.describe(name).distribution for name in te_proto.available_formats())
    return ("torch", "torchao", "te-proto", *ours)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    padded = (
        f"{cell:>{width}}"
        if head in _NUMBERS and not cell.startswith("fails")
        else f"{cell:<{width}}"
        for cell, width, head in zip(cells, WIDTHS, HEAD, strict=False)
    )
    return " ".join(padded).rstrip()
