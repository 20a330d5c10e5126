# SPDX-License-Identifier: Apache-2.0
"""Options of the layer, in both modes: what comes quantized, what is cached, kept and cast."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from linear_toy import RECIPE, ToyQuantizer
from torch import Tensor

from te_linear import Linear, LinearConfig, linear, plan_linear, quantize_weight
from te_proto import QuantizedTensor, to_tensor_proto
from te_proto.errors import ShapeError, UsageError
from te_proto.storage import QuantizedStorage
from te_proto.testing import assert_same_bits, count_compiles, new_quantizer_in_graph

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = LinearConfig.from_recipe(RECIPE)
MODES = ["traced", "opaque"]
pytestmark = pytest.mark.parametrize("mode", MODES)


def operands(
    m: int = 8, dtype: torch.dtype = torch.float32, grad: tuple[bool, ...] = (True, True, True)
) -> list[Tensor]:
    g = torch.Generator().manual_seed(m)
    made = [torch.randn(size, generator=g).to(dtype) for size in ((m, 16), (24, 16), (24,))]
    return [t.requires_grad_(flag) for t, flag in zip(made, grad, strict=True)]


def results(y: Tensor, inputs: list[Tensor], grad: Tensor | None = None) -> list[Tensor | None]:
    if y.requires_grad:
        y.backward(torch.ones_like(y) if grad is None else grad)
    return [y.detach(), *(t.grad for t in inputs)]


def same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(a, b)


# -- what comes quantized -------------------------------------------------------------------------


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
def test_input_that_comes_quantized_is_taken_as_it_is(mode: str, internal: bool) -> None:
    x, w, b = operands()
    expected = results(linear(x, w, b, config=CONFIG), [w, b])
    q = CONFIG.input.replace(internal=internal).quantize(x.detach())
    _, w, b = operands()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        y = linear(q, w, b, config=CONFIG, mode=mode)
    same(results(y, [w, b]), expected)
    held = {t.data_ptr() for t in QuantizedStorage.inner_tensors(q).values()}
    # no copy of it is kept for backward
    assert len([t for t in packed if t.data_ptr() in held]) == 2


def test_quantized_input_passes_its_gradient_on(mode: str) -> None:
    x, w, b = operands()
    expected = results(linear(x, w, b, config=CONFIG), [x, w, b])
    x, w, b = operands()
    y = linear(CONFIG.input.quantize(x), w, b, config=CONFIG, mode=mode)
    same(results(y, [x, w, b]), expected)


def test_quantized_weight_is_trained_by_quantizing_into_it(mode: str) -> None:
    x, w, _ = operands()
    master = w.detach().clone()
    weight = torch.nn.Parameter(CONFIG.weight.quantize(w.detach()))
    places = [t.data_ptr() for t in weight.inner_tensors().values()]
    for _ in range(2):
        plain = CONFIG.weight.quantize(master).dequantize().requires_grad_()
        weight.grad = None
        y = linear(x.detach(), weight, config=CONFIG, mode=mode)
        y.square().sum().backward()
        linear(x.detach(), plain, config=CONFIG).square().sum().backward()
        assert weight.grad is not None
        assert type(weight.grad) is Tensor
        torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-2, atol=1e-2)
        with torch.no_grad():
            master -= 0.01 * weight.grad
            weight.quantize_(master)
    assert [t.data_ptr() for t in weight.inner_tensors().values()] == places
    assert_same_bits(weight.dequantize().detach(), CONFIG.weight.quantize(master).dequantize())


def test_weight_quantized_anew_before_backward_is_noticed(mode: str) -> None:
    x, w, _ = operands()
    weight = torch.nn.Parameter(CONFIG.weight.quantize(w.detach()))
    y = linear(x, weight, config=CONFIG, mode=mode)
    with torch.no_grad():
        weight.quantize_(w.detach() * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("planes", [(True, True), (True, False), (False, True)], ids=str)
def test_gradient_that_comes_quantized(mode: str, planes: tuple[bool, bool]) -> None:
    inputs = operands()
    grad = torch.randn(8, 24, generator=torch.Generator().manual_seed(5))
    quantizer = CONFIG.grad_output.with_usage(rowwise=planes[0], columnwise=planes[1])
    q = quantizer.quantize(grad)
    y = linear(*inputs, config=CONFIG, mode=mode)
    found = results(y, inputs, q)
    again = operands()
    if all(planes):  # taken as it is
        expected = results(linear(*again, config=CONFIG), again, grad)
        expected[3] = q.dequantize().sum(0)
    else:  # a plane is missing, so its values are quantized
        expected = results(linear(*again, config=CONFIG), again, q.dequantize())
    same(found, expected)


def test_output_quantizer_gives_a_quantized_differentiable_output(mode: str) -> None:
    quantizer = ToyQuantizer(bits=5)
    config = dataclasses.replace(CONFIG, output=quantizer)
    inputs, plain = operands(), operands()
    y = linear(*inputs, config=config, mode=mode)
    expected = linear(*plain, config=CONFIG)
    assert isinstance(y, QuantizedTensor)
    plan = plan_linear(*map(to_tensor_proto, inputs), config, grad_enabled=True)
    assert to_tensor_proto(y) == plan.output
    assert_same_bits(y.dequantize().detach(), quantizer.quantize(expected.detach()).dequantize())
    grad = torch.randn(8, 24, generator=torch.Generator().manual_seed(5))
    y.dequantize().backward(grad)
    expected.backward(grad)
    same([t.grad for t in inputs], [t.grad for t in plain])


def test_layers_hand_quantized_tensors_on(mode: str) -> None:
    # TransformerEngine#3172: the second saw none that requires grad, and the first got no gradient
    quantizer = ToyQuantizer(bits=5)
    x, w, _ = operands()
    torch.manual_seed(1)
    w2 = torch.randn(8, 24)
    first = dataclasses.replace(CONFIG, output=quantizer)

    def chain(mode: str, w: Tensor, w2: Tensor, x: Tensor) -> list[Any]:
        given = [t.detach().requires_grad_() for t in (x, w, w2)]
        h = linear(given[0], given[1], config=first, mode=mode)
        return results(linear(h, given[2], config=CONFIG, mode=mode), given)

    h = linear(x, w, config=CONFIG).detach()
    expected = linear(quantizer.quantize(h), w2, config=CONFIG)
    found = chain(mode, w, w2, x)
    assert_same_bits(found[0], expected)
    same(found, chain("traced", w, w2, x))
    assert all(g is not None and g.abs().sum() > 0 for g in found[1:])


# -- what is kept ---------------------------------------------------------------------------------


def test_original_input_is_kept_instead_of_a_plane(mode: str) -> None:
    config = dataclasses.replace(CONFIG, save_original_input=True)
    inputs, plain = operands(), operands()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        y = linear(*inputs, config=config, mode=mode)
    assert packed[0].data_ptr() == inputs[0].data_ptr()
    plan = plan_linear(*map(to_tensor_proto, inputs), config, grad_enabled=True)
    assert (plan.quantized_input.quantizer.columnwise, plan.keeps_argument_input) == (False, True)
    assert sum(t.nbytes for t in packed) == sum(p.nbytes for p in plan.saved)
    same(results(y, inputs), results(linear(*plain, config=CONFIG), plain))


@pytest.mark.parametrize(
    "grad",
    [(False, True, False), (True, False, False), (False, False, True), (False,) * 3],
    ids=str,
)
def test_frozen_operands_get_and_cost_nothing(mode: str, grad: tuple[bool, ...]) -> None:
    inputs, whole = operands(grad=grad), operands()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        y = linear(*inputs, config=CONFIG, mode=mode)
    plan = plan_linear(*map(to_tensor_proto, inputs), CONFIG, grad_enabled=True)
    assert sum(t.nbytes for t in packed) == sum(p.nbytes for p in plan.saved)
    expected = results(linear(*whole, config=CONFIG), whole)
    wanted = [g if on else None for g, on in zip(expected[1:], grad, strict=True)]
    same(results(y, inputs), [expected[0], *wanted])


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_kept(mode: str, without: Callable[[], Any]) -> None:
    inputs = operands()
    expected = linear(*inputs, config=CONFIG).detach()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t), without():
        y = linear(*inputs, config=CONFIG, mode=mode)
    assert (packed, y.requires_grad) == ([], False)
    assert_same_bits(y, expected)


# -- the weight cache -----------------------------------------------------------------------------


def cached(mode: str) -> Linear:
    torch.manual_seed(2)
    return Linear(16, 24, recipe=RECIPE, cache_weight=True, mode=mode)


def test_cached_weight_is_read_until_it_is_refreshed(mode: str) -> None:
    layer, x = cached(mode), operands()[0].detach()
    places = [t.data_ptr() for t in layer.weight_cache.inner_tensors().values()]
    first = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert_same_bits(layer(x, refresh_weight=False).detach(), first.detach())
    assert_same_bits(layer(x, refresh_weight=torch.zeros(1)).detach(), first.detach())
    second = layer(x, refresh_weight=torch.ones(1))
    expected = linear(x, layer.weight, layer.bias, config=layer.config)
    assert_same_bits(second.detach(), expected.detach())
    assert [t.data_ptr() for t in layer.weight_cache.inner_tensors().values()] == places
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_gradients_of_micro_batches_are_those_of_the_weight(mode: str) -> None:
    layer = cached(mode)
    for at, m in enumerate((8, 4)):
        layer(operands(m)[0], refresh_weight=at == 0).sum().backward()
    plain = Linear(16, 24, recipe=RECIPE)
    plain.load_state_dict(layer.state_dict())
    for m in (8, 4):
        plain(operands(m)[0]).sum().backward()
    same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


def test_cache_that_was_never_filled_is_seen(mode: str) -> None:
    layer = cached(mode)
    assert layer(operands()[0], refresh_weight=False).isnan().all()
    moved = cached(mode).to(torch.bfloat16)
    assert moved(operands(dtype=torch.bfloat16)[0]).isfinite().all()
    with pytest.raises(UsageError, match="^linear: refresh_weight is for a layer made with cache"):
        Linear(16, 24, recipe=RECIPE, mode=mode)(operands()[0], refresh_weight=False)


def test_cached_weight_must_stand_for_the_weight(mode: str) -> None:
    x, w, _ = operands()
    other = quantize_weight(torch.randn(8, 16), CONFIG)
    with pytest.raises(ShapeError, match=r"^linear: cached_weight must have shape \(24, 16\)"):
        linear(x, w, config=CONFIG, cached_weight=other, mode=mode)
    with pytest.raises(UsageError, match="^linear: cached_weight must be quantized, and stand for"):
        linear(x, w, config=CONFIG, cached_weight=w, mode=mode)


@new_quantizer_in_graph
def test_cache_is_written_in_one_graph(mode: str) -> None:
    # TransformerEngine#2119: a graph that runs again ignored the flag
    layer, eager = cached(mode), cached(mode)
    with count_compiles() as counted:
        run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for at, m in enumerate((32, 64, 96, 160)):
            flag = torch.tensor([float(at % 2 == 0)])
            for callee, of in ((run, layer), (eager, eager)):
                of.zero_grad()
                callee(operands(m)[0], refresh_weight=flag).square().sum().backward()
                with torch.no_grad():
                    of.weight.mul_(1.5)
            torch.testing.assert_close(layer.bias.grad, eager.bias.grad)
            same(
                [layer.weight.detach(), layer.weight_cache.dequantize()],
                [eager.weight.detach(), eager.weight_cache.dequantize()],
            )
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


@new_quantizer_in_graph
def test_train_eval_train_recompiles_once(mode: str) -> None:
    layer = cached(mode)
    with count_compiles() as counted:
        run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        first = run(operands(32)[0])
        for m in (32, 64):
            with torch.no_grad():
                run.eval()
                same([run(operands(m)[0])], [layer(operands(m)[0]).detach()])
            run.train()
            run(operands(m)[0]).sum().backward()
        same([run(operands(32)[0]).detach()], [first.detach()])
    assert counted.breaks == 0
    assert counted.recompiles <= 1


# -- dtypes, ranks and sizes ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_plain_input_and_output_and_no_product(
    mode: str, dtype: torch.dtype
) -> None:
    # ao#1306, ao#2587: the dtype was taken from before autocast had changed it
    inputs, low = operands(), operands()
    with torch.autocast("cpu", dtype=dtype):
        y = linear(*inputs, config=CONFIG, mode=mode)
        assert y.dtype == dtype
        y.backward(torch.ones_like(y))  # under autocast, as some do
    x = low[0].detach().to(dtype).requires_grad_()
    expected = linear(x, *low[1:], config=CONFIG)
    expected.backward(torch.ones_like(expected))
    found = [y.detach(), *(t.grad for t in inputs)]
    assert found[1].dtype == torch.float32
    assert_same_bits(found[1].to(dtype), x.grad)
    same([found[0], *found[2:]], [expected.detach(), low[1].grad, low[2].grad])


@pytest.mark.parametrize("shape", [(16,), (1, 16), (0, 16), (2, 3, 4, 16), (4, 0, 16)], ids=str)
def test_any_rank_and_batches_of_one_and_none(mode: str, shape: tuple[int, ...]) -> None:
    def run(mode: str) -> list[Any]:
        _, w, b = operands()
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        return results(linear(x, w, b, config=CONFIG, mode=mode), [x, w, b])

    same(run(mode), run("traced"))


def test_another_mode_is_refused(mode: str) -> None:
    with pytest.raises(UsageError, match="^linear: mode must be 'traced' or 'opaque', got 'x'"):
        linear(*operands(), config=CONFIG, mode="x")
