# SPDX-License-Identifier: Apache-2.0
"""How shards lie in the whole: pure functions of shapes and descriptions.

Sequence parallel ranks hold the first axis in turn. A quantized tensor can be put together from
theirs if each of its buffers either lies along the rows, whole blocks and no padding, or is the
same on every rank; what a format describes tells which, so no format is known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_proto.quantizer import Quantizer

_MANY = 1 << 20
"""Shards of the trial whole. They need that many times the buffer of one exactly if a block, or the
unit that scales are padded to, divides the shard; every such unit divides this number."""


def constant(size: int) -> int:
    """Return ``size`` as a number, where dynamo may have taken it for a symbol."""
    known = 1
    while known != size:
        known += 1
    return known


def gathered(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape of the whole of which each rank holds ``shape``."""
    return (shape[0] * ranks, *shape[1:]) if ranks > 1 else tuple(shape)


def scattered(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape of what each rank holds of a whole of ``shape``."""
    return (shape[0] // ranks, *shape[1:]) if ranks > 1 else tuple(shape)


def join_axes(quantizer: Quantizer, shape: Sequence[int]) -> tuple[int | None, ...] | None:
    """Return the axis of each buffer along which shards follow each other.

    Args:
        quantizer: describes the shards, with the planes that they hold.
        shape: of one shard.

    Returns:
        An axis for each buffer in flatten order, None for one that does not depend on the rows and
        must be the same on every rank. None instead of all of them if some buffer is cut within a
        block, or has padding between shards.
    """
    if shape[0] == 0:
        return None
    one = quantizer.describe_buffers(shape)
    many = quantizer.describe_buffers(gathered(shape, _MANY))
    axes: list[int | None] = []
    for name, spec in one.items():
        sizes = list(zip(spec.shape, many[name].shape, strict=True))
        grown = [axis for axis, (a, b) in enumerate(sizes) if a != b]
        if len(grown) == 0:
            axes.append(None)
        elif len(grown) == 1 and sizes[grown[0]][1] == sizes[grown[0]][0] * _MANY:
            axes.append(grown[0])
        else:
            return None
    return tuple(axes)
