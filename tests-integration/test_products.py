# SPDX-License-Identifier: Apache-2.0
"""te-linear with formats that scaled_mm takes: the same layer as on dequantized values."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import te_proto
from te_linear import Linear, product
from te_proto import Recipe
from te_proto.testing import count_compiles, new_quantizer_in_graph, scaled_mm_on_cpu

K, N = 128, 256
SCALED = {"fp8_current": {"separate_transpose": (False, True), "force_pow_2_scales": (False, True)}}
RECIPES = [
    pytest.param(name, {option: value}, id=f"{name}-{option}-{value}")
    for name, options in SCALED.items()
    for option, values in options.items()
    for value in values
]


def recipe(name: str, fields: dict[str, bool]) -> Recipe:
    default = te_proto.get_recipe(name)
    roles = {r: getattr(default, r).replace(**fields) for r in ("input", "weight", "grad_output")}
    return dataclasses.replace(default, **roles)


def step(layer: torch.nn.Module, m: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(m)
    layer.zero_grad()
    x = torch.randn(m, K, generator=g, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn(m, N, generator=g))
    return [y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        # sums of up to 256 products: one way scales the sum, the other each factor
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list of the sizes of every later scaled product."""
    seen: list[tuple[int, ...]] = []
    real = product.scaled_mm

    def record(a: Tensor, b: Tensor, *args: object, **kwargs: object) -> Tensor:
        seen.append((*a.shape, b.shape[1]))
        return real(a, b, *args, **kwargs)

    monkeypatch.setattr(product, "scaled_mm", record)
    return seen


@scaled_mm_on_cpu
@pytest.mark.parametrize(("name", "fields"), RECIPES)
@pytest.mark.parametrize("m", [64, 33, 1, 0])
def test_scaled_products_give_the_layer_of_dequantized_values(
    name: str,
    fields: dict[str, bool],
    m: int,
    calls: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer = Linear(K, N, recipe=recipe(name, fields))
    scaled = step(layer, m)
    # forward, gradient of the input and of the weight, which one row makes an outer product
    expected = [(m, K, N), (m, N, K), (N, m, K)]
    assert calls == (expected[:2] if m == 1 else expected)
    calls.clear()
    monkeypatch.setattr(product, "_ON_CPU", False)
    close(scaled, step(layer, m))
    assert calls == []


@new_quantizer_in_graph
@pytest.mark.parametrize("on_cpu", [True, False], ids=["scaled", "dequantized"])
@pytest.mark.parametrize("separate", [False, True], ids=["one-buffer", "separate"])
def test_either_way_is_one_graph_for_every_row_count(
    on_cpu: bool, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "_ON_CPU", on_cpu)
    torch.manual_seed(0)
    layer = Linear(K, N, recipe=recipe("fp8_current", {"separate_transpose": separate}))
    with count_compiles() as counted:
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for m in (32, 64, 96, 160, 33):
            close(step(compiled, m), step(layer, m))
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


@new_quantizer_in_graph
@pytest.mark.parametrize("m", [1, 0])
def test_one_row_and_none_compile(m: int) -> None:
    torch.manual_seed(0)
    layer = Linear(K, N, recipe="fp8_current")
    with count_compiles() as counted:
        close(step(torch.compile(layer, fullgraph=True), m), step(layer, m))
    assert counted.breaks == 0
