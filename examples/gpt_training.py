# SPDX-License-Identifier: Apache-2.0
"""Train one model per format on the same batches, compiled as one graph, and count the compiles."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpt_model import GPT
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run: ``steps`` pairs of tokens and next tokens, drawn by ``seed``.

    Attributes:
        text: training text, one token a byte.
        steps: number of batches.
        batch: sequences in a batch.
        context: bytes in a sequence.
        seed: equal seeds give equal batches.
    """

    text: bytes
    steps: int
    batch: int
    context: int
    seed: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = torch.frombuffer(bytearray(self.text), dtype=torch.uint8).long()
        windows = data.unfold(0, self.context + 1, 1)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            picked = windows[torch.randint(len(windows), (self.batch,), generator=generator)]
            yield picked[:, :-1].contiguous(), picked[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one training run gave.

    Attributes:
        losses: loss of each step, in nats a byte.
        first_step_seconds: of the first step, which compiles.
        tokens_per_second: over all steps but the first.
        graphs: graphs that dynamo handed to the backend.
        graph_breaks: times dynamo had to leave a graph.
        recompiles: times a guard failed and a frame was compiled again.
    """

    losses: list[float]
    first_step_seconds: float
    tokens_per_second: float
    graphs: int
    graph_breaks: int
    recompiles: int

    @property
    def last_loss(self) -> float:
        """Mean loss of the last 5 % of the steps; one step alone is noise."""
        tail = self.losses[-max(1, round(0.05 * len(self.losses))) :]
        return sum(tail) / len(tail)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of ``step``: up in the first 5 %, then a cosine to a tenth of ``peak``."""
    warmup = max(1, round(0.05 * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(name: str, model: GPT, batches: Batches, *, lr: float, backend: str) -> Training:
    """Train ``model`` in place, forward and backward compiled without graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    torch.manual_seed(batches.seed)  # a format may round stochastically
    counted = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counted, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    losses: list[float] = []
    started = time.perf_counter()
    first_step_seconds = tokens_per_second = 0.0
    # a log file has no line to rewrite, so each refresh there is a line to read
    interval = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(
        batches, name, batches.steps, unit="step", mininterval=interval, dynamic_ncols=True
    ) as bar:
        bar.set_postfix_str("compiling")
        for step, (tokens, targets) in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, batches.steps, lr)
            loss = compiled(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 0:
                first_step_seconds = time.perf_counter() - started
                started += first_step_seconds
            else:
                tokens_per_second = step * tokens.numel() / (time.perf_counter() - started)
            bar.set_postfix_str(
                f"loss {losses[-1]:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False
            )
    return Training(
        losses=losses,
        first_step_seconds=first_step_seconds,
        tokens_per_second=tokens_per_second,
        graphs=int(counted.frame_count),
        graph_breaks=sum(counters["graph_break"].values()),
        recompiles=sum(entry.recompile_reason is not None for entry in get_compilation_metrics()),
    )
