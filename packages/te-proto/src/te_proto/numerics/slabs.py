# SPDX-License-Identifier: Apache-2.0
"""Work on a few rows at a time, so that what eager code computes on the way stays in the cache.

Eager torch writes every intermediate result to memory. A hundred kilobytes of it are reused from
the heap and the cache; a hundred megabytes are fresh pages each time, ten times slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_proto._compat import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

SLAB = 2**16
"""Elements of a slab, about."""


def in_slabs(
    fn: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, multiple: int = 1
) -> tuple[Tensor, ...]:
    """Return ``fn(0, *tensors)``, put together from slabs where the whole would be slower.

    Args:
        fn: takes the number of the first row and the rows of each tensor; its results have their
            rows, or what is made of them, along their first axis.
        tensors: of the same size of the first axis.
        multiple: of which each slab but the last has rows.
    """
    rows, size = tensors[0].shape[0], tensors[0].shape[1:].numel()
    # a graph has no intermediate results, and a fake tensor no memory
    if not is_plain_cpu(tensors[0]):
        return fn(0, *tensors)
    step = max(SLAB // max(size, 1) // multiple, 1) * multiple
    if rows <= step:
        return fn(0, *tensors)
    parts = [fn(i, *(t[i : i + step] for t in tensors)) for i in range(0, rows, step)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def is_plain_cpu(x: Tensor) -> bool:
    """Return whether ``x`` is data on a CPU, neither traced nor fake."""
    return not is_compiling() and type(x) is Tensor and x.device.type == "cpu"
