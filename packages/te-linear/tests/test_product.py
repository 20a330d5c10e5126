# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from linear_toy import RECIPE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType

from te_linear import LinearConfig, linear, product
from te_linear.product import matmul
from te_proto.gemm import GemmOperand
from te_proto.testing import (
    assert_same_bits,
    count_compiles,
    new_quantizer_in_graph,
    scaled_mm_on_cpu,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(32, 48, 64), (5, 16, 32), (33, 24, 40), (1, 3, 7), (0, 16, 32), (8, 16, 0), (8, 0, 16)]


@dataclass
class Operand:
    """Codes ``[..., K]`` under one scale; ``plain`` has no operand for scaled_mm."""

    codes: Tensor
    scale: Tensor
    plain: bool = False
    scaling: ScalingType = ScalingType.TensorWise

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        matrix = self.codes.reshape(-1, self.codes.shape[-1]) if self.codes.numel() else self.codes
        if self.plain:
            return None
        return GemmOperand(matrix.t() if columnwise else matrix, self.scale, self.scaling)

    def with_usage(self, **usage: bool) -> Operand:
        assert list(usage.values()) == [False]  # the other plane is dropped
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.float() * self.scale).to(dtype)


def operand(rows: int, columns: int, dtype: torch.dtype = E4M3, **fields: Any) -> Operand:
    g = torch.Generator().manual_seed(rows + 1000 * columns)
    codes = torch.randn(rows, columns, generator=g).to(dtype)
    return Operand(codes, torch.rand(1, generator=g) + 0.5, **fields)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Return a list of the matrices that every later scaled_mm was given."""
    seen: list[tuple[Tensor, Tensor]] = []
    real = product.scaled_mm

    def record(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((a, b))
        return real(a, b, *args, **kwargs)

    monkeypatch.setattr(product, "scaled_mm", record)
    return seen


@scaled_mm_on_cpu
def test_this_torch_has_the_product_on_cpu() -> None:
    assert product._ON_CPU


@scaled_mm_on_cpu
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product((E4M3, E5M2), repeat=2)))
@pytest.mark.parametrize("columnwise", list(itertools.product((False, True), repeat=2)), ids=str)
def test_both_ways_give_the_product(
    m: int,
    n: int,
    k: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    columnwise: tuple[bool, bool],
    calls: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = operand(*((k, m) if columnwise[0] else (m, k)), a_dtype)
    b = operand(*((k, n) if columnwise[1] else (n, k)), b_dtype)
    left, right = ((o.codes.double() * o.scale.double()) for o in (a, b))
    exact = (left.t() if columnwise[0] else left) @ (right if columnwise[1] else right.t())
    usage = {"a_columnwise": columnwise[0], "b_columnwise": columnwise[1]}
    scaled = matmul(a, b, **usage)
    assert len(calls) == 1
    assert [t.is_contiguous() for t in (calls[0][0], calls[0][1].t())] == [True, True]
    monkeypatch.setattr(product, "_ON_CPU", False)
    values = matmul(a, b, **usage)
    assert len(calls) == 1
    for found in (scaled, values):
        assert (found.dtype, tuple(found.shape)) == (torch.float32, (m, n))
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("plain", [(True, False), (False, True), (True, True)], ids=str)
def test_one_operand_without_the_form_is_enough_to_dequantize(
    plain: tuple[bool, bool], calls: list[tuple[Tensor, Tensor]]
) -> None:
    a, b = operand(32, 64, plain=plain[0]), operand(16, 64, plain=plain[1])
    expected = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    assert_same_bits(matmul(a, b, a_columnwise=False, b_columnwise=False), expected)
    assert calls == []


@pytest.mark.parametrize("side", [0, 1])
def test_scaling_that_no_device_is_known_to_take_is_dequantized(
    side: int, calls: list[tuple[Tensor, Tensor]]
) -> None:
    pair = [operand(32, 64), operand(16, 64)]
    pair[side].scaling = ScalingType.RowWise
    expected = pair[0].dequantize(torch.float32) @ pair[1].dequantize(torch.float32).t()
    assert_same_bits(matmul(*pair, a_columnwise=False, b_columnwise=False), expected)
    assert calls == []


def test_one_summed_element_is_no_scaled_product(calls: list[tuple[Tensor, Tensor]]) -> None:
    a, b = operand(32, 1), operand(16, 1)
    expected = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    assert_same_bits(matmul(a, b, a_columnwise=False, b_columnwise=False), expected)
    assert calls == []


def test_leading_axes_are_rows() -> None:
    a, b = operand(6, 16), operand(8, 16)
    whole = matmul(a, b, a_columnwise=False, b_columnwise=False)
    for plain in (False, True):
        folded = Operand(a.codes.view(2, 3, 16), a.scale, plain)
        found = matmul(folded, b, a_columnwise=False, b_columnwise=False)
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "n", "k", "a_dtype", "b_dtype", "taken"),
    [
        pytest.param(32, 48, 64, E4M3, E4M3, True, id="whole"),
        pytest.param(5, 48, 64, E4M3, E5M2, True, id="any-rows"),
        pytest.param(32, 48, 64, E5M2, E4M3, True, id="gradient-first"),
        pytest.param(32, 48, 40, E4M3, E4M3, False, id="summed-axis"),
        pytest.param(32, 24, 64, E4M3, E4M3, False, id="columns"),
        pytest.param(32, 48, 64, E5M2, E5M2, False, id="e5m2-twice"),
        pytest.param(0, 48, 64, E4M3, E4M3, False, id="no-rows"),
        pytest.param(32, 0, 64, E4M3, E4M3, False, id="no-columns"),
        pytest.param(32, 48, 0, E4M3, E4M3, False, id="nothing-summed"),
    ],
)
def test_cuda_multiplies_what_its_gemm_takes(
    m: int,
    n: int,
    k: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    taken: bool,
    calls: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        a, b = (
            Operand(torch.empty(s, k, dtype=d, device="cuda"), torch.empty(1, device="cuda"))
            for s, d in ((m, a_dtype), (n, b_dtype))
        )
        for able in (False, True):
            monkeypatch.setattr(product, "_has_gemm", lambda pair, device, able=able: able)
            found = matmul(a, b, a_columnwise=False, b_columnwise=False)
            assert (found.shape, found.dtype, found.device.type) == ((m, n), torch.float32, "cuda")
            assert len(calls) == (taken and able)


def test_other_devices_dequantize(calls: list[tuple[Tensor, Tensor]]) -> None:
    a, b = (
        Operand(torch.empty(16, 16, dtype=E4M3, device="meta"), torch.empty(1, device="meta")),
    ) * 2
    assert matmul(a, b, a_columnwise=False, b_columnwise=False).shape == (16, 16)
    assert calls == []


@pytest.mark.parametrize(
    ("pair", "able"),
    [
        ("TensorWise TensorWise", {(8, 9), (9, 0), (10, 0), (12, 0)}),
        ("BlockWise1x128 BlockWise1x128", {(9, 0)}),
        ("BlockWise1x128 BlockWise128x128", {(9, 0)}),
        ("BlockWise128x128 BlockWise1x128", {(9, 0)}),
        ("BlockWise128x128 BlockWise128x128", set()),
        ("BlockWise1x32 BlockWise1x32", {(10, 0), (12, 0)}),
        ("BlockWise1x16 BlockWise1x16", {(10, 0), (12, 0)}),
        ("BlockWise1x16 BlockWise1x32", set()),
        ("RowWise RowWise", set()),
    ],
)
def test_gemm_is_there_from_a_compute_capability_and_cuda_on(
    pair: str, able: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Properties:
        major: int
        minor: int

    def found(
        capability: tuple[int, int] | None, cuda: tuple[int, int] = (13, 0), hip: str | None = None
    ) -> bool:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(product, "_CUDA", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: Properties(*(capability or (0, 0)))
        )
        first, second = (getattr(ScalingType, name) for name in pair.split())
        return product._has_gemm((first, second), torch.device("cuda", 0))

    capabilities = [(8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert {c for c in capabilities if found(c)} == able
    assert not found(None)
    for capability in able:
        assert not found(capability, hip="6.2")
        assert found(capability, (12, 6)) == (pair == "TensorWise TensorWise")


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(32, 48, 64), (5, 16, 32), (33, 24, 40)])
def test_cuda_gives_the_product(m: int, n: int, k: int) -> None:
    a, b = operand(m, k), operand(n, k, E5M2)
    on_cuda = [Operand(o.codes.cuda(), o.scale.cuda()) for o in (a, b)]
    found = matmul(*on_cuda, a_columnwise=False, b_columnwise=False).cpu()
    expected = matmul(a, b, a_columnwise=False, b_columnwise=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@new_quantizer_in_graph
def test_a_quantized_weight_is_an_input_of_one_graph() -> None:
    config = LinearConfig.from_recipe(RECIPE)
    weight = torch.nn.Parameter(config.weight.quantize(torch.randn(24, 64)))
    with count_compiles() as counted:
        compiled = torch.compile(
            lambda x, w: linear(x, w, config=config),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        for m in (32, 64, 96, 160):
            x = torch.randn(m, 64, requires_grad=True)
            weight.grad = None
            y = compiled(x, weight)
            y.sum().backward()
            expected = linear(x, weight, config=config)
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)
            assert weight.grad is not None
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
