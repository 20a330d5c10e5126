# SPDX-License-Identifier: Apache-2.0
"""Reductions over a process group that is known by its c10d name alone.

A name is a value, so it travels as an argument of a call through eager and traced code alike, where
a ``ProcessGroup`` would have to be held by something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed._functional_collectives  # registers the ops used below

from te_proto._compat import is_compiling
from te_proto.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def all_reduce_max(x: Tensor, group: str) -> Tensor:
    """Return the largest of each element over all ranks of ``group``; every rank must call it.

    Args:
        x: plain tensor of the same shape and dtype on every rank; it is not written.
        group: c10d name of the group, its ``group_name``.

    Raises:
        UsageError: no group of that name is registered in this process.
    """
    if not is_compiling():
        _check_group(group)
    ops = torch.ops._c10d_functional
    out: Tensor = ops.wait_tensor(ops.all_reduce(x, "max", group))
    return out


def _check_group(group: str) -> None:
    try:
        torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # a NewType
    except RuntimeError as error:
        msg = (
            f"group must be the c10d name of a process group of this process, got {group!r}; pass "
            "its group_name after torch.distributed.init_process_group()"
        )
        raise UsageError(msg) from error
