# SPDX-License-Identifier: Apache-2.0
"""Collectives over a group known by its c10d name, eager and traced alike.

Importing this module needs a torch built with distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed._functional_collectives  # registers the ops used below

if TYPE_CHECKING:
    from torch import Tensor


def all_gather(x: Tensor, ranks: int, group: str, *, axis: int = 0) -> Tensor:
    """Return the ``x`` of all ranks, one after the other along ``axis``."""
    ops = torch.ops._c10d_functional
    out: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, group))
    if axis == 0:
        return out
    apart: Tensor = out.unflatten(0, (ranks, -1))
    return apart.movedim(0, axis).flatten(axis, axis + 1).contiguous()


def reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's part, along the first axis, of the sum of ``x`` over all ranks."""
    ops = torch.ops._c10d_functional
    out: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))
    return out


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of ``x`` over all ranks."""
    ops = torch.ops._c10d_functional
    out: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))
    return out
