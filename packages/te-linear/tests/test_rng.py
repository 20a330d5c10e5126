# SPDX-License-Identifier: Apache-2.0
"""Seed and offset of operands that round stochastically: drawn in forward, used in backward."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from linear_toy import ToyQuantizer
from torch.utils.checkpoint import checkpoint

from te_linear import Linear, LinearConfig, linear, plan_linear
from te_linear.rng import draw_rng
from te_proto import Recipe, TensorProto, to_tensor_proto
from te_proto.testing import assert_same_bits, count_compiles, new_quantizer_in_graph

if TYPE_CHECKING:
    from torch import Tensor


class ChanceQuantizer(ToyQuantizer):
    """Add up to half a step, which seed, offset and place decide."""

    format_name: ClassVar[str] = "chance"

    def call_arguments(self) -> tuple[str, ...]:
        return ("rng",)

    def quantize_impl(self, x: Tensor, *, rng: Tensor) -> dict[str, Tensor]:
        place = torch.arange(x.shape[-1], device=x.device)
        noise = ((place * 40503 + rng[0] % 65521 + rng[1] % 251) * 2654435 >> 8) % 256
        step = x.abs().amax() / 31
        return super().quantize_impl(x + (noise / 256 - 0.5) * step)


PLAIN, CHANCE = ToyQuantizer(), ChanceQuantizer(bits=6)
RECIPE = Recipe(name="chance", input=PLAIN, weight=PLAIN, grad_output=CHANCE)
CONFIG = LinearConfig.from_recipe(RECIPE)


def operands() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    return (torch.randn(8, 16, generator=g), torch.randn(24, 16, generator=g))


def gradients(seed: int, call: Any = linear, config: LinearConfig = CONFIG) -> list[Tensor]:
    x, w = (t.requires_grad_() for t in operands())
    torch.manual_seed(seed)
    y = call(x, w, config=config)
    y.backward(torch.randn(8, 24, generator=torch.Generator().manual_seed(9)))
    return [x.grad, w.grad]


def test_gradient_is_quantized_with_what_forward_drew() -> None:
    x, w = operands()
    grad = torch.randn(8, 24, generator=torch.Generator().manual_seed(9))
    found = gradients(3)
    torch.manual_seed(3)
    g = CHANCE.quantize(grad, rng=draw_rng(x))
    rows, columns = g.with_usage(columnwise=False), g.with_usage(rowwise=False)
    x, w = (PLAIN.with_usage(rowwise=False).quantize(t).dequantize() for t in (x, w))
    expected = [rows.dequantize() @ w, columns.dequantize().t() @ x]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_same_seed_same_gradients_and_another_others() -> None:
    first, again, other = gradients(1), gradients(1), gradients(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert_same_bits(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_every_role_may_round_stochastically(role: str) -> None:
    roles = {"input": PLAIN, "weight": PLAIN, "grad_output": PLAIN, role: CHANCE}
    config = LinearConfig(**roles)
    first, again, other = (gradients(seed, config=config) for seed in (1, 1, 2))
    differ = [not torch.equal(a, c) for a, c in zip(first, other, strict=True)]
    # the weight gradient reads the input, the input gradient the weight, both the gradient
    assert (
        differ
        == {
            "input": [False, True],
            "weight": [True, False],
            "grad_output": [True, True],
        }[role]
    )
    for a, b in zip(first, again, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["traced", "opaque"])
@pytest.mark.parametrize("original", [False, True])
def test_checkpointing_recomputes_the_same_draw(reentrant: bool, mode: str, original: bool) -> None:
    def recomputed(x: Tensor, w: Tensor, *, config: LinearConfig) -> Tensor:
        config = dataclasses.replace(config, save_original_input=original)
        out: Tensor = checkpoint(
            lambda a, b: linear(a, b, config=config, mode=mode), x, w, use_reentrant=reentrant
        )
        return out

    for a, b in zip(gradients(5), gradients(5, recomputed), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("mode", ["traced", "opaque"])
def test_input_that_is_quantized_again_in_backward_rounds_as_in_forward(mode: str) -> None:
    roles = {"input": CHANCE, "weight": PLAIN, "grad_output": CHANCE}
    kept = LinearConfig(**roles)
    again = LinearConfig(**roles, save_original_input=True)

    def call(x: Tensor, w: Tensor, *, config: LinearConfig) -> Tensor:
        return linear(x, w, config=config, mode=mode)

    for a, b in zip(gradients(5, call, again), gradients(5, config=kept), strict=True):
        assert_same_bits(a, b)


def test_nothing_is_drawn_that_no_operand_asks_for() -> None:
    config = LinearConfig(input=PLAIN, weight=PLAIN, grad_output=PLAIN)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    gradients(1, config=config)
    torch.manual_seed(1)
    x, w = operands()
    linear(x, w, config=CONFIG)  # no gradient, so none is quantized
    with torch.no_grad():
        linear(x.requires_grad_(), w, config=CONFIG)
    assert torch.equal(torch.get_rng_state(), before)


def test_draw_is_in_the_plan_and_among_what_is_saved() -> None:
    x, w = (t.requires_grad_() for t in operands())
    plan = plan_linear(to_tensor_proto(x), to_tensor_proto(w), None, CONFIG, grad_enabled=True)
    rng = TensorProto(shape=(2,), dtype=torch.int64, device=torch.device("cpu"))
    assert plan.saved_rng == rng
    assert plan.saved == (plan.saved_input, plan.saved_weight, rng)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        linear(x, w, config=CONFIG)
    described = [spec for proto in plan.saved for spec in proto.inner_specs().values()]
    assert [(tuple(t.shape), t.dtype) for t in packed] == [tuple(spec) for spec in described]


def test_draws_differ_and_take_all_of_63_bits() -> None:
    torch.manual_seed(0)
    drawn = torch.stack([draw_rng(torch.empty(0)) for _ in range(64)])
    assert drawn.unique().numel() == 128
    assert drawn.min() >= 0
    assert drawn.max() > 2**61


@new_quantizer_in_graph
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_steps_draw_what_eager_steps_draw_and_each_anew(backend: str) -> None:
    torch.manual_seed(0)
    layer = Linear(64, 96, recipe=RECIPE)

    def step(callee: torch.nn.Module, m: int) -> Tensor:
        g = torch.Generator().manual_seed(m)
        x = torch.randn(m, 64, generator=g, requires_grad=True)
        callee(x).backward(torch.randn(m, 96, generator=g))
        assert x.grad is not None
        return x.grad

    rows = (32, 64, 96, 160, 64, 64)
    torch.manual_seed(4)
    eager = [step(layer, m) for m in rows]
    with count_compiles() as counted:
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
        torch.manual_seed(4)
        for m, expected in zip(rows, eager, strict=True):
            torch.testing.assert_close(step(compiled, m), expected, rtol=1e-5, atol=1e-5)
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
    # the same input and gradient, two steps
    assert not torch.allclose(eager[-1], eager[-2], rtol=1e-3, atol=1e-3)


def test_graph_neither_merges_two_draws_nor_drops_one() -> None:
    def two(x: Tensor) -> Tensor:
        return torch.stack((draw_rng(x), draw_rng(x)))

    compiled = torch.compile(two, fullgraph=True, backend="inductor")
    torch.manual_seed(6)
    found = [compiled(torch.empty(1)) for _ in range(2)]
    torch.manual_seed(6)
    for drawn in found:
        assert_same_bits(drawn, two(torch.empty(1)))
    torch._dynamo.reset()


def test_draw_needs_no_more_than_te_linear() -> None:
    code = (
        "import torch, te_linear.rng as r\nprint(r.draw_rng(torch.empty(0, device='meta')).device)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "meta", "")
