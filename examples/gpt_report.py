# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from gpt_bytes import LinearBytes
    from gpt_training import Training

BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One format's run.

    Attributes:
        name: format id, or :data:`BASELINE`.
        planned: bytes that prototypes predicted.
        measured: bytes that a forward held.
        training: losses, speed and compile counts.
    """

    name: str
    planned: LinearBytes
    measured: LinearBytes
    training: Training


_GROUPS = (
    ("", ("format",)),
    ("loss, nats a byte", ("first", "last", "vs bf16")),
    ("weights, bytes", ("planned", "measured")),
    ("saved for backward, bytes", ("planned", "measured")),
    ("torch.compile", ("graphs", "breaks", "recompiles")),
    ("speed", ("tokens/s",)),
)


def table(results: list[Result]) -> str:
    """Return one line a format under two lines of headings; the baseline comes first."""
    rows = [_row(result, results[0]) for result in results]
    names = [name for _, columns in _GROUPS for name in columns]
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    groups, at = [], 0
    for title, columns in _GROUPS:
        padded = f"- {title} -" if title else ""
        # the first column of a group takes what its title is longer than its columns
        span = sum(widths[at : at + len(columns)]) + 2 * (len(columns) - 1)
        widths[at] += max(0, len(padded) - span)
        groups.append(padded.center(max(span, len(padded)), "-" if title else " "))
        at += len(columns)
    return "\n".join(("  ".join(groups), *(_line(row, widths) for row in (names, *rows))))


def _row(result: Result, baseline: Result) -> list[str]:
    run = result.training
    difference = run.last_loss - baseline.training.last_loss
    return [
        result.name,
        f"{run.losses[0]:.4f}",
        f"{run.last_loss:.4f}",
        "-" if result is baseline else f"{difference:+.4f}",
        f"{result.planned.weights:,}",
        f"{result.measured.weights:,}",
        f"{result.planned.saved:,}",
        f"{result.measured.saved:,}",
        str(run.graphs),
        str(run.graph_breaks),
        str(run.recompiles),
        f"{run.tokens_per_second:,.0f}",
    ]


def _line(cells: list[str], widths: list[int]) -> str:
    first, *rest = (
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *rest))


def disagreements(results: list[Result]) -> list[str]:
    """Return a sentence for each byte count that prototypes got wrong."""
    return [
        f"{result.name}: prototypes plan {planned:,} bytes of {what}, a forward holds {measured:,}"
        for result in results
        for what, planned, measured in (
            ("weights", result.planned.weights, result.measured.weights),
            ("saved tensors", result.planned.saved, result.measured.saved),
        )
        if planned != measured
    ]


def draw(results: list[Result], title: str, path: Path) -> None:
    """Write the loss curves to ``path`` as a PNG: losses above, differences to bf16 below."""
    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    base = np.array(results[0].training.losses)
    steps = np.arange(1, len(base) + 1)
    colors = mpl.color_sequences["tab10"]
    for i, result in enumerate(results):
        losses = np.array(result.training.losses)
        color = "black" if i == 0 else colors[(i - 1) % len(colors)]
        style = {"color": color, "label": result.name, "linewidth": 3.0 if i == 0 else 1.4}
        upper.plot(steps, losses, color=color, alpha=0.15, linewidth=0.8)
        upper.plot(steps, smooth(losses), **style)
        if i:
            lower.plot(steps, losses - base, color=color, alpha=0.15, linewidth=0.8)
            lower.plot(steps, smooth(losses - base), **style)
    lower.axhline(0.0, color="black", linewidth=1.0)
    upper.set_title(title)
    upper.set_ylabel("training loss, nats a byte")
    upper.legend()
    lower.set_ylabel("difference to bf16")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path, format="png")


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean over the 5 % of the steps around each.

    At the start, where the loss falls steeply, over as few as there are before the step; at the
    end over what is left of the window, or the last values would be noise.
    """
    at = np.arange(len(values))
    reach = np.minimum(round(0.025 * len(values)), at)
    first, last = at - reach, np.minimum(at + reach, len(values) - 1)
    total = np.concatenate(([0.0], np.cumsum(values)))
    mean: np.ndarray = (total[last + 1] - total[first]) / (last - first + 1)
    return mean
