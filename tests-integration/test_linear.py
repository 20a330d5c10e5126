# SPDX-License-Identifier: Apache-2.0
"""te-linear with every installed format: values, memory, compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import te_proto
from te_linear import Linear
from te_linear.rng import draw_rng
from te_proto import to_tensor_proto
from te_proto.errors import DtypeError
from te_proto.testing import assert_same_bits, count_compiles, new_quantizer_in_graph

FORMATS = te_proto.available_formats()
ROWS = (160, 256, 320, 192)
FEWER = (64, 32, 96, 128)  # one block of 128: a size of 1 is a constant of the graph
K, N = 128, 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BFLOAT16_ALONE = {"nvfp4"}  # its recipe transforms input and gradient, which takes no other
CASES = [
    pytest.param(name, dtype, id=f"{name}-{key}")
    for name in FORMATS
    for key, dtype in DTYPES.items()
    if key == "bfloat16" or name not in BFLOAT16_ALONE
]


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    return Linear(K, N, recipe=name, dtype=dtype)


def batch(m: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(dtype)


def step(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_match_float64_on_the_same_quantized_values(
    name: str, dtype: torch.dtype
) -> None:
    layer, x = make(name, dtype), batch(64, dtype)
    grad = torch.randn(64, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.manual_seed(2)
    y, grad_x, grad_w, grad_b = step(layer, x, grad)
    torch.manual_seed(2)
    rng = draw_rng(x)  # what the layer drew for its gradient, if that rounds stochastically

    def plane(value: Tensor, role: str, *, rowwise: bool) -> Tensor:
        quantizer = getattr(layer.recipe, role).with_usage(rowwise=rowwise, columnwise=not rowwise)
        call = {"rng": rng} if "rng" in quantizer.call_arguments() else {}
        return quantizer.quantize(value.detach(), **call).dequantize(torch.float32).double()

    w, b = layer.weight, layer.bias.detach().double()
    expected = [
        plane(x, "input", rowwise=True) @ plane(w, "weight", rowwise=True).t() + b,
        plane(grad, "grad_output", rowwise=True) @ plane(w, "weight", rowwise=False),
        plane(grad, "grad_output", rowwise=False).t() @ plane(x, "input", rowwise=False),
        grad.double().sum(0),
    ]
    # float32 sums of up to 256 products, then one rounding to dtype
    bound = {"rtol": 2.0 * torch.finfo(dtype).eps, "atol": 1e-4}
    for found, value in zip((y, grad_x, grad_w, grad_b), expected, strict=True):
        torch.testing.assert_close(found.double(), value, **bound)
    # and the quantized layer is one: its output is near that of the plain layer, and not equal
    plain = x.double() @ w.detach().double().t() + b
    error = (y.double() - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.2


@pytest.mark.parametrize("name", sorted(BFLOAT16_ALONE.intersection(FORMATS)))
def test_dtype_that_a_recipe_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(DtypeError, match=f"^{name}: x must be bfloat16 for .*, got float32"):
        make(name, torch.float32)(batch(64, torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_saved_bytes_are_those_of_the_prototypes(name: str) -> None:
    layer, x = make(name), batch(64).requires_grad_()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        layer(x)
    described = [spec for proto in layer.plan(x).saved for spec in proto.inner_specs().values()]
    assert [(tuple(t.shape), t.dtype) for t in packed] == [tuple(spec) for spec in described]


@new_quantizer_in_graph
@pytest.mark.parametrize("name", FORMATS)
def test_linear_is_one_graph_for_every_row_count(name: str) -> None:
    layer = make(name)
    grads = {m: torch.randn(m, N, generator=torch.Generator().manual_seed(m)) for m in ROWS}

    def seeded(callee: torch.nn.Module, m: int) -> list[Tensor]:
        torch.manual_seed(m)  # a compiled graph draws what eager code draws
        return step(callee, batch(m), grads[m].bfloat16())

    eager = {m: seeded(layer, m) for m in ROWS}
    with count_compiles() as counted:
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for m in ROWS:
            for found, expected in zip(seeded(compiled, m), eager[m], strict=True):
                # sums in another order, and one rounding to bfloat16
                torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-3)
        for m in (288, 512, 160, 224):
            step(compiled, batch(m), torch.ones(m, N, dtype=torch.bfloat16))
        assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
        step(compiled, batch(FEWER[0]), torch.ones(FEWER[0], N, dtype=torch.bfloat16))
        assert counted.recompiles <= 1
        seen = counted.recompiles
        for m in FEWER:
            step(compiled, batch(m), torch.ones(m, N, dtype=torch.bfloat16))
    assert (counted.breaks, counted.recompiles) == (0, seen)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_tensors_cross_the_edges_of_a_graph(name: str) -> None:
    quantizer = te_proto.get_recipe(name).weight

    def make_one(x: Tensor) -> Tensor:
        return quantizer.quantize(x)

    def read_one(q: Tensor) -> Tensor:
        return q.dequantize()

    for fn, most in ((make_one, 1), (read_one, 2)):
        with count_compiles() as counted:
            compiled = torch.compile(fn, fullgraph=True, dynamic=True)
            for m in (*ROWS, 288, 512, 160, 224):
                argument = batch(m) if fn is make_one else quantizer.quantize(batch(m))
                found, expected = compiled(argument), fn(argument)
                assert to_tensor_proto(found) == to_tensor_proto(expected)
                if fn is make_one:
                    found, expected = found.dequantize(), expected.dequantize()
                assert_same_bits(found, expected)
        assert counted.breaks == 0
        assert counted.graphs <= most
