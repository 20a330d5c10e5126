# SPDX-License-Identifier: Apache-2.0
"""What a quantizer's calls refuse before anything is changed; each function raises or returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_proto.errors import DeviceError, DtypeError, LayoutError, ShapeError, UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_proto.quantizer import Quantizer


def check_input(q: Quantizer, x: Tensor) -> None:
    """Refuse dtypes, shapes and usages, and what the format does not take."""
    if x.dtype not in INPUT_DTYPES:
        names = ", ".join(str(d)[6:] for d in INPUT_DTYPES)
        msg = f"{q.format_name}: x must be one of {names}, got {str(x.dtype)[6:]}; cast it first"
        raise DtypeError(msg)
    if not (q.rowwise or q.columnwise):
        msg = (
            f"{q.format_name}: neither rowwise nor columnwise is on; turn one on with with_usage()"
        )
        raise UsageError(msg)
    q.check_shape(x.shape)
    q.check_input(x)


def check_out(q: Quantizer, x: Tensor, out: Any) -> None:
    """Refuse memory that is not what ``q`` makes of ``x``."""
    theirs = getattr(out, "quantizer", None)
    if theirs is None or theirs.replace(internal=q.internal) != q.at_rest():
        msg = (
            f"{q.format_name}: out must be described by {q}, "
            f"got {theirs or type(out).__name__}; use its own quantizer, or quantize anew"
        )
        raise LayoutError(msg)
    if x.shape != out.shape:
        msg = (
            f"{q.format_name}: out must have the shape of x, {tuple(x.shape)}, "
            f"got {tuple(out.shape)}"
        )
        raise ShapeError(msg)
    QuantizedStorage.check_writable(out)


def check_noop(q: Quantizer, noop: Tensor | None, device: torch.device) -> None:
    """Refuse a flag that is no float32 scalar on ``device``."""
    if noop is not None and (
        noop.dtype != torch.float32 or noop.numel() != 1 or noop.device != device
    ):
        msg = (
            f"{q.format_name}: noop must be one float32 element on {device}, "
            f"got {noop.dtype} of shape {tuple(noop.shape)} on {noop.device}"
        )
        raise DtypeError(msg) if noop.dtype != torch.float32 else DeviceError(msg)


def check_call(q: Quantizer, **given: Any) -> dict[str, Any]:
    """Return what ``q`` needs of ``group`` and ``rng``; refuse too few and too many."""
    needed = q.call_arguments()
    for name, value in given.items():
        if (value is not None) != (name in needed):
            rule = "needs" if name in needed else "takes no"
            msg = f"{q.format_name}: {q} {rule} {name} with the call, got {value}"
            raise UsageError(msg)
    return {name: given[name] for name in needed}
