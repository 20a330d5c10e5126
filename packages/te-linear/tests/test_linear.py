# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import itertools
import re
from typing import TYPE_CHECKING

import pytest
import torch
from linear_toy import RECIPE, ToyQuantizer

from te_linear import Linear, LinearConfig, linear, plan_linear
from te_proto import TensorProto, to_tensor_proto
from te_proto.errors import ShapeError, UnknownFormatError
from te_proto.testing import assert_same_bits, count_compiles, new_quantizer_in_graph

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

CONFIG = LinearConfig.from_recipe(RECIPE)
FLAGS = list(itertools.product((False, True), repeat=3))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(
    shape: tuple[int, ...] = (2, 8, 16),
    n: int = 24,
    dtype: torch.dtype = torch.float32,
    flags: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = (shape, (n, shape[-1]), (n,))
    made = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    x, w, b = (t.requires_grad_(flag) for t, flag in zip(made, flags, strict=True))
    return x, w, b


def plane(x: Tensor, role: str, *, rowwise: bool) -> Tensor:
    """One plane of an operand as the float64 values that it stands for."""
    quantizer = getattr(CONFIG, role).with_usage(rowwise=rowwise, columnwise=not rowwise)
    return quantizer.quantize(x.detach()).dequantize(torch.float32).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_output_and_gradients_are_those_of_the_quantized_operands(dtype: torch.dtype) -> None:
    x, w, b = operands(dtype=dtype)
    y = linear(x, w, b, config=CONFIG)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    y.backward(grad)

    flat = grad.reshape(-1, 24)
    expected = {
        "y": plane(x, "input", rowwise=True) @ plane(w, "weight", rowwise=True).t() + b.double(),
        "x": (plane(flat, "grad_output", rowwise=True) @ plane(w, "weight", rowwise=False)).reshape(
            x.shape
        ),
        "w": plane(flat, "grad_output", rowwise=False).t()
        @ plane(x, "input", rowwise=False).reshape(-1, 16),
        "b": flat.double().sum(0),
    }
    # float32 sums of at most 24 products, then one rounding to dtype
    bound = {"rtol": 2.0 * torch.finfo(dtype).eps, "atol": 1e-5}
    for name, found in (("y", y), ("x", x.grad), ("w", w.grad), ("b", b.grad)):
        torch.testing.assert_close(found.double(), expected[name].double(), **bound)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_what_is_saved_and_returned_is_what_the_plan_says(flags: tuple[bool, bool, bool]) -> None:
    x, w, b = operands(flags=flags)
    plan = plan_linear(*map(to_tensor_proto, (x, w, b)), CONFIG, grad_enabled=True)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        y = linear(x, w, b, config=CONFIG)
    assert to_tensor_proto(y) == plan.output

    described = [spec for proto in plan.saved for spec in proto.inner_specs().values()]
    assert [(tuple(t.shape), t.dtype) for t in packed] == [tuple(spec) for spec in described]
    assert sum(t.nbytes for t in packed) == sum(proto.nbytes for proto in plan.saved)
    if not any(flags):
        return
    y.sum().backward()
    for tensor, proto in ((x, plan.grad_input), (w, plan.grad_weight), (b, plan.grad_bias)):
        assert (None if tensor.grad is None else to_tensor_proto(tensor.grad)) == proto


def test_nothing_is_saved_without_grad_mode() -> None:
    packed: list[Tensor] = []
    x, w, b = operands()
    hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t)
    with hooks, torch.no_grad():
        y = linear(x, w, b, config=CONFIG)
    assert packed == []
    assert not y.requires_grad
    with torch.inference_mode():
        assert_same_bits(linear(x, w, b, config=CONFIG), y)


def test_grad_mode_of_backward_does_not_matter() -> None:
    x, w, b = operands()
    linear(x, w, b, config=CONFIG).sum().backward()
    again = operands()
    y = linear(*again, config=CONFIG).sum()
    with torch.enable_grad():
        y.backward()
    for first, second in zip((x, w, b), again, strict=True):
        assert_same_bits(first.grad, second.grad)


@pytest.mark.parametrize(
    "shape", [(16,), (1, 16), (3, 16), (2, 3, 4, 16), (0, 16), (4, 0, 16)], ids=str
)
def test_any_rank_and_an_empty_batch(shape: tuple[int, ...]) -> None:
    x, w, b = operands(shape)
    y = linear(x, w, b, config=CONFIG)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 24)
    assert (x.grad.shape, w.grad.shape, b.grad.shape) == (x.shape, w.shape, b.shape)
    assert_same_bits(b.grad, torch.full((24,), float(x.numel() // 16)))


def strided(t: Tensor) -> Iterator[Tensor]:
    yield t.mT.contiguous().mT
    wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., ::2] = t
    yield wide[..., ::2]


def test_non_contiguous_operands_and_gradients_change_nothing() -> None:
    x, w, _ = operands((8, 16))
    y = linear(x, w, config=CONFIG)
    y.backward(torch.ones(8, 24))
    for other_x, other_w in zip(strided(x.detach()), strided(w.detach()), strict=True):
        other_x, other_w = other_x.requires_grad_(), other_w.requires_grad_()
        out = linear(other_x, other_w, config=CONFIG)
        out.sum().backward()  # an expanded gradient
        assert_same_bits(out.detach(), y.detach())
        assert_same_bits(other_x.grad, x.grad)
        assert_same_bits(other_w.grad, w.grad)


def test_a_weight_that_is_already_quantized_gives_the_same_output() -> None:
    x, w, b = operands()
    quantized = CONFIG.weight.quantize(w.detach())
    assert_same_bits(
        linear(x, quantized, b, config=CONFIG).detach(), linear(x, w, b, config=CONFIG).detach()
    )


def test_a_quantized_weight_takes_a_plain_gradient() -> None:
    x, w, b = operands()
    quantized = torch.nn.Parameter(CONFIG.weight.quantize(w.detach()))
    linear(x, quantized, b, config=CONFIG).sum().backward()
    plain = operands()
    linear(*plain, config=CONFIG).sum().backward()
    assert type(quantized.grad) is torch.Tensor
    assert_same_bits(quantized.grad, plain[1].grad)


def test_operands_and_quantizers_are_as_before() -> None:
    x, w, b = operands()
    before = copy.deepcopy((x.detach(), w.detach(), b.detach())), copy.deepcopy(CONFIG)
    linear(x, w, b, config=CONFIG).sum().backward()
    for tensor, old in zip((x, w, b), before[0], strict=True):
        assert_same_bits(tensor.detach(), old)
    assert before[1] == CONFIG


def test_mixed_dtypes_keep_each_its_own() -> None:
    x, w, b = operands(dtype=torch.bfloat16)
    master = w.detach().float().requires_grad_()
    y = linear(x, master, b, config=CONFIG)
    y.sum().backward()
    dtypes = (y.dtype, x.grad.dtype, master.grad.dtype, b.grad.dtype)
    assert dtypes == (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)


# -- the module -----------------------------------------------------------------------------------


def test_module_is_nn_linear_in_parameters_and_state() -> None:
    torch.manual_seed(3)
    ours = Linear(16, 24, recipe=RECIPE)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(16, 24)
    for name, parameter in theirs.named_parameters():
        assert_same_bits(getattr(ours, name).detach(), parameter.detach())
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == "Linear(in_features=16, out_features=24, bias=True, recipe=toy)"


def test_module_computes_linear_and_plans_it() -> None:
    layer = Linear(16, 24, bias=False, recipe=RECIPE, dtype=torch.bfloat16)
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    assert layer.bias is None
    assert_same_bits(layer(x).detach(), linear(x, layer.weight, config=CONFIG).detach())
    plan = layer.plan(x)
    assert plan == layer.plan(TensorProto(shape=(4, 16), dtype=torch.bfloat16, device="cpu"))
    assert plan.saved == (plan.saved_input,)
    assert layer.plan(x, grad_enabled=False).saved == ()


def test_a_format_that_is_not_installed_is_named() -> None:
    with pytest.raises(UnknownFormatError, match=r"^absent: no installed distribution provides"):
        Linear(16, 24, recipe="absent")


def test_train_eval_train_changes_no_state() -> None:
    layer = Linear(16, 24, recipe=RECIPE)
    x = torch.randn(4, 16)
    first = layer(x)
    with torch.no_grad():
        layer.eval()(x)
    second = layer.train()(x)
    second.sum().backward()
    assert_same_bits(first.detach(), second.detach())


# -- compiled -------------------------------------------------------------------------------------


def step(layer: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


@new_quantizer_in_graph
def test_one_graph_for_every_row_count_forward_and_backward() -> None:
    layer = Linear(64, 96, recipe=RECIPE)
    rows = (32, 64, 96, 160)
    eager = {
        m: step(layer, torch.randn(m, 64, generator=torch.Generator().manual_seed(m))) for m in rows
    }
    with count_compiles() as counted:
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for m in rows:
            x = torch.randn(m, 64, generator=torch.Generator().manual_seed(m))
            for found, expected in zip(step(compiled, x), eager[m], strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
        for m in (256, 32, 128, 64, 192):
            step(compiled, torch.randn(m, 64))
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


@new_quantizer_in_graph
def test_a_shape_error_reads_the_same_under_compile() -> None:
    quantizer = ToyQuantizer(multiple=16)
    config = LinearConfig(input=quantizer, weight=quantizer, grad_output=quantizer)
    x, w, _ = operands((16, 40))
    message = "linear: input of shape (16, 40): toy: K must be a multiple of 16, got 40"
    with pytest.raises(ShapeError, match=re.escape(message)):
        linear(x, w, config=config)
    compiled = torch.compile(lambda: linear(x, w, config=config), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="K must be a multiple of 16, got 40"):
        compiled()
