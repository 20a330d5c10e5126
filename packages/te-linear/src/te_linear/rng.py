# SPDX-License-Identifier: Apache-2.0
"""Seed and offset of stochastic rounding, from torch's default generator of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from te_proto.proto import TensorProto

# An op, so that a compiled graph draws what eager code does: Inductor makes random numbers of its
# own. The tag keeps a graph from merging two draws, and from drawing anew in backward.
_LIB = torch.library.Library("te_linear", "DEF")
_LIB.define("draw_rng(*, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _draw(*, device: torch.device) -> Tensor:
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def _draw_fake(*, device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


_LIB.impl("draw_rng", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("te_linear::draw_rng", _draw_fake, lib=_LIB)


def draw_rng(like: Tensor | TensorProto) -> Tensor:
    """Return int64 ``[2]``, seed and offset, drawn on the device of ``like``.

    Whoever restores the state of the default generator, as activation checkpointing does, draws the
    same again.
    """
    out: Tensor = torch.ops.te_linear.draw_rng(device=like.device)
    return out
