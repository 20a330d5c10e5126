# SPDX-License-Identifier: Apache-2.0
"""Convert a Hugging Face Llama, compile it, train it, and resume it from a checkpoint.

    pip install te-proto te-linear te-mxfp8 transformers
    python examples/convert_llama.py --recipe mxfp8

The model is made from a config, so nothing is downloaded; it learns the bytes of Python's own help
topics. Half of the steps are run again from a checkpoint, and must give the same weights bit for
bit. Exit status: 0; 1 if they do not, or if the graph broke or was compiled again.
"""

from __future__ import annotations

import argparse
import io
import pydoc_data.topics
import sys
import time
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import te_linear
import te_proto
from te_proto.testing import count_compiles

TEXT = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))


def make(args: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return model, optimizer and what :func:`te_linear.convert` says."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        num_key_value_heads=args.width // 64,
        max_position_embeddings=args.context,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    report = te_linear.convert(
        model, args.recipe, filter=lambda name, _: name != "lm_head", mode=args.mode
    )
    return model, torch.optim.AdamW(model.parameters(), args.lr), report


def batch(args: argparse.Namespace, step: int) -> Tensor:
    """Return the tokens ``[batch, context]`` of a step."""
    g = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - args.context, (args.batch,), generator=g)
    return torch.stack([TEXT[i : i + args.context] for i in starts.tolist()])


def train(
    args: argparse.Namespace,
    model: Any,
    compiled: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
) -> list[float]:
    """Return the loss of each step."""
    losses = []
    for step in steps:
        torch.manual_seed(step)  # stochastic rounding draws from torch's generator
        tokens = batch(args, step)
        loss = compiled(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Run, print a report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8", choices=te_proto.available_formats())
    for name, default in (("steps", 100), ("layers", 4), ("width", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("context", 128), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--backend", default="inductor")
    # the graph of a whole model: traced, Inductor takes minutes for it
    parser.add_argument("--mode", default="opaque", choices=("traced", "opaque"))
    args = parser.parse_args()
    half = args.steps // 2

    model, optimizer, report = make(args)
    print(report)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    began = time.perf_counter()
    file = io.BytesIO()
    with count_compiles() as counts:
        compiled = torch.compile(model, fullgraph=True, backend=args.backend)
        losses = train(args, model, compiled, optimizer, range(half))
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        losses += train(args, model, compiled, optimizer, range(half, args.steps))

        again, optimizer, _ = make(args)
        file.seek(0)
        of_model, of_optimizer = torch.load(file, weights_only=True)
        again.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        resumed = train(
            args,
            again,
            torch.compile(again, fullgraph=True, backend=args.backend),
            optimizer,
            range(half, args.steps),
        )
    seconds = time.perf_counter() - began
    same = resumed == losses[half:] and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps; {seconds:.0f} s in all")
    print(f"resumed from step {half}: {'bit for bit' if same else 'NOT the same'}")
    # the second model is another set of arguments to the same graph
    compiles = (counts.graphs, counts.breaks, counts.recompiles)
    print("{} graph, {} breaks, {} recompiles for both models".format(*compiles))
    return 0 if same and compiles == (1, 0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
