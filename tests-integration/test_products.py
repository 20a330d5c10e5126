# SPDX-License-Identifier: Apache-2.0
"""te-linear with formats that scaled_mm takes, on CPU for real, on GPUs as far as torch says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import te_proto
from te_linear import Linear, execute, product
from te_proto import Recipe
from te_proto.testing import count_compiles, new_quantizer_in_graph, scaled_mm_on_cpu

if TYPE_CHECKING:
    from te_proto.gemm import GemmOperand

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
    dtype = layer.weight.dtype
    x = torch.randn(m, K, generator=g).to(dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.randn(m, N, generator=g).to(dtype))
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


GPUS = {
    "fp8_current": {(8, 9), (9, 0), (10, 0)},
    "fp8_block": {(9, 0)},
    "mxfp8": {(10, 0)},
    "nvfp4": {(10, 0)},
}


@dataclasses.dataclass
class Properties:
    major: int
    minor: int


def on_cuda(mode: FakeTensorMode, operand: GemmOperand) -> GemmOperand:
    """Return fake tensors of the same memory layout."""
    with mode:
        fields = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for n, t in operand._asdict().items()
            if isinstance(t, Tensor)
        }
    return operand._replace(**fields)


@pytest.mark.parametrize("name", GPUS)
def test_gpus_multiply_all_three_products_of_a_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[GemmOperand, GemmOperand]] = []
    real = execute.matmul

    def record(a: Any, b: Any, *, a_columnwise: bool, b_columnwise: bool) -> Tensor:
        pairs.append(
            (a.gemm_operand(columnwise=a_columnwise), b.gemm_operand(columnwise=b_columnwise))
        )
        return real(a, b, a_columnwise=a_columnwise, b_columnwise=b_columnwise)

    monkeypatch.setattr(execute, "matmul", record)
    step(Linear(K, N, recipe=name, dtype=torch.bfloat16), 384)
    assert len(pairs) == 3
    monkeypatch.setattr(product, "_CUDA", (13, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake = FakeTensorMode()
    for gpu in ((8, 6), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, gpu=gpu: Properties(*gpu)
        )
        taken = [product._takes(*(on_cuda(fake, o) for o in pair)) for pair in pairs]
        assert taken == [gpu in GPUS[name]] * 3, gpu
    for pair in pairs:
        ordered = [on_cuda(fake, product._ordered(operand)) for operand in pair]
        ordered = [o._replace(data=like_contiguous(fake, o.data)) for o in ordered]
        with fake:
            assert product._scaled(*ordered).dtype == torch.float32


def like_contiguous(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """Return what ``x.contiguous()`` is; a torch without CUDA cannot copy a fake CUDA tensor."""
    with mode:
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")
