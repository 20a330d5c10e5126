# SPDX-License-Identifier: Apache-2.0
"""The one place that decides what a linear layer does, from prototypes alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_linear.check import check_operands
from te_linear.operand import OperandPlan, plan_operand
from te_linear.sharding import constant, gathered, scattered
from te_proto.proto import TensorProto

if TYPE_CHECKING:
    from te_linear.config import LinearConfig
    from te_proto.quantizer import Quantizer


ROLES = ("input", "weight", "grad_output", "output")


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """What one call of a linear layer makes, keeps and returns; the executor decides nothing.

    ``y = x @ weight.T + bias``; in backward ``dx = dy @ weight`` and ``dweight = dy.T @ x``. Each
    product reads the plane of its operands whose blocks run along the summed axis.

    Attributes:
        input: how the input becomes the operand of forward.
        weight: how the weight becomes the operand of forward.
        grad_output: how the gradient of the output becomes an operand, if it comes plain; None if
            no product needs it. :meth:`gradient_operand` is for any.
        saved_input_operand: how what is kept of the input becomes the operand of backward.
        product: the result before an output quantizer.
        output: the result.
        output_group: over which the output quantizer reduces its amax, None if it does not.
        saved_input: what is kept of the input for backward, None if the weight takes no gradient.
        saved_weight: what is kept of the weight, None if the input takes no gradient.
        keeps_argument_input: what may be kept is the argument, or planes of it, and no new memory.
        keeps_argument_weight: the same for the weight, or the cached one.
        saved_rng: seed and offset that the forward drew for the gradient of the output, None if its
            quantizer takes none.
        saved_input_rng: those of the input, if backward quantizes it anew.
        draws: roles for which seed and offset are drawn, in this order.
        gradient: the gradient of the output as the products see it, a matrix.
        grad_input: None if not required.
        grad_weight: None if not required.
        grad_bias: None if not required, or if there is no bias.
        reduce_product: sum over the ranks: ``"all_reduce"``, ``"reduce_scatter"`` or None.
        reduce_grad_input: the same for the gradient of the input.
        reduce_grad_bias: sum the gradient of the bias over the ranks.
        partial_product: the product before the sum over the ranks.
        partial_grad_input: the gradient of the input before the sum over the ranks.
        config: what was asked for.
    """

    input: OperandPlan
    weight: OperandPlan
    grad_output: OperandPlan | None
    saved_input_operand: OperandPlan | None
    product: TensorProto
    output: TensorProto
    output_group: str | None
    saved_input: TensorProto | None
    saved_weight: TensorProto | None
    keeps_argument_input: bool
    keeps_argument_weight: bool
    saved_rng: TensorProto | None
    saved_input_rng: TensorProto | None
    draws: tuple[str, ...]
    gradient: TensorProto
    grad_input: TensorProto | None
    grad_weight: TensorProto | None
    grad_bias: TensorProto | None
    reduce_product: str | None
    reduce_grad_input: str | None
    reduce_grad_bias: bool
    partial_product: TensorProto
    partial_grad_input: TensorProto | None
    config: LinearConfig

    @property
    def ranks(self) -> int:
        """Size of the tensor parallel group."""
        return constant(self.config.tp_size)

    @property
    def group(self) -> str | None:
        """Its c10d name."""
        return self.config.tp_group

    @property
    def quantized_input(self) -> TensorProto:
        """The input as this rank quantizes it."""
        return self.input.local

    @property
    def quantized_weight(self) -> TensorProto:
        """The weight as the forward quantizes it."""
        return self.weight.local

    @property
    def quantized_grad_output(self) -> TensorProto | None:
        """The gradient of the output as this rank quantizes it, None if no product needs it."""
        return None if self.grad_output is None else self.grad_output.local

    @property
    def saved(self) -> tuple[TensorProto, ...]:
        """What is kept for backward: input, weight, seeds and offsets; absent ones left out."""
        kept = (self.saved_input, self.saved_weight, self.saved_rng, self.saved_input_rng)
        return tuple(p for p in kept if p is not None)

    @property
    def made(self) -> tuple[TensorProto, ...]:
        """What forward allocates: the product, and what is kept and no argument."""
        kept = (
            None if self.keeps_argument_input else self.saved_input,
            None if self.keeps_argument_weight else self.saved_weight,
        )
        return (self.product, *(p for p in kept if p is not None))

    @property
    def gradients(self) -> tuple[TensorProto, ...]:
        """What backward returns: of input, weight and bias; absent ones left out."""
        all_of_them = (self.grad_input, self.grad_weight, self.grad_bias)
        return tuple(p for p in all_of_them if p is not None)

    def gradient_operand(self, given: TensorProto) -> OperandPlan | None:
        """Decide how a gradient becomes an operand: one may come quantized.

        Its planes are taken if they are those that the products read, else it is quantized anew.
        """
        if self.grad_output is None or given.quantizer is None:
            return self.grad_output
        return _plan_gradient(
            given,
            self.config,
            self.ranks if self.grad_output.gather else 1,
            rowwise=self.grad_input is not None,
            columnwise=self.grad_weight is not None,
        )


def plan_linear(
    x: TensorProto,
    weight: TensorProto,
    bias: TensorProto | None,
    config: LinearConfig,
    *,
    grad_enabled: bool,
    cached_weight: TensorProto | None = None,
    autocast: torch.dtype | None = None,
) -> LinearPlan:
    """Decide everything about ``linear(x, weight, bias)``; nothing is allocated.

    Args:
        x: ``[..., K]``, plain or quantized; this rank's part if the layer is parallel.
        weight: ``[N, K]``, plain or quantized, likewise.
        bias: ``[N]``, plain, or None, likewise.
        config: the quantizer of each role, and how the layer is sharded.
        grad_enabled: grad mode of the call; with ``requires_grad`` of the operands it decides what
            is kept. Backward never reads either again.
        cached_weight: the quantized weight that stands for ``weight`` in the products.
        autocast: dtype of plain input and output under autocast, None outside of it.

    Raises:
        ShapeError: shapes do not fit together, or a format cannot hold an operand, also one that
            only backward makes; the message names the operand.
        DtypeError: an operand is not float32, bfloat16 or float16.
        UsageError: an operand that is already quantized lacks a plane.
    """
    arguments = (x, weight, bias, config, grad_enabled, cached_weight, autocast)
    if torch.compiler.is_compiling() or not _is_static(x, weight, bias):
        return _plan(*arguments)
    return _remembered(*arguments)


def weight_quantizer(config: LinearConfig) -> Quantizer:
    """Return the quantizer of a weight that is kept from call to call, for whatever they need."""
    return config.weight.replace(internal=False, rowwise=True, columnwise=True)


def _is_static(*protos: TensorProto | None) -> bool:
    return all(type(n) is int for p in protos if p is not None for n in p.shape)


def _plan(
    x: TensorProto,
    weight: TensorProto,
    bias: TensorProto | None,
    config: LinearConfig,
    grad_enabled: bool,
    cached: TensorProto | None,
    autocast: torch.dtype | None,
) -> LinearPlan:
    check_operands(x, weight, bias, cached, config)
    ranks = constant(config.tp_size)
    column, row = (config.parallel_mode == mode and ranks > 1 for mode in ("column", "row"))
    sequence = config.sequence_parallel
    dgrad = grad_enabled and x.requires_grad
    wgrad = grad_enabled and weight.requires_grad
    bgrad = grad_enabled and bias is not None and bias.requires_grad
    gathers_x, gathers_dy = (ranks if way and sequence else 1 for way in (column, row))

    value = x if autocast is None else x.replace(dtype=autocast)
    first, again = _plan_input(value, config, gathers_x, wgrad=wgrad)
    weight_plan = _plan_weight(cached or weight, config, dgrad=dgrad)
    whole = gathered(x.shape, gathers_x)
    partial = _plain(value, (*whole[:-1], weight.shape[0]))
    product = _plain(value, scattered(partial.shape, gathers_dy))
    product = product.replace(requires_grad=dgrad or wgrad or bgrad)
    gradient = _plain(value, (math.prod(product.shape[:-1]), weight.shape[0]))
    grad_output = _plan_gradient(gradient, config, gathers_dy, rowwise=dgrad, columnwise=wgrad)
    output, output_group, output_rng = _plan_output(product, config)
    rng = TensorProto(shape=(2,), dtype=torch.int64, device=x.device)
    input_rng, grad_rng = (p is not None and p.needs_rng() for p in (again, grad_output))
    drawn = (first.needs_rng() or input_rng, weight_plan.needs_rng(), grad_rng, output_rng)
    reduction = "reduce_scatter" if sequence else "all_reduce"
    saved_input = _plan_saved_input(x, again)
    return LinearPlan(
        input=first,
        weight=weight_plan,
        grad_output=grad_output,
        saved_input_operand=again,
        product=product,
        output=output,
        output_group=output_group,
        saved_input=saved_input,
        saved_weight=weight_plan.local.with_usage(rowwise=False).at_rest() if dgrad else None,
        keeps_argument_input=first.source == "planes" or _is_plain(saved_input),
        keeps_argument_weight=weight_plan.source == "planes",
        saved_rng=rng if grad_rng else None,
        saved_input_rng=rng if input_rng else None,
        draws=tuple(role for role, on in zip(ROLES, drawn, strict=True) if on),
        gradient=gradient,
        grad_input=_plain(x) if dgrad else None,
        grad_weight=_plain(weight) if wgrad else None,
        grad_bias=_plain(bias) if bgrad and bias is not None else None,
        reduce_product=reduction if row else None,
        reduce_grad_input=reduction if column and dgrad else None,
        reduce_grad_bias=bgrad and gathers_dy > 1,
        partial_product=partial,
        partial_grad_input=_plain(x, whole) if dgrad else None,
        config=config,
    )


_remembered = functools.lru_cache(maxsize=1024)(_plan)


def _plain(proto: TensorProto, shape: tuple[int, ...] | None = None) -> TensorProto:
    return TensorProto(
        shape=proto.shape if shape is None else shape, dtype=proto.dtype, device=proto.device
    )


def _plan_input(
    x: TensorProto, config: LinearConfig, ranks: int, *, wgrad: bool
) -> tuple[OperandPlan, OperandPlan | None]:
    """Return how the input becomes the operand of forward, and what is kept that of backward."""

    def plan(*, rowwise: bool, columnwise: bool) -> OperandPlan:
        return plan_operand(
            "input",
            x,
            config.input,
            rowwise=rowwise,
            columnwise=columnwise,
            amax_group=config.amax_group or config.tp_group,
            ranks=ranks,
        )

    plain = x.quantizer is None
    if not wgrad:
        return plan(rowwise=True, columnwise=False), None
    if not (plain and config.save_original_input):
        first = plan(rowwise=True, columnwise=True)
        if first.gather != "plain":
            return first, _columnwise(first)
    # the planes of a whole that was gathered plain would be as many times what a rank holds
    return plan(rowwise=True, columnwise=False), plan(rowwise=False, columnwise=True)


def _plan_weight(weight: TensorProto, config: LinearConfig, *, dgrad: bool) -> OperandPlan:
    return plan_operand(
        "weight",
        weight,
        config.weight,
        rowwise=True,
        columnwise=dgrad,
        amax_group=config.amax_group or config.tp_group,
    )


def _plan_saved_input(x: TensorProto, again: OperandPlan | None) -> TensorProto | None:
    """Return what is kept of the input: the argument where backward quantizes it anew."""
    if again is None:
        return None
    return _plain(x) if again.source == "quantize" else again.local.at_rest()


def _is_plain(proto: TensorProto | None) -> bool:
    return proto is not None and proto.quantizer is None


def _columnwise(made: OperandPlan) -> OperandPlan:
    """Return how the columnwise plane of what was made becomes an operand of its own."""
    local = made.local.with_usage(rowwise=False)
    names = tuple(local.inner_specs())
    axes = dict(zip(made.names, made.axes, strict=False))
    return OperandPlan(
        source="planes",
        local=local,
        names=names,
        group=None,
        gather=made.gather,
        axes=tuple(axes[name] for name in names) if made.axes else (),
        operand=made.operand.with_usage(rowwise=False),
    )


def _plan_gradient(
    given: TensorProto, config: LinearConfig, ranks: int, *, rowwise: bool, columnwise: bool
) -> OperandPlan | None:
    """Return how the gradient becomes an operand, None if no product reads it."""
    if not (rowwise or columnwise):
        return None
    return plan_operand(
        "grad_output",
        given,
        config.grad_output,
        rowwise=rowwise,
        columnwise=columnwise,
        amax_group=config.amax_group or config.tp_group,
        ranks=ranks,
        takes=False,
    )


def _plan_output(
    product: TensorProto, config: LinearConfig
) -> tuple[TensorProto, str | None, bool]:
    """Return the output, the group of its quantizer, and whether that rounds stochastically."""
    if config.output is None:
        return product, None, False
    made = plan_operand(
        "output",
        product,
        config.output,
        rowwise=config.output.rowwise,
        columnwise=config.output.columnwise,
        amax_group=config.amax_group or config.tp_group,
    )
    quantizer = config.output.replace(internal=False)
    return product.replace(quantizer=quantizer), made.group, made.needs_rng()
