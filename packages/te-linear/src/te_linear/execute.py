# SPDX-License-Identifier: Apache-2.0
"""Carry out a :class:`LinearPlan`; no shape, usage or dtype is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_linear.product import matmul
from te_linear.rng import draw_rng
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_linear.plan import LinearPlan
    from te_proto.proto import TensorProto


def execute_forward(
    plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Tensor | QuantizedStorage | None]]:
    """Return the output and what is kept for backward: of input and weight, seed and offset.

    Source:
        ``fprop`` of TransformerEngine's linear: rowwise input times rowwise weight.
    """
    quantized_x = _quantize(x, plan.quantized_input)
    quantized_w = _quantize(weight, plan.quantized_weight)
    y = matmul(quantized_x, quantized_w, a_columnwise=False, b_columnwise=False)
    if bias is not None:
        y = y + bias.float()
    rng = None if plan.saved_rng is None else draw_rng(plan.saved_rng)
    saved = [_keep(quantized_x, plan.saved_input), _keep(quantized_w, plan.saved_weight), rng]
    return y.reshape(plan.output.shape).to(plan.output.dtype), saved


def execute_backward(
    plan: LinearPlan, saved: list[Any], grad_output: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; None where the plan has none.

    Source:
        ``dgrad`` and ``wgrad`` of TransformerEngine's linear: rowwise gradient times columnwise
        weight, and columnwise gradient times columnwise input. The bias gradient is summed in
        float32 from the high-precision gradient.
    """
    saved_x, saved_w, rng = saved
    flat = grad_output.reshape(-1, grad_output.shape[-1])
    grad_input = grad_weight = grad_bias = None
    if plan.grad_bias is not None:
        grad_bias = flat.float().sum(0).to(plan.grad_bias.dtype)
    quantized = None
    if plan.quantized_grad_output is not None:
        quantized = _quantize(flat, plan.quantized_grad_output, rng)
    if plan.grad_input is not None:
        product = matmul(quantized, saved_w, a_columnwise=False, b_columnwise=True)
        grad_input = product.reshape(plan.grad_input.shape).to(plan.grad_input.dtype)
    if plan.grad_weight is not None:
        product = matmul(quantized, saved_x, a_columnwise=True, b_columnwise=True)
        grad_weight = product.to(plan.grad_weight.dtype)
    return grad_input, grad_weight, grad_bias


def _quantize(value: Any, proto: TensorProto, rng: Tensor | None = None) -> Any:
    """Quantize a plain ``value``, with ``rng`` or, where its quantizer takes one, a new draw."""
    assert proto.quantizer is not None  # plan_linear set it
    if isinstance(value, QuantizedStorage):
        # as a bare storage: dynamo does not look into the methods of a tensor
        context = value.quantizer.replace(internal=True).create_metadata(value.dtype)
        storage = context.build(QuantizedStorage.inner_tensors(value), value.shape)
        return storage.with_usage(
            rowwise=proto.quantizer.rowwise, columnwise=proto.quantizer.columnwise
        )
    if rng is None and "rng" in proto.quantizer.call_arguments():
        rng = draw_rng(value)
    return proto.quantizer.quantize(value, rng=rng)


def _keep(value: Any, proto: TensorProto | None) -> Any:
    return None if proto is None else value.with_usage(rowwise=False)
