# SPDX-License-Identifier: Apache-2.0
"""Carry out a :class:`LinearPlan`; no shape, usage or dtype is decided here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_linear.product import matmul
from te_linear.rng import draw_rng
from te_proto.proto import to_tensor_proto
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from te_linear.operand import OperandPlan
    from te_linear.plan import LinearPlan
    from te_proto.proto import TensorProto


class Draws(NamedTuple):
    """Seed and offset of each role that rounds stochastically, None for the others."""

    input: Tensor | None = None
    weight: Tensor | None = None
    grad_output: Tensor | None = None
    output: Tensor | None = None


class Saved(NamedTuple):
    """What is kept for backward, as the plan says; None where it says so."""

    input: Any = None
    weight: Any = None
    rng: Tensor | None = None
    input_rng: Tensor | None = None


def draw(plan: LinearPlan) -> Draws:
    """Draw what the roles of ``plan`` need."""
    return Draws(**{role: draw_rng(plan.product) for role in plan.draws})


def execute_forward(
    plan: LinearPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    draws: Draws,
    cached_weight: Any = None,
) -> tuple[Tensor, Saved]:
    """Return the product, before an output quantizer, and what is kept for backward.

    Source:
        ``fprop`` of TransformerEngine's linear: rowwise input times rowwise weight.
    """
    with _no_autocast(plan.product):
        held_w = weight if cached_weight is None else cached_weight
        made_x, operand_x = _operand(plan, plan.input, x, draws.input)
        made_w, operand_w = _operand(plan, plan.weight, held_w, draws.weight)
        y = matmul(operand_x, operand_w, a_columnwise=False, b_columnwise=False)
        y = _sum(plan, plan.reduce_product, y, plan.partial_product)
        if bias is not None:
            y = y.float() + bias.float()
        saved = Saved(
            keep(x if plan.keeps_argument_input else made_x, plan.saved_input),
            keep(made_w, plan.saved_weight),
            None if plan.saved_rng is None else draws.grad_output,
            None if plan.saved_input_rng is None else draws.input,
        )
        return y.reshape(plan.product.shape).to(plan.product.dtype), saved


def finish_output(plan: LinearPlan, y: Tensor, draws: Draws) -> Any:
    """Return the output: quantized, with a gradient that passes straight through, or as it is."""
    if plan.output.quantizer is None:
        return y
    with _no_autocast(plan.product):
        return plan.output.quantizer.quantize(y, group=plan.output_group, rng=draws.output)


def execute_backward(
    plan: LinearPlan, saved: Saved, grad_output: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; None where the plan has none.

    Source:
        ``dgrad`` and ``wgrad`` of TransformerEngine's linear: rowwise gradient times columnwise
        weight, and columnwise gradient times columnwise input. The bias gradient is summed in
        float32 from the high-precision gradient.
    """
    with _no_autocast(plan.product):
        grad_input = grad_weight = grad_bias = operand = None
        step = plan.gradient_operand(to_tensor_proto(grad_output))
        if step is not None:
            given = grad_output
            if step.source == "quantize":
                given = grad_output.reshape(plan.gradient.shape)
            operand = _operand(plan, step, given, saved.rng)[1]
        if plan.grad_bias is not None:
            summed = _plain(grad_output).reshape(plan.gradient.shape).float().sum(0)
            if plan.reduce_grad_bias:
                summed = _reduce(plan, "all_reduce", summed)
            grad_bias = summed.to(plan.grad_bias.dtype)
        if plan.grad_input is not None and plan.partial_grad_input is not None:
            product = matmul(operand, saved.weight, a_columnwise=False, b_columnwise=True)
            product = _sum(plan, plan.reduce_grad_input, product, plan.partial_grad_input)
            grad_input = product.reshape(plan.grad_input.shape).to(plan.grad_input.dtype)
        if plan.grad_weight is not None and plan.saved_input_operand is not None:
            kept_x = _operand(plan, plan.saved_input_operand, saved.input, saved.input_rng)[1]
            product = matmul(operand, kept_x, a_columnwise=True, b_columnwise=True)
            grad_weight = product.to(plan.grad_weight.dtype)
        return grad_input, grad_weight, grad_bias


def _operand(
    plan: LinearPlan, step: OperandPlan, value: Any, rng: Tensor | None
) -> tuple[Any, Any]:
    """Return what this rank made of ``value``, and the operand it is, or is a part of."""
    if step.source == "planes":
        made = planes(value, step.local, step.names)
    else:
        plain = _plain(value).to(step.local.dtype)
        if step.gather == "plain":
            plain = _gather(plan, plain, 0)
        assert step.local.quantizer is not None  # of an operand
        made = step.local.quantizer.quantize(plain, group=step.group, rng=rng)
    if step.gather != "quantized":
        return made, made
    held = QuantizedStorage.inner_tensors(made)
    inner = {
        name: held[name] if axis is None else _gather(plan, held[name], axis)
        for name, axis in zip(step.names, step.axes, strict=True)
    }
    return made, _build(step.operand, inner, step.operand.shape)


def planes(value: Any, proto: TensorProto, names: tuple[str, ...]) -> Any:
    """Return the bare storage that ``proto`` describes, of a quantized tensor that holds more."""
    # not by a method of the tensor: dynamo does not look into those
    held = QuantizedStorage.inner_tensors(value)
    # under its own shape: a size of the outer graph does not get from forward to backward
    return _build(proto, {name: held[name] for name in names}, value.shape)


def keep(value: Any, proto: TensorProto | None) -> Any:
    """Return what of ``value`` is kept: the planes of ``proto``, or a plain tensor as it is."""
    if proto is None:
        return None
    return value if proto.quantizer is None else planes(value, proto, proto.inner_names())


def _build(proto: TensorProto, inner: dict[str, Tensor], shape: Sequence[int]) -> Any:
    context = proto.create_metadata()
    assert context is not None  # a quantized one
    return context.build(inner, shape)


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedStorage) else value


def _no_autocast(like: TensorProto) -> AbstractContextManager[Any]:
    """Return a context in which products keep the dtypes that they are given."""
    kind = torch.device(like.device).type if like.device is not None else "cpu"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _gather(plan: LinearPlan, x: Tensor, axis: int) -> Tensor:
    from te_linear.collectives import all_gather  # needs a torch built with distributed

    assert plan.group is not None  # LinearConfig saw to it
    return all_gather(x, plan.ranks, plan.group, axis=axis)


def _sum(plan: LinearPlan, kind: str | None, product: Tensor, partial: TensorProto) -> Tensor:
    if kind is None:
        return product
    return _reduce(plan, kind, product.reshape(partial.shape).to(partial.dtype))


def _reduce(plan: LinearPlan, kind: str, x: Tensor) -> Tensor:
    from te_linear.collectives import all_reduce, reduce_scatter  # as above

    assert plan.group is not None  # LinearConfig saw to it
    if kind == "all_reduce":
        return all_reduce(x, plan.group)
    return reduce_scatter(x, plan.ranks, plan.group)
