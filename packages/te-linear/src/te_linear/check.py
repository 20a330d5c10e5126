# SPDX-License-Identifier: Apache-2.0
"""Whether the operands of a linear layer fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_proto.errors import DtypeError, ShapeError, UsageError
from te_proto.layout import INPUT_DTYPES

if TYPE_CHECKING:
    from te_linear.config import LinearConfig
    from te_proto.proto import TensorProto


def check_operands(
    x: TensorProto,
    weight: TensorProto,
    bias: TensorProto | None,
    cached_weight: TensorProto | None,
    config: LinearConfig,
) -> None:
    """Raise unless dtypes are those that quantizers take and shapes fit together.

    Raises:
        DtypeError: an operand is not float32, bfloat16 or float16.
        ShapeError: shapes do not fit together, or cannot be cut among the ranks.
        UsageError: the cached weight is not quantized, or the weight is too.
    """
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
    if cached_weight is not None:
        _check_cached(weight, cached_weight)
    if config.sequence_parallel and config.tp_size > 1:
        _check_sequence(x, config)


def _check_cached(weight: TensorProto, cached: TensorProto) -> None:
    if cached.quantizer is None or weight.quantizer is not None:
        given = "a plain tensor" if cached.quantizer is None else "one beside a quantized weight"
        msg = (
            f"linear: cached_weight must be quantized, and stand for a plain weight, got {given}; "
            "make it with quantize_weight()"
        )
        raise UsageError(msg)
    if cached.shape != weight.shape:
        msg = f"linear: cached_weight must have shape {weight.shape}, got {cached.shape}"
        raise ShapeError(msg)


def _check_sequence(x: TensorProto, config: LinearConfig) -> None:
    if len(x.shape) < 2:
        msg = (
            "linear: sequence parallel ranks cut the first axis of input, which must not be the "
            f"last, got shape {x.shape}; give it 2 axes"
        )
        raise ShapeError(msg)
    if config.parallel_mode == "row" and x.shape[0] % config.tp_size:
        msg = (
            f"linear: the first axis of input must be a multiple of TP = {config.tp_size}, which "
            f"sequence parallel ranks cut the output by, got shape {x.shape}"
        )
        raise ShapeError(msg)
