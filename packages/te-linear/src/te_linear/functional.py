# SPDX-License-Identifier: Apache-2.0
"""``linear()``: one plan, run as code that a graph sees through or as one opaque op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_linear.execute import Draws, Saved, draw, execute_backward, execute_forward, finish_output
from te_linear.plan import LinearPlan, plan_linear, weight_quantizer
from te_linear.rng import draw_rng
from te_proto.errors import UsageError
from te_proto.graphs import uses_new_quantizers
from te_proto.proto import to_tensor_proto
from te_proto.storage import prepare_for_saving, restore_from_saved

if TYPE_CHECKING:
    from te_linear.config import LinearConfig
    from te_proto.storage import QuantizedStorage
    from te_proto.tensor import QuantizedTensor

MODES = ("traced", "opaque")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cached_weight: Any,
        rng_input: Tensor | None,
        rng_weight: Tensor | None,
        rng_grad: Tensor | None,
        plan: LinearPlan,
    ) -> Tensor:
        draws = Draws(rng_input, rng_weight, rng_grad)
        y, saved = execute_forward(plan, x, weight, bias, draws, cached_weight)
        flat, ctx.objects = prepare_for_saving(*saved)
        ctx.save_for_backward(*flat)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*restore_from_saved(ctx.objects, ctx.saved_tensors))
        return (*execute_backward(ctx.plan, saved, grad_output), None, None, None, None, None)


@uses_new_quantizers
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: LinearConfig,
    cached_weight: Tensor | QuantizedStorage | None = None,
    mode: str = "traced",
) -> Tensor:
    """Return ``x @ weight.T + bias`` computed from quantized operands, also in backward.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16, or a quantized tensor; this rank's part if the
            layer is parallel, as are all that follow.
        weight: ``[N, K]``, likewise.
        bias: ``[N]`` or None; added in float32.
        config: the quantizer of each role, and how the layer is sharded.
        cached_weight: ``weight`` as :func:`quantize_weight` made it, which is read instead; the
            gradient is ``weight``'s.
        mode: ``"traced"``: a compiled graph sees through it, and Inductor fuses quantization with
            its neighbours; ``"opaque"``: it is one op of the graph, which AOTAutograd caches.
            Outside of a graph both are the same.

    Returns:
        ``[..., N]`` of ``x``'s dtype, or of autocast's; products are summed in float32. Quantized
        if the configuration has an output quantizer.

    Raises:
        ShapeError: shapes do not fit together, or a format cannot hold an operand of forward or
            backward; nothing was computed.
        DtypeError: an operand is not float32, bfloat16 or float16.
        UsageError: an operand that is already quantized lacks a plane, or ``mode`` is another.
    """
    check_mode(mode)
    plan = plan_call(x, weight, bias, config, cached_weight)
    draws = draw(plan)
    if mode == "opaque":
        from te_linear.ops import run_opaque  # its ops are defined at first use

        y = run_opaque(plan, x, weight, bias, cached_weight, draws)
    elif plan.product.requires_grad:
        if torch.compiler.is_dynamo_compiling():
            _touch_constants(plan)
        y = _Linear.apply(x, weight, bias, cached_weight, *draws[:3], plan)
    else:
        y = execute_forward(plan, x, weight, bias, draws, cached_weight)[0]
    out: Tensor = finish_output(plan, y, draws)
    return out


def _touch_constants(plan: LinearPlan) -> None:
    """Have a graph see the constants of formats before the layer does; nothing of it is left.

    With ``dynamic=True`` dynamo (torch 2.13) takes a float of a module for a symbol, which it keeps
    where it first meets it. Inside an autograd function that is out of reach of what follows, the
    next layer among them.
    """
    for step in (plan.input, plan.weight, plan.grad_output):
        if step is None:
            continue
        quantizer, rng = step.local.quantizer, None
        assert quantizer is not None  # of an operand
        if "group" in quantizer.call_arguments():
            quantizer = quantizer.at_rest()
        device = step.local.device
        if "rng" in quantizer.call_arguments():
            rng = torch.zeros(2, dtype=torch.int64, device=device)
        x = torch.zeros(step.local.shape, dtype=step.local.dtype, device=device)
        made = quantizer.quantize(x, rng=rng)
        for plane, on in (("columnwise", quantizer.rowwise), ("rowwise", quantizer.columnwise)):
            if on:
                made.with_usage(**{plane: False}).dequantize(torch.float32)


def plan_call(
    x: Any, weight: Any, bias: Any, config: LinearConfig, cached_weight: Any = None
) -> LinearPlan:
    """Return the plan of a call now: under this grad mode and autocast."""
    kind = x.device.type
    autocast = None
    if kind != "meta" and torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
    return plan_linear(
        to_tensor_proto(x),
        to_tensor_proto(weight),
        None if bias is None else to_tensor_proto(bias),
        config,
        grad_enabled=torch.is_grad_enabled(),
        cached_weight=None if cached_weight is None else to_tensor_proto(cached_weight),
        autocast=autocast,
    )


def check_mode(mode: str) -> str:
    """Return ``mode``, or raise :class:`UsageError` if there is no such one."""
    if mode not in MODES:
        msg = f"linear: mode must be 'traced' or 'opaque', got {mode!r}"
        raise UsageError(msg)
    return mode


@uses_new_quantizers
def quantize_weight(
    weight: Tensor,
    config: LinearConfig,
    *,
    out: QuantizedTensor | None = None,
    noop: Tensor | None = None,
) -> Any:
    """Return ``weight`` quantized for :func:`linear`'s ``cached_weight``, outside autograd.

    Args:
        weight: ``[N, K]``, plain.
        config: as for :func:`linear`.
        out: what an earlier call returned, whose buffers are written, and returned.
        noop: float32 scalar tensor; exactly 1.0 leaves ``out`` as it is, decided on the device.
    """
    quantizer = weight_quantizer(config)
    needed = quantizer.call_arguments()
    with torch.no_grad():
        call: dict[str, Any] = {
            "group": (config.amax_group or config.tp_group) if "group" in needed else None,
            "rng": draw_rng(weight) if "rng" in needed else None,
        }
        if out is None:
            return quantizer.quantize(weight, **call)
        quantizer.quantize_into(weight, out, noop, **call)
        return out
