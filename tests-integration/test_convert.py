# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model converted, compiled, trained and resumed, in every installed format."""

from __future__ import annotations

import sys

import pytest
import torch
from environments import ROOT, run
from transformers import GPT2Config, GPT2LMHeadModel

import te_proto
from te_linear import Linear, convert
from te_proto.testing import new_quantizer_in_graph

SIZES = ("--layers", "1", "--width", "64", "--context", "64", "--steps", "6")


@new_quantizer_in_graph
@pytest.mark.parametrize("name", te_proto.available_formats())
def test_llama_is_converted_compiled_trained_and_resumed(name: str) -> None:
    script = ROOT / "examples" / "convert_llama.py"
    printed = run(sys.executable, script, "--recipe", name, "--backend", "aot_eager", *SIZES)
    lines = printed.splitlines()
    assert lines[0].split() == ["model.layers.0.self_attn.q_proj", "quantized,", name]
    assert lines[9:11] == ["7 of 9 modules with a weight matrix are quantized", "82,112 parameters"]
    assert lines[-2:] == [
        "resumed from step 3: bit for bit",
        "1 graph, 0 breaks, 0 recompiles for both models",
    ]


def test_gpt2_keeps_the_layers_that_are_no_linear_and_says_so() -> None:
    config = GPT2Config(
        vocab_size=64, n_embd=64, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    tied = model.lm_head.weight
    report = convert(model, "mxfp8")
    assert report.converted == ("lm_head",)
    assert report.kept["transformer.h.0.mlp.c_fc"] == "Conv1D is no nn.Linear"
    assert isinstance(model.lm_head, Linear)
    assert model.lm_head.weight is tied is model.transformer.wte.weight
    tokens = torch.arange(64).reshape(2, 32)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert tied.grad is not None
