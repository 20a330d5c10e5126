# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from gpt_checks import distance, smooth
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from gpt_bytes import LinearBytes
    from gpt_training import Training
    from matplotlib.axes import Axes

BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One format's run.

    Attributes:
        name: format id, or :data:`BASELINE`.
        planned: bytes that prototypes predicted.
        measured: bytes that a forward held.
        training: losses, speed and compile counts.
        stated: how far the losses may be from the baseline's, or None if nothing is stated.
    """

    name: str
    planned: LinearBytes
    measured: LinearBytes
    training: Training
    stated: float | None


_TRAINING = (
    ("", ("format",)),
    ("loss, nats a byte", ("first", "last", "distance", "stated")),
    ("torch.compile", ("graphs", "breaks", "recompiles")),
    ("speed", ("first step, s", "tokens/s")),
)
_MEMORY = (
    ("", ("format",)),
    ("weights, bytes", ("planned", "measured")),
    ("saved for backward, bytes", ("planned", "measured")),
)


def tables(results: list[Result]) -> str:
    """Return two tables with a line a format under two lines of headings; the baseline is first."""
    training = _table(_TRAINING, [_training(result, results[0]) for result in results])
    memory = _table(_MEMORY, [_memory(result) for result in results])
    return f"{training}\n\n{memory}"


def _table(groups: tuple[tuple[str, tuple[str, ...]], ...], rows: list[list[str]]) -> str:
    names = [name for _, columns in groups for name in columns]
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    titles, at = [], 0
    for title, columns in groups:
        padded = f"- {title} -" if title else ""
        # the first column of a group takes what its title is longer than its columns
        span = sum(widths[at : at + len(columns)]) + 2 * (len(columns) - 1)
        widths[at] += max(0, len(padded) - span)
        titles.append(padded.center(max(span, len(padded)), "-" if title else " "))
        at += len(columns)
    return "\n".join(("  ".join(titles), *(_line(row, widths) for row in (names, *rows))))


def _training(result: Result, baseline: Result) -> list[str]:
    run = result.training
    apart = distance(run.losses, baseline.training.losses)
    return [
        result.name,
        f"{run.losses[0]:.3f}",
        f"{run.last_loss:.3f}",
        "-" if result is baseline else f"{apart:.3f}",
        "-" if result.stated is None else f"{result.stated:.3f}",
        str(run.graphs),
        str(run.graph_breaks),
        str(run.recompiles),
        f"{run.first_step_seconds:,.1f}",
        f"{run.tokens_per_second:,.0f}",
    ]


def _memory(result: Result) -> list[str]:
    return [
        result.name,
        f"{result.planned.weights:,}",
        f"{result.measured.weights:,}",
        f"{result.planned.saved:,}",
        f"{result.measured.saved:,}",
    ]


def _line(cells: list[str], widths: list[int]) -> str:
    first, *rest = (
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *rest))


def draw(results: list[Result], title: str, path: Path) -> None:
    """Write the loss curves to ``path`` as a PNG: losses above, differences to bf16 below.

    Losses and differences are drawn smoothed, on top of the faint ones of each step.
    """
    figure = Figure(figsize=(9, 8), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    base = np.array(results[0].training.losses)
    steps = np.arange(1, len(base) + 1)
    colors = mpl.color_sequences["tab10"]
    for i, result in enumerate(results):
        losses = np.array(result.training.losses)
        color = "black" if i == 0 else colors[(i - 1) % len(colors)]
        # curves that coincide lie on top of each other: each is thinner than the one below it
        width = 1.2 + 4.8 * (1 - i / len(results)) ** 2
        upper.plot(steps, losses, color=color, alpha=0.15, linewidth=0.8)
        upper.plot(steps, smooth(losses), color=color, linewidth=width, label=result.name)
        if i:
            lower.plot(steps, losses - base, color=color, alpha=0.2, linewidth=0.8)
            lower.plot(steps, smooth(losses - base), color=color, linewidth=1.6)
    lower.axhline(0.0, color="black", linewidth=1.0)
    _mark_stated(lower, results)
    upper.set_title(title)
    upper.set_ylabel("training loss, nats a byte")
    upper.legend()
    lower.set_ylabel("difference to bf16, nats a byte")
    lower.set_xlabel("step")
    lower.margins(y=0.12)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path, format="png")


def _mark_stated(axes: Axes, results: list[Result]) -> None:
    """Draw the stated distances as dashed lines, with the names of those they are stated for."""
    for stated in {result.stated for result in results if result.stated is not None}:
        names = ", ".join(result.name for result in results if result.stated == stated)
        for edge in (-stated, stated):
            axes.axhline(edge, color="gray", linewidth=1.0, linestyle="--")
        axes.annotate(
            f"stated for {names}: {stated:.2f}",
            (0.0, stated),
            xycoords=("axes fraction", "data"),
            xytext=(6, 3),
            textcoords="offset points",
            fontsize="small",
            color="dimgray",
        )
