# SPDX-License-Identifier: Apache-2.0
"""How often torch.compile compiled: graphs, breaks, recompilations, cache hits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class CompileCounts:
    """Counts since a :func:`count_compiles` block was entered; they stop when it is left.

    Attributes:
        recompiles: compilations of a frame that had been compiled before, because a guard failed.
    """

    def __init__(self, counters: Mapping[str, Mapping[str, int]]) -> None:
        self._counters = counters
        self.recompiles = 0

    @property
    def graphs(self) -> int:
        """Graphs given to a backend, recompiled ones included."""
        return self._get("stats", "unique_graphs")

    @property
    def breaks(self) -> int:
        """Graph breaks."""
        return sum(self.reasons.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Why the graph broke, and how often."""
        return dict(self._counters.get("graph_break", {}))

    @property
    def fx_hits(self) -> int:
        """Graphs that Inductor took from its cache."""
        return self._get("inductor", "fxgraph_cache_hit")

    @property
    def fx_misses(self) -> int:
        """Graphs that Inductor looked up, did not find and compiled."""
        return self._get("inductor", "fxgraph_cache_miss")

    @property
    def fx_bypasses(self) -> int:
        """Graphs that Inductor could not look up, because they cannot be cached."""
        return self._get("inductor", "fxgraph_cache_bypass")

    @property
    def aot_hits(self) -> int:
        """Graphs that AOTAutograd took from its cache, backward included."""
        return self._get("aot_autograd", "autograd_cache_hit")

    @property
    def aot_misses(self) -> int:
        """Graphs that AOTAutograd looked up and did not find."""
        return self._get("aot_autograd", "autograd_cache_miss")

    @property
    def aot_bypasses(self) -> int:
        """Graphs that AOTAutograd could not look up, because they cannot be cached."""
        return self._get("aot_autograd", "autograd_cache_bypass")

    def _get(self, group: str, name: str) -> int:
        return self._counters.get(group, {}).get(name, 0)

    def __repr__(self) -> str:
        names = ("graphs", "breaks", "recompiles", "fx_hits", "fx_misses", "aot_hits", "aot_misses")
        counts = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"CompileCounts({counts}, reasons={self.reasons})"


@contextmanager
def count_compiles() -> Iterator[CompileCounts]:
    """Count what torch.compile does inside; dynamo is reset before and after.

    Write ``with count_compiles() as c: ...`` and then ``assert c.graphs == 1 and c.recompiles ==
    0``.
    """
    import torch._dynamo
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counts = CompileCounts(counters)

    def started(args: CallbackArgs) -> None:
        # "frame/compilation of that frame", with "_attempt" behind it where tracing started over
        if args.callback_trigger is not CallbackTrigger.DYNAMO:
            return
        _, _, compilation = str(args.compile_id).rpartition("/")
        counts.recompiles += compilation.partition("_")[0] != "0"

    callback_handler.register_start_callback(started)
    try:
        yield counts
    finally:
        counts._counters = {group: dict(names) for group, names in counters.items()}
        torch._dynamo.reset()
        counters.clear()
