# SPDX-License-Identifier: Apache-2.0
"""What a run must show: one graph a format, bytes as planned, losses near those of bf16."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from te_proto import describe
from te_proto.errors import QuantizerError
from te_proto.numerics import element_format

if TYPE_CHECKING:
    from gpt_report import Result

STATED = {3: 0.04, 1: 0.10}
"""Mantissa bits of a format's codes -> the distance that :func:`distance` may reach.

In nats a byte, for the default sizes, text and learning rate; README.md has the runs behind it.
"""


def stated_distance(name: str) -> float | None:
    """Return the distance stated for a format, or None where its codes are of no known kind."""
    try:
        element = element_format(describe(name).elements[0])
    except QuantizerError:
        return None
    return STATED.get(element.mantissa_bits)


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


def distance(losses: list[float], baseline: list[float]) -> float:
    """Return how far apart two smoothed curves are where they are farthest; NaN if one is."""
    return float(np.abs(smooth(np.array(losses) - np.array(baseline))).max())


def faults(results: list[Result]) -> list[str]:
    """Return a sentence for each claim that a run broke; the baseline comes first."""
    found = []
    for result in results:
        for what, planned, measured in (
            ("weights", result.planned.weights, result.measured.weights),
            ("saved tensors", result.planned.saved, result.measured.saved),
        ):
            if planned != measured:
                found.append(
                    f"{result.name}: prototypes plan {planned:,} bytes of {what}, "
                    f"a forward holds {measured:,}"
                )
        run = result.training
        if (run.graphs, run.graph_breaks, run.recompiles) != (1, 0, 0):
            found.append(
                f"{result.name}: must be one graph without breaks and recompiles, got "
                f"{run.graphs} graphs, {run.graph_breaks} breaks, {run.recompiles} recompiles"
            )
        if not all(map(math.isfinite, run.losses)):
            found.append(f"{result.name}: a loss is not finite")
        elif result.stated is not None:
            apart = distance(run.losses, results[0].training.losses)
            if apart > result.stated:
                found.append(
                    f"{result.name}: the loss is up to {apart:.3f} nats a byte from that of "
                    f"{results[0].name}, stated are {result.stated}"
                )
    return found
