# SPDX-License-Identifier: Apache-2.0
"""The opaque op: what it says of itself, and what checkpointing and graphs make of it."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from functools import partial
from typing import Any

import pytest
import torch
from linear_toy import RECIPE, ToyQuantizer
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from te_linear import Linear, LinearConfig, execute, linear, ops, plan_linear
from te_linear.execute import Draws, execute_backward, execute_forward
from te_proto import TensorProto, to_tensor_proto
from te_proto.quantizer import Quantizer
from te_proto.testing import assert_same_bits, check_op, count_compiles, new_quantizer_in_graph

CONFIG = LinearConfig.from_recipe(RECIPE)
PLAIN = (None, None, None, None, None)  # anchors, seeds and offsets
FLAGS = list(itertools.product((False, True), repeat=3))


def operands() -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=g) for size in ((2, 8, 16), (24, 16), (24,))]


def settings(config: LinearConfig = CONFIG) -> tuple[Any, ...]:
    return ops._settings(config)


@new_quantizer_in_graph
@pytest.mark.parametrize("flags", [(True, True, True), (True, False, True), (False, True, False)])
def test_forward_op_does_what_it_says(flags: tuple[bool, ...]) -> None:
    x, w, b = (t.requires_grad_(f) for t, f in zip(operands(), flags, strict=True))
    check_op(ops.forward_op, x, w, b, None, *PLAIN, *flags, None, *settings())


@new_quantizer_in_graph
def test_forward_op_takes_quantized_operands() -> None:
    x, w, b = operands()
    qx, qw = CONFIG.input.quantize(x), CONFIG.weight.quantize(w)
    b.requires_grad_()
    flags = (False, False, True)
    check_op(ops.forward_op, qx, qw, b, None, *PLAIN, *flags, None, *settings())


@new_quantizer_in_graph
@pytest.mark.parametrize("flags", FLAGS[1:], ids=str)
def test_backward_op_does_what_it_says(flags: tuple[bool, bool, bool]) -> None:
    given = [t.requires_grad_(f) for t, f in zip(operands(), flags, strict=True)]
    plan = plan_linear(*map(to_tensor_proto, given), CONFIG, grad_enabled=True)
    _, saved = execute_forward(plan, *given, Draws())
    described = [part for t in given for part in (tuple(t.shape), t.dtype, None)]
    grad = torch.randn(2, 8, 24)
    check_op(ops.backward_op, grad, *saved, *described, None, None, None, *flags, None, *settings())


# -- checkpointing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "runs"),
    [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)],
)
def test_selective_checkpointing_sees_the_op_and_what_it_keeps(
    policy: CheckpointPolicy, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = ops.execute_forward
    monkeypatch.setattr(ops, "execute_forward", lambda *a: (calls.append(1), real(*a))[1])
    seen: list[Any] = []

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.te_linear.forward.default:
            seen.append(op)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    plain = [t.requires_grad_() for t in operands()]
    linear(*plain, config=CONFIG).square().sum().backward()
    given = [t.requires_grad_() for t in operands()]
    y = checkpoint(
        partial(linear, config=CONFIG, mode="opaque"),
        *given,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, choose),
    )
    y.square().sum().backward()
    assert len(seen) >= 1
    assert len(calls) == runs
    for a, b in zip(given, plain, strict=True):
        assert_same_bits(a.grad, b.grad)


def test_what_the_op_returns_to_a_policy_are_the_quantized_bytes() -> None:
    x, w, b = (t.requires_grad_() for t in operands())
    plan = plan_linear(*map(to_tensor_proto, (x, w, b)), CONFIG, grad_enabled=True)
    op, arguments = ops.forward_op.under(x, w, b, None, *PLAIN, True, True, True, None, *settings())
    returned = op(*arguments)[1:]
    described = [spec for proto in plan.saved for spec in proto.inner_specs().values()]
    assert [(tuple(t.shape), t.dtype) for t in returned] == [tuple(spec) for spec in described]
    assert {t.dtype for t in returned} == {torch.int8, torch.float32}


@pytest.mark.parametrize("reentrant", [False, True])
def test_plain_checkpointing(reentrant: bool) -> None:
    plain, given = ([t.requires_grad_() for t in operands()] for _ in range(2))
    linear(*plain, config=CONFIG).sum().backward()
    run = partial(linear, config=CONFIG, mode="opaque")
    checkpoint(run, *given, use_reentrant=reentrant).sum().backward()
    for a, b in zip(given, plain, strict=True):
        assert_same_bits(a.grad, b.grad)


# -- graphs ---------------------------------------------------------------------------------------


@new_quantizer_in_graph
def test_graph_holds_the_layer_as_one_op_for_every_row_count() -> None:
    torch.manual_seed(0)
    layer = Linear(64, 96, recipe=RECIPE, mode="opaque")
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with count_compiles() as counted:
        run = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
        for m in (32, 64, 96, 160):
            x = torch.randn(m, 64)
            assert_same_bits(run(x).detach(), layer(x).detach())
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
    targets = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert targets.count("te_linear.forward") == 1
    assert not [t for t in targets if "mm" in t or "amax" in t]


@new_quantizer_in_graph
def test_compiled_step_is_one_graph_and_has_the_gradients_of_the_eager_one() -> None:
    torch.manual_seed(0)
    layer = Linear(64, 96, recipe=RECIPE, mode="opaque")
    with count_compiles() as counted:
        run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (32, 64, 96, 160):
            found = []
            for callee in (run, layer):
                layer.zero_grad()
                x = torch.randn(m, 64, generator=torch.Generator().manual_seed(m)).requires_grad_()
                callee(x).square().sum().backward()
                found.append([x.grad, layer.weight.grad, layer.bias.grad])
            for a, b in zip(*found, strict=True):
                assert_same_bits(a, b)
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


# -- the executor ---------------------------------------------------------------------------------

DECIDING = {"replace", "with_usage", "describe_buffers", "alignment", "prod", "numel", "size"}


def test_executor_has_no_code_that_decides() -> None:
    tree = ast.parse(inspect.getsource(execute))
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in DECIDING)
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("shape"))
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("TensorProto"))
        or (isinstance(node, ast.Attribute) and node.attr == "requires_grad")
    ]
    assert found == []
    sums = [
        n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and not isinstance(n.op, ast.BitOr)
    ]
    assert [ast.unparse(n) for n in sums] == ["y.float() + bias.float()"]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_executor_computes_no_usage_and_no_description(
    flags: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [t.requires_grad_(f) for t, f in zip(operands(), flags, strict=True)]
    plan = plan_linear(*map(to_tensor_proto, given), CONFIG, grad_enabled=True)
    callers: list[str] = []

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            callers.append(sys._getframe(1).f_globals["__name__"])
            return real(*args, **kwargs)

        return call

    for owner, name in (
        (Quantizer, "replace"),
        (Quantizer, "with_usage"),
        (TensorProto, "replace"),
        (TensorProto, "with_usage"),
        (ToyQuantizer, "describe_buffers"),
        (ToyQuantizer, "check_shape"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    _, saved = execute_forward(plan, *given, Draws())
    execute_backward(plan, saved, torch.randn(2, 8, 24))
    assert callers.count("te_linear.execute") == 0
    assert len(callers) > 0  # the quantizers check what they are given
