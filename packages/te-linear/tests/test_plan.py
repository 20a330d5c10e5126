# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import re

import pytest
import torch
from linear_toy import RECIPE, ToyQuantizer

from te_linear import LinearConfig, LinearPlan, plan_linear
from te_proto import TensorProto, to_tensor_proto
from te_proto.errors import DtypeError, ShapeError, UsageError

CONFIG = LinearConfig.from_recipe(RECIPE)
FLAGS = [
    pytest.param(*flags, id="".join("xwbg"[i] if on else "-" for i, on in enumerate(flags)))
    for flags in itertools.product((False, True), repeat=4)
]


def proto(
    *shape: int, requires_grad: bool = False, dtype: torch.dtype = torch.bfloat16
) -> TensorProto:
    return TensorProto(shape=shape, dtype=dtype, requires_grad=requires_grad, device="cpu")


def plan(x: bool, w: bool, b: bool, grad: bool) -> LinearPlan:
    return plan_linear(
        proto(2, 8, 16, requires_grad=x),
        proto(24, 16, requires_grad=w, dtype=torch.float32),
        proto(24, requires_grad=b),
        CONFIG,
        grad_enabled=grad,
    )


def usages(p: TensorProto | None) -> tuple[bool, bool] | None:
    return None if p is None else (p.quantizer.rowwise, p.quantizer.columnwise)


@pytest.mark.parametrize(("x", "w", "b", "grad"), FLAGS)
def test_each_operand_is_quantized_for_the_products_that_run(
    x: bool, w: bool, b: bool, grad: bool
) -> None:
    dgrad, wgrad = x and grad, w and grad
    made = plan(x, w, b, grad)
    assert usages(made.quantized_input) == (True, wgrad)
    assert usages(made.quantized_weight) == (True, dgrad)
    assert usages(made.quantized_grad_output) == ((dgrad, wgrad) if dgrad or wgrad else None)
    assert usages(made.saved_input) == ((False, True) if wgrad else None)
    assert usages(made.saved_weight) == ((False, True) if dgrad else None)
    assert len(made.saved) == dgrad + wgrad


@pytest.mark.parametrize(("x", "w", "b", "grad"), FLAGS)
def test_gradients_and_output_are_described_in_full(x: bool, w: bool, b: bool, grad: bool) -> None:
    made = plan(x, w, b, grad)
    assert made.grad_input == (proto(2, 8, 16) if x and grad else None)
    assert made.grad_weight == (proto(24, 16, dtype=torch.float32) if w and grad else None)
    assert made.grad_bias == (proto(24) if b and grad else None)
    assert made.output == proto(2, 8, 24, requires_grad=grad and (x or w or b))
    if made.quantized_grad_output is not None:
        assert made.quantized_grad_output.shape == (16, 24)
        assert made.quantized_grad_output.quantizer.bits == 6


def test_roles_have_their_own_quantizers_and_none_is_a_wrapper() -> None:
    made = plan(True, True, True, True)
    operands = (made.quantized_input, made.quantized_weight, made.quantized_grad_output)
    assert [p.quantizer.bits for p in operands] == [8, 7, 6]
    assert all(p.quantizer.internal for p in (*operands, *made.saved))


def test_plan_is_a_value() -> None:
    flags = (True, True, False, True)
    assert plan(*flags) == plan(*flags)
    assert hash(plan(*flags)) == hash(plan(*flags))
    assert plan(*flags) != plan(True, False, False, True)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ((32, 40), (48, 40)),
            "linear: input of shape (32, 40): toy: K must be a multiple of 16, got 40",
        ),
        (
            ((40, 32), (48, 32)),
            "linear: input of shape (40, 32): toy: M must be a multiple of 16, got 40",
        ),
        (
            ((32, 32), (40, 32)),
            "linear: weight of shape (40, 32): toy: M must be a multiple of 16, got 40",
        ),
    ],
    ids=["K", "M", "N"],
)
def test_an_operand_the_format_cannot_hold_is_named(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    quantizer = ToyQuantizer(multiple=16)
    config = LinearConfig(input=quantizer, weight=quantizer, grad_output=quantizer)
    x, w = (proto(*shape, requires_grad=True) for shape in shapes)
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        plan_linear(x, w, None, config, grad_enabled=True)


def test_a_gradient_that_cannot_be_quantized_is_refused_in_forward() -> None:
    config = LinearConfig(
        input=ToyQuantizer(), weight=ToyQuantizer(), grad_output=ToyQuantizer(multiple=16)
    )
    x, w = proto(8, 16, requires_grad=True), proto(16, 16, requires_grad=True)
    message = "linear: grad_output of shape (8, 16): toy: M must be a multiple of 16, got 8"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        plan_linear(x, w, None, config, grad_enabled=True)
    assert plan_linear(x, w, None, config, grad_enabled=False).quantized_grad_output is None


@pytest.mark.parametrize(
    ("x", "w", "b", "error", "message"),
    [
        (
            proto(4, 8, dtype=torch.float64),
            proto(4, 8),
            None,
            DtypeError,
            "linear: input must be float32, bfloat16 or float16, got float64; cast it first",
        ),
        (
            proto(4, 8),
            proto(4, 8, 2),
            None,
            ShapeError,
            "linear: weight must have 2 axes [N, K], got shape (4, 8, 2)",
        ),
        (
            proto(4, 9),
            proto(4, 8),
            None,
            ShapeError,
            "linear: the last axis of input must be K=8 of the weight, got shape (4, 9)",
        ),
        (
            proto(),
            proto(4, 8),
            None,
            ShapeError,
            "linear: the last axis of input must be K=8 of the weight, got shape ()",
        ),
        (
            proto(4, 8),
            proto(4, 8),
            proto(8),
            ShapeError,
            "linear: bias must have shape (4,), N of the weight, got (8,)",
        ),
    ],
    ids=["dtype", "weight-rank", "K", "0-d", "bias"],
)
def test_operands_that_do_not_fit_are_refused(
    x: TensorProto, w: TensorProto, b: TensorProto | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        plan_linear(x, w, b, CONFIG, grad_enabled=True)


def test_an_operand_that_is_already_quantized_keeps_its_quantizer() -> None:
    weight = ToyQuantizer(bits=4).quantize(torch.randn(24, 16))
    made = plan_linear(proto(8, 16), to_tensor_proto(weight), None, CONFIG, grad_enabled=True)
    assert made.quantized_weight.quantizer.bits == 4


def test_a_quantized_operand_without_a_plane_the_plan_needs_is_refused() -> None:
    weight = ToyQuantizer(rowwise=False).quantize(torch.randn(24, 16))
    message = (
        "linear: weight must hold the rowwise plane, got columnwise alone; "
        "quantize it with that usage"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        plan_linear(proto(8, 16), to_tensor_proto(weight), None, CONFIG, grad_enabled=True)


def test_planning_allocates_nothing() -> None:
    x = proto(1 << 20, 1 << 20, requires_grad=True)
    made = plan_linear(x, proto(1 << 20, 1 << 20), None, CONFIG, grad_enabled=True)
    assert made.quantized_input.nbytes == (1 << 40) + 4 * (1 << 20)
