# SPDX-License-Identifier: Apache-2.0
"""The layer as a pair of opaque ops, whose description is the plan.

An op runs below autograd: what requires grad and autocast come as arguments, so the plan that
describes its results is the one the caller made. A quantized argument is no more than its buffers
to an op, so its gradient goes to an anchor, a plain tensor of its shape without memory.
"""

from __future__ import annotations

import inspect
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
    from collections.abc import Callable, Sequence

_OF_CONFIG = (
    "input",
    "weight",
    "grad_output",
    "save_original_input",
    "parallel_mode",
    "tp_size",
    "tp_group",
    "sequence_parallel",
    "amax_group",
)
"""What the product depends on; an output quantizer comes after it."""

_OPERANDS = ("x", "weight", "bias", "cached_weight")
_SETTINGS = ("need_input", "need_weight", "need_bias", "autocast", *(f"of_{n}" for n in _OF_CONFIG))
_DESCRIBED = tuple(f"{n}_{what}" for n in _OPERANDS for what in ("shape", "dtype", "quantizer"))


def _takes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Name the arguments of a function, which an op has to know."""

    def name(fn: Callable[..., Any]) -> Callable[..., Any]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(n, kind) for n in names]
        fn.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as documented
        return fn

    return name


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
    """Return the settings that :func:`_plan` puts together again."""
    options = {name: getattr(config, name) for name in _OF_CONFIG}
    options["tp_size"] = constant(config.tp_size)
    return tuple(options.values())


def _plan(protos: Sequence[TensorProto | None], settings: Sequence[Any]) -> LinearPlan:
    """Return the plan of the call that an op was made of."""
    x, weight, bias, cached_weight = protos
    need_input, need_weight, need_bias, autocast, *options = settings
    assert x is not None  # neither is optional
    assert weight is not None
    return plan_linear(
        x.replace(requires_grad=need_input),
        weight.replace(requires_grad=need_weight),
        None if bias is None else bias.replace(requires_grad=need_bias),
        LinearConfig(**dict(zip(_OF_CONFIG, options, strict=True))),
        grad_enabled=True,
        cached_weight=cached_weight,
        autocast=autocast,
    )


def _protos(values: Sequence[Any]) -> list[TensorProto | None]:
    return [None if v is None else to_tensor_proto(v) for v in values]


def _forward_outputs(*arguments: Any) -> tuple[TensorProto, ...]:
    return _plan(arguments[:4], arguments[9:]).made


@custom_op("te_linear::forward", outputs=_forward_outputs)
@_takes(
    *_OPERANDS,
    "x_anchor",
    "weight_anchor",
    "x_rng",
    "weight_rng",
    "grad_rng",
    *_SETTINGS,
)
def forward_op(*arguments: Any) -> tuple[Any, ...]:
    """Return the product, and what is kept for backward and is no argument."""
    x, weight, bias, cached_weight, _, _, *rng = arguments[:9]
    plan = _plan(_protos(arguments[:4]), arguments[9:])
    y, saved = execute_forward(plan, x, weight, bias, Draws(*rng), cached_weight)
    kept = (
        None if plan.keeps_argument_input else saved.input,
        None if plan.keeps_argument_weight else saved.weight,
    )
    return (y, *(k for k in kept if k is not None))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, _, cached, _, _, x_rng, _, grad_rng = inputs[:9]
    ctx.settings = inputs[9:]
    protos = _protos(inputs[:4])
    plan = _plan(protos, ctx.settings)
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
        None if plan.saved_input_rng is None else x_rng,
    )
    flat, ctx.objects = prepare_for_saving(*saved)
    ctx.save_for_backward(*flat)
    ctx.described = tuple(
        part
        for proto in protos
        for part in ((None,) * 3 if proto is None else (proto.shape, proto.dtype, proto.quantizer))
    )
    ctx.anchored = tuple(p is not None and p.is_quantized for p in protos[:2])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = restore_from_saved(ctx.objects, ctx.saved_tensors)
    made = list(backward_op(grads[0], *saved, *ctx.described, *ctx.settings))
    dx, dw, db = (made.pop(0) if needed else None for needed in ctx.settings[:3])
    of_x, of_weight = (
        (None, grad) if anchored else (grad, None)
        for grad, anchored in zip((dx, dw), ctx.anchored, strict=True)
    )
    rest = (None,) * (3 + len(ctx.settings))
    return (of_x[0], of_weight[0], db, None, of_x[1], of_weight[1], *rest)


def _backward_plan(device: Any, described: Sequence[Any], settings: Sequence[Any]) -> LinearPlan:
    protos = [
        TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device=device)
        if dtype is not None
        else None
        for shape, dtype, quantizer in zip(
            described[0::3], described[1::3], described[2::3], strict=True
        )
    ]
    return _plan(protos, settings)


def _backward_outputs(grad: TensorProto, *arguments: Any) -> tuple[TensorProto, ...]:
    return _backward_plan(grad.device, arguments[4:16], arguments[16:]).gradients


@custom_op("te_linear::backward", outputs=_backward_outputs)
@_takes("grad_output", "saved_input", "saved_weight", "grad_rng", "x_rng", *_DESCRIBED, *_SETTINGS)
def backward_op(grad_output: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias that are needed."""
    plan = _backward_plan(grad_output.device, arguments[4:16], arguments[16:])
    found = execute_backward(plan, Saved(*arguments[:4]), grad_output)
    return tuple(g for g in found if g is not None)


forward_op.register_autograd(_backward, setup_context=_setup)
