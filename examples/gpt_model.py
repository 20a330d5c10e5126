# SPDX-License-Identifier: Apache-2.0
"""A small byte-level GPT that is told how to make its linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the name torch's own documentation uses
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    LinearFactory = Callable[[int, int], nn.Linear]

VOCABULARY = 256
"""One token a byte."""

HEAD_WIDTH = 32
"""Channels of one attention head; the model's width is a multiple of it."""


class Bf16Linear(nn.Linear):
    """The baseline: ``nn.Linear`` with a product in the input's dtype, as autocast makes it.

    Its float32 parameters are the same master weights that the quantized layers round.
    """

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name
        """Return the layer's output for ``input``, ``[..., K]``."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class Block(nn.Module):
    """Causal attention and an MLP on a float32 residual stream; the linears see bfloat16."""

    def __init__(self, width: int, linear: LinearFactory) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    # a region of its own is compiled once for all blocks, which otherwise takes minutes
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream ``[batch, context, width]`` after this block."""
        qkv = self.qkv(self.norm1(x).bfloat16())
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x).bfloat16())))
        return out


class GPT(nn.Module):
    """Embeddings, blocks and head; only the linears of the blocks come from the factory.

    Embedding and head stay in high precision in every format, as is usual.
    """

    def __init__(self, *, layers: int, width: int, context: int, linear: LinearFactory) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, linear) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = Bf16Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, in nats a byte, of predicting ``targets`` from ``tokens``."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).bfloat16())
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def factory_linears(self) -> list[nn.Linear]:
        """Return the layers that the factory made."""
        return [m for block in self.blocks for m in block.modules() if isinstance(m, nn.Linear)]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw all weights; equal seeds give equal weights in every format."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0.0, self._deviation(name, parameter), generator=generator)

    def _deviation(self, name: str, parameter: Tensor) -> float:
        if name.startswith(("tokens.", "positions.")):
            return 0.3  # a few hundred steps are too few to grow GPT-2's 0.02 into a signal
        if name.startswith("head."):
            return 0.02  # all bytes start almost equally likely
        # what adds to the residual stream starts smaller, or its variance grows with depth
        adds = name.endswith(("out.weight", "down.weight"))
        depth = (2 * len(self.blocks)) ** -0.5 if adds else 1.0
        return float(depth * parameter.shape[1] ** -0.5)
