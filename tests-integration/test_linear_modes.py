# SPDX-License-Identifier: Apache-2.0
"""The opaque layer with every format: the bytes of the traced one, and one graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import te_proto
from te_linear import Linear
from te_proto.testing import assert_same_bits, count_compiles, new_quantizer_in_graph

FORMATS = te_proto.available_formats()
ROWS = (160, 256, 320, 192)  # above 128: below, a scale buffer may have one row, a constant
K, N = 128, 256


def layers(name: str, **options: object) -> tuple[Linear, Linear]:
    made = []
    for mode in ("traced", "opaque"):
        torch.manual_seed(0)
        made.append(Linear(K, N, recipe=name, mode=mode, dtype=torch.bfloat16, **options))
    return made[0], made[1]


def step(run: torch.nn.Module, layer: Linear, m: int) -> list[Tensor]:
    layer.zero_grad()
    g = torch.Generator().manual_seed(m)
    x = torch.randn(m, K, generator=g).bfloat16().requires_grad_()
    torch.manual_seed(m)  # what rounds stochastically draws alike
    y = run(x)
    y.backward(torch.randn(m, N, generator=g).bfloat16())
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return [y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


@new_quantizer_in_graph
@pytest.mark.parametrize("name", FORMATS)
def test_opaque_is_traced_bit_for_bit_and_one_graph(name: str) -> None:
    traced, opaque = layers(name)
    with count_compiles() as counted:
        run = torch.compile(opaque, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in ROWS:
            expected = step(traced, traced, m)
            for callee in (opaque, run):
                for a, b in zip(step(callee, opaque, m), expected, strict=True):
                    assert_same_bits(a, b)
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_cached_weight_gives_the_bytes_of_a_fresh_one(name: str) -> None:
    for fresh, cached in zip(layers(name), layers(name, cache_weight=True), strict=True):
        expected = step(fresh, fresh, 160)
        for a, b in zip(step(cached, cached, 160), expected, strict=True):
            assert_same_bits(a, b)
        with torch.no_grad():
            cached.weight.zero_()
        found = step(lambda x, of=cached: of(x, refresh_weight=False), cached, 160)  # type: ignore[arg-type]
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", FORMATS)
def test_original_input_gives_the_gradients_of_the_kept_plane(name: str) -> None:
    plain, original = layers(name)[0], layers(name, save_original_input=True)[0]
    for a, b in zip(step(original, original, 160), step(plain, plain, 160), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", FORMATS)
def test_primary_quantized_weight_trains_like_its_values(name: str) -> None:
    recipe = te_proto.get_recipe(name)
    for layer in layers(name):
        master = layer.weight.detach().float()
        weight = torch.nn.Parameter(recipe.weight.quantize(master.bfloat16()))
        layer.weight = weight
        before = weight.dequantize().detach().clone()
        _, _, grad, _ = step(layer, layer, 160)
        with torch.no_grad():
            weight.quantize_((master - 0.1 * grad.float()).bfloat16())
        step(layer, layer, 160)
        assert layer.weight is weight
        assert not torch.equal(weight.dequantize(), before)
        expected = recipe.weight.quantize((master - 0.1 * grad.float()).bfloat16())
        assert_same_bits(weight.dequantize().detach(), expected.dequantize())
