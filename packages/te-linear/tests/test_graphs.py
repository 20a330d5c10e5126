# SPDX-License-Identifier: Apache-2.0
"""Options of the layer in compiled graphs: one graph for every row count, and the eager bytes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from linear_toy import RECIPE, ToyQuantizer
from torch import Tensor

from te_linear import Linear, LinearConfig, linear
from te_proto.testing import assert_same_bits, count_compiles, new_quantizer_in_graph

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = LinearConfig.from_recipe(RECIPE)
QUANTIZED = dataclasses.replace(CONFIG, output=ToyQuantizer(bits=5))
ORIGINAL = dataclasses.replace(CONFIG, save_original_input=True)
ROWS = (32, 80, 96, 160)  # none is K, which a size of the graph could be taken for
K, N = 64, 48


def weights() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(N, K, generator=g), torch.randn(N, generator=g)]
    return [t.requires_grad_() for t in made]


def quantized_weight(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()
    q = torch.nn.Parameter(CONFIG.weight.quantize(w.detach()))
    return lambda x: linear(x, q, b, config=CONFIG, mode=mode), [q, b]


def quantized_input(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()
    return lambda x: linear(CONFIG.input.quantize(x), w, b, config=CONFIG, mode=mode), [w, b]


def quantized_output(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()
    # read in the graph: autograd would want a quantized gradient of one that leaves it
    return lambda x: linear(x, w, b, config=QUANTIZED, mode=mode).dequantize(), [w, b]


def original_input(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()
    return lambda x: linear(x, w, b, config=ORIGINAL, mode=mode), [w, b]


def autocast(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(x, w, b, config=CONFIG, mode=mode)

    return run, [w, b]


def written_weight(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()
    q = torch.nn.Parameter(CONFIG.weight.quantize(torch.zeros(N, K)))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():  # as the step of an optimizer in the graph of the next forward
            q.copy_(w * x.detach().amax())
        return linear(x, q, b, config=CONFIG, mode=mode)

    return run, [q, b]


def frozen_weight(mode: str) -> tuple[Callable[[Tensor], Any], list[Tensor]]:
    w, b = weights()
    w.requires_grad_(False)
    return lambda x: linear(x, w, b, config=CONFIG, mode=mode), [b]


OPTIONS = [
    quantized_weight,
    quantized_input,
    quantized_output,
    original_input,
    autocast,
    written_weight,
    frozen_weight,
]


@new_quantizer_in_graph
@pytest.mark.parametrize("mode", ["traced", "opaque"])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda f: f.__name__)
def test_option_is_one_graph_with_the_bytes_of_eager_code(option: Any, mode: str) -> None:
    fn, parameters = option(mode)

    def step(run: Callable[[Tensor], Any], m: int) -> list[Tensor | None]:
        for p in parameters:
            p.grad = None
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in parameters)]

    with count_compiles() as counted:
        compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in ROWS:
            for a, b in zip(step(compiled, m), step(fn, m), strict=True):
                assert a is not None
                assert b is not None
                assert_same_bits(a, b)
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


@new_quantizer_in_graph
@pytest.mark.parametrize("mode", ["traced", "opaque"])
def test_layers_one_after_the_other_are_one_graph(mode: str) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(Linear(K, K, recipe=RECIPE, mode=mode) for _ in range(2)))

    def step(run: Callable[[Tensor], Any], m: int) -> list[Tensor | None]:
        layers.zero_grad()
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).requires_grad_()
        y = run(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layers.parameters())]

    with count_compiles() as counted:
        compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in ROWS:
            for a, b in zip(step(compiled, m), step(layers, m), strict=True):
                assert a is not None
                assert b is not None
                assert_same_bits(a, b)
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


@pytest.mark.parametrize("cache_weight", [False, True], ids=["fresh", "cached"])
@pytest.mark.parametrize("mode", ["traced", "opaque"])
def test_where_graphs_may_break_every_torch_compiles_a_model(mode: str, cache_weight: bool) -> None:
    # torch 2.11 has no graph of the layer, and compiles around it
    layer = Linear(K, N, recipe=RECIPE, mode=mode, cache_weight=cache_weight)
    model = torch.nn.Sequential(torch.nn.ReLU(), layer, torch.nn.ReLU())
    x = torch.randn(32, K, generator=torch.Generator().manual_seed(1))
    with count_compiles():
        found = torch.compile(model, backend="aot_eager")(x)
    found.sum().backward()
    grad, layer.weight.grad = layer.weight.grad, None
    expected = model(x)
    expected.sum().backward()
    assert_same_bits(found.detach(), expected.detach())
    assert_same_bits(grad, layer.weight.grad)
