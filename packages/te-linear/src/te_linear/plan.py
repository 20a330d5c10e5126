# SPDX-License-Identifier: Apache-2.0
"""The one place that decides what a linear layer does, from prototypes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_proto.errors import DtypeError, ShapeError, UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.proto import TensorProto

if TYPE_CHECKING:
    from typing_extensions import Self

    from te_proto.quantizer import Quantizer
    from te_proto.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """How a linear layer quantizes, as a value.

    The usages of the quantizers do not count: the plan sets the ones each operand needs.

    Attributes:
        input: quantizer of the input.
        weight: quantizer of the weight.
        grad_output: quantizer of the gradient of the output.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """Return the configuration that a format's recipe stands for."""
        return cls(input=recipe.input, weight=recipe.weight, grad_output=recipe.grad_output)


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """What one call of a linear layer makes, keeps and returns; the executor decides nothing.

    ``y = x @ weight.T + bias``; in backward ``dx = dy @ weight`` and ``dweight = dy.T @ x``. Each
    product reads the plane of its operands whose blocks run along the summed axis.

    Attributes:
        quantized_input: the input as the forward quantizes it.
        quantized_weight: the weight as the forward quantizes it.
        output: the result.
        saved_input: what is kept of the input for backward, None if the weight takes no gradient.
        saved_weight: what is kept of the weight, None if the input takes no gradient.
        quantized_grad_output: the gradient of the output, ``[M, N]``, None if no product needs it.
        saved_rng: seed and offset that the forward drew for the gradient of the output, None if its
            quantizer takes none.
        grad_input: None if not required.
        grad_weight: None if not required.
        grad_bias: None if not required, or if there is no bias.
    """

    quantized_input: TensorProto
    quantized_weight: TensorProto
    output: TensorProto
    saved_input: TensorProto | None
    saved_weight: TensorProto | None
    quantized_grad_output: TensorProto | None
    saved_rng: TensorProto | None
    grad_input: TensorProto | None
    grad_weight: TensorProto | None
    grad_bias: TensorProto | None

    @property
    def saved(self) -> tuple[TensorProto, ...]:
        """What is kept for backward: input, weight, seed and offset; absent ones left out."""
        kept = (self.saved_input, self.saved_weight, self.saved_rng)
        return tuple(p for p in kept if p is not None)


def plan_linear(
    x: TensorProto,
    weight: TensorProto,
    bias: TensorProto | None,
    config: LinearConfig,
    *,
    grad_enabled: bool,
) -> LinearPlan:
    """Decide everything about ``linear(x, weight, bias)``; nothing is allocated.

    Args:
        x: ``[..., K]``, plain or quantized.
        weight: ``[N, K]``, plain or quantized.
        bias: ``[N]``, plain, or None.
        config: the quantizer of each role.
        grad_enabled: grad mode of the call; with ``requires_grad`` of the operands it decides what
            is kept. Backward never reads either again.

    Raises:
        ShapeError: shapes do not fit together, or a format cannot hold an operand, also one that
            only backward makes; the message names the operand.
        DtypeError: an operand is not float32, bfloat16 or float16.
        UsageError: an operand that is already quantized lacks a plane.
    """
    _check(x, weight, bias)
    m, n, k = math.prod(x.shape[:-1]), weight.shape[0], weight.shape[1]
    dgrad = grad_enabled and x.requires_grad
    wgrad = grad_enabled and weight.requires_grad
    bgrad = grad_enabled and bias is not None and bias.requires_grad

    quantized_input = _operand("input", x, config.input, x.shape, columnwise=wgrad)
    quantized_weight = _operand("weight", weight, config.weight, (n, k), columnwise=dgrad)
    grad_output = rng = None
    if dgrad or wgrad:
        quantizer = config.grad_output.replace(internal=True, rowwise=dgrad, columnwise=wgrad)
        grad_output = TensorProto(shape=(m, n), dtype=x.dtype, quantizer=quantizer, device=x.device)
        _fits("grad_output", grad_output)
        if "rng" in quantizer.call_arguments():
            rng = TensorProto(shape=(2,), dtype=torch.int64, device=x.device)

    def plain(proto: TensorProto) -> TensorProto:
        return TensorProto(shape=proto.shape, dtype=proto.dtype, device=proto.device)

    return LinearPlan(
        quantized_input=quantized_input,
        quantized_weight=quantized_weight,
        output=TensorProto(
            shape=(*x.shape[:-1], n),
            dtype=x.dtype,
            device=x.device,
            requires_grad=dgrad or wgrad or bgrad,
        ),
        saved_input=quantized_input.with_usage(rowwise=False) if wgrad else None,
        saved_weight=quantized_weight.with_usage(rowwise=False) if dgrad else None,
        quantized_grad_output=grad_output,
        saved_rng=rng,
        grad_input=plain(x) if dgrad else None,
        grad_weight=plain(weight) if wgrad else None,
        grad_bias=plain(bias) if bgrad and bias is not None else None,
    )


def _operand(
    role: str, given: TensorProto, quantizer: Quantizer, shape: tuple[int, ...], *, columnwise: bool
) -> TensorProto:
    """Return the quantized form of an operand that forward reads rowwise."""
    if given.quantizer is not None:
        quantizer = given.quantizer
        if not quantizer.rowwise or (columnwise and not quantizer.columnwise):
            lacks, has = (
                ("rowwise", "columnwise") if not quantizer.rowwise else ("columnwise", "rowwise")
            )
            msg = (
                f"linear: {role} must hold the {lacks} plane, got {has} alone; "
                f"quantize it with that usage"
            )
            raise UsageError(msg)
    quantizer = quantizer.replace(internal=True, rowwise=True, columnwise=columnwise)
    proto = TensorProto(shape=shape, dtype=given.dtype, quantizer=quantizer, device=given.device)
    _fits(role, proto)
    return proto


def _fits(role: str, proto: TensorProto) -> None:
    try:
        proto.inner_specs()
    except ShapeError as error:
        msg = f"linear: {role} of shape {proto.shape}: {error}"
        raise ShapeError(msg) from error


def _check(x: TensorProto, weight: TensorProto, bias: TensorProto | None) -> None:
    for role, proto in (("input", x), ("weight", weight), ("bias", bias)):
        if proto is not None and proto.dtype not in INPUT_DTYPES:
            msg = (
                f"linear: {role} must be float32, bfloat16 or float16, got {str(proto.dtype)[6:]}; "
                "cast it first"
            )
            raise DtypeError(msg)
    if len(weight.shape) != 2:
        msg = f"linear: weight must have 2 axes [N, K], got shape {weight.shape}"
        raise ShapeError(msg)
    if len(x.shape) < 1 or x.shape[-1] != weight.shape[1]:
        msg = (
            f"linear: the last axis of input must be K={weight.shape[1]} of the weight, "
            f"got shape {x.shape}"
        )
        raise ShapeError(msg)
    if bias is not None and (len(bias.shape) != 1 or bias.shape[0] != weight.shape[0]):
        msg = (
            f"linear: bias must have shape {(weight.shape[0],)}, N of the weight, got {bias.shape}"
        )
        raise ShapeError(msg)
