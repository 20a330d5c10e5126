# SPDX-License-Identifier: Apache-2.0
"""The layer as a pair of opaque ops, whose description is the plan.

An op runs below autograd: what requires grad and autocast come as arguments, so the plan that
describes its results is the one the caller made. A quantized argument is no more than its buffers
to an op, so its gradient goes to an anchor, a plain tensor of its shape without memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_linear.config import LinearConfig
from te_linear.execute import Draws, Saved, execute_backward, execute_forward, keep
from te_linear.plan import LinearPlan, plan_linear
from te_linear.sharding import constant
from te_proto.custom_ops import custom_op
from te_proto.proto import TensorProto, to_tensor_proto
from te_proto.storage import QuantizedStorage, prepare_for_saving, restore_from_saved

if TYPE_CHECKING:
    from te_proto.quantizer import Quantizer


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return torch.empty(1, dtype=q.dtype, device=q.device).expand(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def run_opaque(
    plan: LinearPlan, x: Any, weight: Any, bias: Tensor | None, cached_weight: Any, draws: Draws
) -> Tensor:
    """Return the product of :func:`te_linear.execute.execute_forward`, as one op."""
    needs = [p is not None for p in (plan.grad_input, plan.grad_weight, plan.grad_bias)]
    values, anchors = [], []
    for value, needed in ((x, needs[0]), (weight, needs[1])):
        anchored = needed and isinstance(value, QuantizedStorage)
        values.append(value.detach() if anchored else value)
        anchors.append(_Anchor.apply(value) if anchored else None)
    autocast = plan.product.dtype if plan.product.dtype != x.dtype else None
    operands = (*values, bias, cached_weight, *anchors, *draws[:3])
    out: Tensor = forward_op(*operands, *needs, autocast, *_settings(plan.config))[0]
    return out


def _settings(config: LinearConfig) -> tuple[Any, ...]:
    """Return the settings that the product depends on, which :func:`_plan` puts together again."""
    return (
        config.input,
        config.weight,
        config.grad_output,
        config.save_original_input,
        config.parallel_mode,
        constant(config.tp_size),
        config.tp_group,
        config.sequence_parallel,
        config.amax_group,
    )


def _plan(
    x: TensorProto,
    weight: TensorProto,
    bias: TensorProto | None,
    cached_weight: TensorProto | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    autocast: torch.dtype | None,
    input_quantizer: Quantizer,
    weight_quantizer: Quantizer,
    grad_quantizer: Quantizer,
    save_original_input: bool,
    parallel_mode: str | None,
    tp_size: int,
    tp_group: str | None,
    sequence_parallel: bool,
    amax_group: str | None,
) -> LinearPlan:
    """Return the plan of the call that an op was made of."""
    config = LinearConfig(
        input=input_quantizer,
        weight=weight_quantizer,
        grad_output=grad_quantizer,
        save_original_input=save_original_input,
        parallel_mode=parallel_mode,
        tp_size=tp_size,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        amax_group=amax_group,
    )
    return plan_linear(
        x.replace(requires_grad=need_input),
        weight.replace(requires_grad=need_weight),
        None if bias is None else bias.replace(requires_grad=need_bias),
        config,
        grad_enabled=True,
        cached_weight=cached_weight,
        autocast=autocast,
    )


def _forward_outputs(*arguments: Any) -> tuple[TensorProto, ...]:
    return _plan(*arguments[:4], *arguments[9:]).made


@custom_op("te_linear::forward", outputs=_forward_outputs)
def forward_op(
    x: Any,
    weight: Any,
    bias: Tensor | None,
    cached_weight: Any,
    input_anchor: Tensor | None,
    weight_anchor: Tensor | None,
    input_rng: Tensor | None,
    weight_rng: Tensor | None,
    grad_rng: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    autocast: torch.dtype | None,
    input_quantizer: Quantizer,
    weight_quantizer: Quantizer,
    grad_quantizer: Quantizer,
    save_original_input: bool,
    parallel_mode: str | None,
    tp_size: int,
    tp_group: str | None,
    sequence_parallel: bool,
    amax_group: str | None,
) -> tuple[Any, ...]:
    """Return the product, and what is kept for backward and is no argument."""
    plan = _plan(
        *(None if v is None else to_tensor_proto(v) for v in (x, weight, bias, cached_weight)),
        need_input,
        need_weight,
        need_bias,
        autocast,
        input_quantizer,
        weight_quantizer,
        grad_quantizer,
        save_original_input,
        parallel_mode,
        tp_size,
        tp_group,
        sequence_parallel,
        amax_group,
    )
    draws = Draws(input_rng, weight_rng, grad_rng)
    y, saved = execute_forward(plan, x, weight, bias, draws, cached_weight)
    kept = (
        None if plan.keeps_argument_input else saved.input,
        None if plan.keeps_argument_weight else saved.weight,
    )
    return (y, *(k for k in kept if k is not None))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, bias, cached, _, _, input_rng, _, grad_rng, *settings = inputs
    protos = [None if v is None else to_tensor_proto(v) for v in (x, weight, bias, cached)]
    plan = _plan(*protos, *settings)
    made = list(output[1:])
    kept_x = kept_w = None
    if plan.saved_input is not None:
        kept_x = x if plan.keeps_argument_input else made.pop(0)
    if plan.saved_weight is not None:
        held_w = weight if cached is None else cached
        kept_w = held_w if plan.keeps_argument_weight else made.pop(0)
    saved = Saved(
        keep(kept_x, plan.saved_input),
        keep(kept_w, plan.saved_weight),
        None if plan.saved_rng is None else grad_rng,
        None if plan.saved_input_rng is None else input_rng,
    )
    flat, ctx.objects = prepare_for_saving(*saved)
    ctx.save_for_backward(*flat)
    ctx.described = tuple(
        part
        for proto in protos
        for part in ((None,) * 3 if proto is None else (proto.shape, proto.dtype, proto.quantizer))
    )
    ctx.settings = tuple(settings)
    ctx.anchored = tuple(p is not None and p.quantizer is not None for p in protos[:2])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = restore_from_saved(ctx.objects, ctx.saved_tensors)
    made = list(backward_op(grads[0], *saved, *ctx.described, *ctx.settings))
    found = [made.pop(0) if needed else None for needed in ctx.settings[:3]]
    (dx, anchored_dx), (dw, anchored_dw) = (
        (None, g) if anchored else (g, None)
        for g, anchored in zip(found, ctx.anchored, strict=False)
    )
    rest = (None,) * (3 + len(ctx.settings))
    return (dx, dw, found[2], None, anchored_dx, anchored_dw, *rest)


def _backward_plan(device: Any, *arguments: Any) -> LinearPlan:
    described, settings = arguments[:12], arguments[12:]
    protos = [
        None
        if described[at + 1] is None
        else TensorProto(
            shape=described[at],
            dtype=described[at + 1],
            quantizer=described[at + 2],
            device=device,
        )
        for at in range(0, 12, 3)
    ]
    return _plan(*protos, *settings)


def _backward_outputs(
    grad: TensorProto, saved_x: Any, saved_w: Any, rng: Any, input_rng: Any, *arguments: Any
) -> tuple[TensorProto, ...]:
    return _backward_plan(grad.device, *arguments).gradients


@custom_op("te_linear::backward", outputs=_backward_outputs)
def backward_op(
    grad_output: Any,
    saved_input: Any,
    saved_weight: Any,
    rng: Tensor | None,
    input_rng: Tensor | None,
    input_shape: tuple[int, ...],
    input_dtype: torch.dtype,
    input_held: Quantizer | None,
    weight_shape: tuple[int, ...],
    weight_dtype: torch.dtype,
    weight_held: Quantizer | None,
    bias_shape: tuple[int, ...] | None,
    bias_dtype: torch.dtype | None,
    bias_held: None,
    cached_shape: tuple[int, ...] | None,
    cached_dtype: torch.dtype | None,
    cached_held: Quantizer | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    autocast: torch.dtype | None,
    input_quantizer: Quantizer,
    weight_quantizer: Quantizer,
    grad_quantizer: Quantizer,
    save_original_input: bool,
    parallel_mode: str | None,
    tp_size: int,
    tp_group: str | None,
    sequence_parallel: bool,
    amax_group: str | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias that are needed."""
    plan = _backward_plan(
        grad_output.device,
        input_shape,
        input_dtype,
        input_held,
        weight_shape,
        weight_dtype,
        weight_held,
        bias_shape,
        bias_dtype,
        bias_held,
        cached_shape,
        cached_dtype,
        cached_held,
        need_input,
        need_weight,
        need_bias,
        autocast,
        input_quantizer,
        weight_quantizer,
        grad_quantizer,
        save_original_input,
        parallel_mode,
        tp_size,
        tp_group,
        sequence_parallel,
        amax_group,
    )
    saved = Saved(saved_input, saved_weight, rng, input_rng)
    found = execute_backward(plan, saved, grad_output)
    return tuple(g for g in found if g is not None)


forward_op.register_autograd(_backward, setup_context=_setup)
