# SPDX-License-Identifier: Apache-2.0
"""Timing on a machine that others use: interleaved rounds, each guarded by copies."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Action = Callable[[], object]

HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""Tells glibc to keep freed memory. Otherwise each large result is fresh memory, and faulting its
pages in takes longer than what is to be measured."""

_COPY = ""


def keep_heap() -> None:
    """Start this program anew with :data:`HEAP` in its environment, if it is not there."""
    if sys.platform == "linux" and any(os.environ.get(k) != v for k, v in HEAP.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **HEAP})


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to look.

    Attributes:
        rounds: undisturbed rounds that a median is taken of.
        attempts: rounds at most, as a multiple of ``rounds``.
        sample: seconds; a call that is shorter is repeated until this has passed.
        busy: a copy or a call that takes this many times the quickest one shows a busy machine.
        look: seconds to look for the quickest copy.
        pause: seconds to wait after a disturbed round.
        patience: seconds after which no rounds are made but the first ``rounds``.
    """

    rounds: int = 9
    attempts: int = 4
    sample: float = 0.01
    busy: float = 1.6
    look: float = 0.5
    pause: float = 0.2
    patience: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians of the rounds that count.

    Attributes:
        seconds: action -> one call.
        copy: seconds of one copy in the same rounds.
        rounds: that count.
        discarded: that do not.
        disturbed: too few rounds were undisturbed, so the least disturbed count.
    """

    seconds: dict[str, float]
    copy: float
    rounds: int
    discarded: int
    disturbed: bool


@dataclass(frozen=True)
class _Round:
    seconds: dict[str, float]
    copies: list[float]

    def quickest(self, name: str) -> float:
        return min(self.copies) if name == _COPY else self.seconds[name]

    def slowness(self, best: Mapping[str, float]) -> float:
        """Return how many times its best the slowest copy or action of this round took."""
        actions = (seconds / best[name] for name, seconds in self.seconds.items())
        return max(max(self.copies) / best[_COPY], *actions)


class Stopwatch:
    """Times actions in rounds; remembers how quick a copy of a size can be on this machine."""

    def __init__(
        self,
        effort: Effort,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._effort = effort
        self._clock = clock
        self._sleep = sleep
        self._quickest: dict[int, float] = {}

    def time(self, actions: Mapping[str, Action], copy: Action, nbytes: int) -> Timing:
        """Time ``actions`` in turn, with a copy before each and after the last.

        A round counts if none of its copies was slow, and no action either: who shares a core
        slows arithmetic down and a copy hardly. The order rotates, so that what an action leaves in
        the caches serves each of the others.

        Args:
            actions: what to call; a result is freed before the next call.
            copy: what shows how busy the machine is.
            nbytes: of the copy; quickest copies are remembered by it.
        """
        effort = self._effort
        loops: dict[str, int] = {}
        best: dict[str, float] = {}  # the quickest call of each action, and a copy
        for name, action in actions.items():
            loops[name], best[name] = self._calibrate(action, 10 * effort.sample, 20)
        copies, quickest = self._calibrate(copy, effort.look, 200)
        best[_COPY] = min(quickest, self._quickest.get(nbytes, quickest))
        rounds: list[_Round] = []
        names = list(actions)
        started = self._clock()
        gc.collect()
        gc.disable()  # a collection would be charged to whoever happens to trigger it
        try:
            while True:
                turn = len(rounds) % len(names)
                order = names[turn:] + names[:turn]
                done = _Round({}, [self._sample(copy, copies)])
                for name in order:
                    done.seconds[name] = self._sample(actions[name], loops[name])
                    done.copies.append(self._sample(copy, copies))
                rounds.append(done)
                best = {name: min(seconds, done.quickest(name)) for name, seconds in best.items()}
                self._quickest[nbytes] = best[_COPY]
                quiet = [r for r in rounds if r.slowness(best) <= effort.busy]
                if len(quiet) >= effort.rounds or self._gives_up(len(rounds), started):
                    return self._summary(rounds, quiet, best)
                if done.slowness(best) > effort.busy:
                    self._sleep(effort.pause)
        finally:
            gc.enable()

    def _gives_up(self, rounds: int, started: float) -> bool:
        effort = self._effort
        late = self._clock() - started > effort.patience
        return rounds >= effort.rounds * (1 if late else effort.attempts)

    def _summary(
        self, rounds: list[_Round], quiet: list[_Round], best: Mapping[str, float]
    ) -> Timing:
        disturbed = len(quiet) < self._effort.rounds
        used = quiet
        if disturbed:
            used = sorted(rounds, key=lambda r: r.slowness(best))[: self._effort.rounds]
        return Timing(
            seconds={n: statistics.median(r.seconds[n] for r in used) for n in used[0].seconds},
            copy=statistics.median(c for r in used for c in r.copies),
            rounds=len(used),
            discarded=len(rounds) - len(used),
            disturbed=disturbed,
        )

    def _calibrate(self, action: Action, seconds: float, most: int) -> tuple[int, float]:
        """Return how many calls make a sample, and the quickest call of those tried.

        A call that meets a busy machine may take a hundred times as long as it should; so ``most``
        are tried, or as many as ``seconds`` allow. The first call only warms up.
        """
        action()
        calls = [self._sample(action, 1) for _ in range(2)]
        while sum(calls) < seconds and len(calls) < most:
            calls.append(self._sample(action, 1))
        return max(1, round(self._effort.sample / max(min(calls), 1e-9))), min(calls)

    def _sample(self, action: Action, loops: int) -> float:
        start = self._clock()
        for _ in range(loops):
            action()  # the result is dropped at once, as its memory is wanted again
        return (self._clock() - start) / loops
