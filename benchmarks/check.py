# SPDX-License-Identifier: Apache-2.0
"""Whether a result may be timed: within the format's error, and compiled as eager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import max_pool2d

from te_proto.errors import QuantizerError
from te_proto.numerics.formats import E2M1, ElementFormat, element_format
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor


class WrongResultError(Exception):
    """A result that must not be timed; the text says how it is wrong."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The largest error that a rounding to a format makes.

    It is half the distance of two codes: a fraction of the value, or, below the smallest normal
    code, of the block's scale. That scale takes the block's maximum to the largest code, and is at
    most doubled when it is rounded itself.

    Attributes:
        element: element format of the codes.
        block: ``(rows, columns)`` that share a scale rowwise; 0 stands for the whole axis.
        stochastic: codes are rounded up or down, not to the nearest.
    """

    element: ElementFormat
    block: tuple[int, int]
    stochastic: bool = False

    def check(self, x: Tensor, values: Tensor, *, columnwise: bool = False) -> None:
        """Raise :class:`WrongResultError` unless the matrix ``values`` is ``x``, rounded.

        Args:
            x: what was quantized.
            values: what came back.
            columnwise: the blocks run along the rows.
        """
        if values.shape != x.shape or values.dtype != x.dtype:
            msg = f"{values.dtype} of {tuple(values.shape)} for {x.dtype} of {tuple(x.shape)}"
            raise WrongResultError(msg)
        exact = x.float().t() if columnwise else x.float()
        error = (values.float().t() if columnwise else values.float()).sub(exact).abs_()
        amax = _block_amax(exact, self.block)
        steps = 2.0 if self.stochastic else 1.0
        relative = steps * 2.0 ** -(self.element.mantissa_bits + 1) + torch.finfo(x.dtype).eps
        absolute = steps * self.element.min_subnormal / self.element.max
        within = error <= exact.abs().mul_(relative).add_(amax, alpha=absolute)  # no NaN is
        if not within.all():
            worst = (error / amax).nan_to_num(nan=torch.inf).max().item()
            plane = "columnwise" if columnwise else "rowwise"
            wrong = within.numel() - int(within.sum())
            msg = (
                f"{wrong} of {within.numel()} {plane} values are further from the input than "
                f"{self.element.name} rounds, by up to {worst:.3g} of the block's maximum"
            )
            raise WrongResultError(msg)


def bound_element(name: str) -> ElementFormat:
    """Return the element format ``name``; one that is not known is held to the coarsest, E2M1."""
    try:
        return element_format(name)
    except QuantizerError:
        return E2M1


def check_same_bits(made: Any, expected: Any) -> None:
    """Raise :class:`WrongResultError` unless two tensors, plain or quantized, have equal bytes."""
    ours, theirs = _parts(made), _parts(expected)
    if list(ours) != list(theirs):
        msg = f"compiled gives {', '.join(ours)}, eager {', '.join(theirs)}"
        raise WrongResultError(msg)
    for name, part in ours.items():
        other = theirs[name]
        if part.dtype != other.dtype or part.shape != other.shape:
            msg = (
                f"compiled {name} is {part.dtype} of {tuple(part.shape)}, "
                f"eager {other.dtype} of {tuple(other.shape)}"
            )
            raise WrongResultError(msg)
        differ = (_bytes(part) != _bytes(other)).sum().item()
        if differ:
            msg = f"{differ} of {part.nbytes} bytes of compiled {name} are not those of eager"
            raise WrongResultError(msg)


def _parts(value: Any) -> dict[str, Tensor]:
    if isinstance(value, QuantizedStorage):
        return QuantizedStorage.inner_tensors(value)
    return {"values": value}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return, for every element, the maximum of the block it is in; edge blocks may be ragged."""
    rows, columns = (min(side or size, size) for side, size in zip(block, x.shape, strict=True))
    amax = max_pool2d(x.abs()[None, None], (rows, columns), (rows, columns), ceil_mode=True)[0, 0]
    wide = amax.repeat_interleave(columns, 1)[:, : x.shape[1]]
    return wide.repeat_interleave(rows, 0)[: x.shape[0]]
