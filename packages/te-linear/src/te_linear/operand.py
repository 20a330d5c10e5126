# SPDX-License-Identifier: Apache-2.0
"""How one operand of the products is made: decided from prototypes, followed by the executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_linear.sharding import gathered, join_axes
from te_proto.errors import QuantizerError, ShapeError, UsageError
from te_proto.proto import TensorProto

if TYPE_CHECKING:
    from te_proto.quantizer import Quantizer


@dataclass(frozen=True, kw_only=True)
class OperandPlan:
    """How one operand of the products is made.

    Attributes:
        source: ``"quantize"`` a plain tensor, ``"requantize"`` a quantized one that does not hold
            what the products read, or take the ``"planes"`` of one that does.
        local: what this rank makes.
        names: inner tensors of ``local``.
        group: over which the quantizer reduces its amax, None if it does not.
        gather: what the ranks bring together: nothing (None), ``"quantized"`` bytes, or ``"plain"``
            values before they are quantized.
        axes: for quantized bytes, the axis of each inner tensor along which ranks follow each
            other, None for one that is the same on all.
        operand: what the products read.
    """

    source: str
    local: TensorProto
    names: tuple[str, ...]
    group: str | None
    gather: str | None
    axes: tuple[int | None, ...]
    operand: TensorProto

    def needs_rng(self) -> bool:
        """Return whether its quantizer rounds stochastically."""
        quantizer = self.local.quantizer
        assert quantizer is not None  # an operand is quantized
        return self.source != "planes" and "rng" in quantizer.call_arguments()


def plan_operand(
    role: str,
    given: TensorProto,
    quantizer: Quantizer,
    *,
    rowwise: bool,
    columnwise: bool,
    amax_group: str | None,
    ranks: int = 1,
    takes: bool = True,
) -> OperandPlan:
    """Decide how ``given`` becomes an operand with the planes that are asked for.

    Args:
        role: of the operand, for messages.
        given: the tensor, this rank's part of it if ``ranks`` is more than 1.
        quantizer: of the role, for a tensor that is not quantized.
        rowwise: a product sums over the last axis.
        columnwise: a product sums over the rows.
        amax_group: for a quantizer that reduces its amax.
        ranks: how many hold a part of the rows each, which is gathered.
        takes: planes of a quantized tensor are taken; they must be there. False quantizes anew
            what does not fit.

    Raises:
        ShapeError: the format cannot hold it.
        UsageError: it is quantized and lacks a plane, or its shards cannot be put together.
    """
    planes = {"rowwise": rowwise, "columnwise": columnwise}
    if given.quantizer is not None:
        taken = _take(role, given, given.quantizer, planes, ranks, must=takes)
        if taken is not None:
            return taken
    source = "quantize" if given.quantizer is None else "requantize"
    bare = quantizer.replace(internal=True, **planes)
    if ranks == 1:
        return _make(role, source, given, bare, amax_group, 1, ())
    # scales must lie as they are compact, and one value for all rows must be that of all ranks
    shard = bare.replace(optimize_for_gemm=False)
    _fits(role, given.replace(quantizer=shard), ranks)
    axes = join_axes(shard, given.shape)
    if axes is not None and None in axes:
        reducing = _reducing(shard)
        axes, shard = (None, shard) if reducing is None else (axes, reducing)
    if axes is None:
        whole = given.replace(shape=gathered(given.shape, ranks))
        return _make(role, source, whole, bare, amax_group, 1, (), gather="plain")
    return _make(role, source, given, shard, amax_group, ranks, axes)


def _take(
    role: str,
    given: TensorProto,
    quantizer: Quantizer,
    planes: dict[str, bool],
    ranks: int,
    *,
    must: bool,
) -> OperandPlan | None:
    """Return the plan to take ``planes`` of a quantized tensor, None if they are not there."""
    lacking = [name for name, wanted in planes.items() if wanted and not getattr(quantizer, name)]
    if lacking and must:
        other = next(name for name in planes if name != lacking[0])
        msg = (
            f"linear: {role} must hold the {lacking[0]} plane, got {other} alone; "
            "quantize it with that usage"
        )
        raise UsageError(msg)
    bare = quantizer.replace(internal=True, **planes)
    axes = () if ranks == 1 or lacking else join_axes(bare, given.shape)
    if not lacking and axes is not None and None not in axes:
        return _make(role, "planes", given, bare, None, ranks, axes)
    if must:
        msg = (
            f"linear: {role} of shape {given.shape} is quantized, and the parts of {ranks} "
            f"ranks cannot be put together: a buffer of {quantizer.format_name} has a ragged "
            "block, padding, or one value for all rows; give it plain"
        )
        raise UsageError(msg)
    return None


def _make(
    role: str,
    source: str,
    given: TensorProto,
    quantizer: Quantizer,
    amax_group: str | None,
    ranks: int,
    axes: tuple[int | None, ...],
    gather: str | None = None,
) -> OperandPlan:
    local = TensorProto(
        shape=given.shape, dtype=given.dtype, quantizer=quantizer, device=given.device
    )
    names = _fits(role, local, ranks)
    reduces = source != "planes" and "group" in quantizer.call_arguments()
    if reduces and amax_group is None:
        msg = (
            f"linear: the quantizer of {role} reduces its amax over a group, got none; "
            "set amax_group or tp_group of the configuration"
        )
        raise UsageError(msg)
    operand = local
    if ranks > 1:
        gather = "quantized"
        operand = local.replace(shape=gathered(local.shape, ranks))
        operand.inner_specs()
    return OperandPlan(
        source=source,
        local=local,
        names=names,
        group=amax_group if reduces else None,
        gather=gather,
        axes=axes,
        operand=operand,
    )


def _reducing(quantizer: Quantizer) -> Quantizer | None:
    """Return the quantizer that takes its amax over the ranks, None if the format has none."""
    if not hasattr(quantizer, "with_amax_reduction"):
        return None
    try:
        return quantizer.replace(with_amax_reduction=True)
    except QuantizerError:
        return None


def _fits(role: str, proto: TensorProto, ranks: int) -> tuple[str, ...]:
    """Return the names of the inner tensors, or raise if the format cannot hold the shape."""
    try:
        return tuple(proto.inner_specs())
    except ShapeError as error:
        assert proto.quantizer is not None  # of an operand
        msg = f"linear: {role} of shape {proto.shape}: {error}"
        multiple = proto.quantizer.alignment()[0]
        if ranks > 1 and multiple > 1:
            msg += (
                f"; the rows of all {ranks} sequence parallel ranks must be a multiple of "
                f"{multiple} x TP = {multiple * ranks}"
            )
        raise ShapeError(msg) from error
