# SPDX-License-Identifier: Apache-2.0
"""Carry out a :class:`LinearPlan`; no shape, usage or dtype is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_linear.plan import LinearPlan
    from te_proto.proto import TensorProto


def execute_forward(
    plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[QuantizedStorage | None]]:
    """Return the output and what is kept for backward: of the input, of the weight.

    Source:
        ``fprop`` of TransformerEngine's linear: rowwise input times rowwise weight.
    """
    quantized_x = _quantize(x, plan.quantized_input)
    quantized_w = _quantize(weight, plan.quantized_weight)
    y = _rowwise(quantized_x) @ _rowwise(quantized_w).t()
    if bias is not None:
        y = y + bias.float()
    saved = [_keep(quantized_x, plan.saved_input), _keep(quantized_w, plan.saved_weight)]
    return y.to(plan.output.dtype), saved


def execute_backward(
    plan: LinearPlan, saved: list[Any], grad_output: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; None where the plan has none.

    Source:
        ``dgrad`` and ``wgrad`` of TransformerEngine's linear: rowwise gradient times columnwise
        weight, and columnwise gradient times columnwise input. The bias gradient is summed in
        float32 from the high-precision gradient.
    """
    saved_x, saved_w = saved
    flat = grad_output.reshape(-1, grad_output.shape[-1])
    grad_input = grad_weight = grad_bias = None
    if plan.grad_bias is not None:
        grad_bias = flat.float().sum(0).to(plan.grad_bias.dtype)
    quantized = (
        None if plan.quantized_grad_output is None else _quantize(flat, plan.quantized_grad_output)
    )
    if plan.grad_input is not None:
        product = _rowwise(quantized) @ _columnwise(saved_w)
        grad_input = product.reshape(plan.grad_input.shape).to(plan.grad_input.dtype)
    if plan.grad_weight is not None:
        columns = _columnwise(saved_x)
        grad_weight = _columnwise(quantized).t() @ columns.reshape(-1, columns.shape[-1])
        grad_weight = grad_weight.to(plan.grad_weight.dtype)
    return grad_input, grad_weight, grad_bias


def _quantize(value: Any, proto: TensorProto) -> Any:
    assert proto.quantizer is not None  # plan_linear set it
    if isinstance(value, QuantizedStorage):
        return value.with_usage(
            rowwise=proto.quantizer.rowwise, columnwise=proto.quantizer.columnwise
        )
    return proto.quantizer.quantize(value)


def _keep(value: Any, proto: TensorProto | None) -> Any:
    return None if proto is None else value.with_usage(rowwise=False)


def _rowwise(value: Any) -> Tensor:
    out: Tensor = value.with_usage(columnwise=False).dequantize(torch.float32)
    return out


def _columnwise(value: Any) -> Tensor:
    out: Tensor = value.with_usage(rowwise=False).dequantize(torch.float32)
    return out
