# SPDX-License-Identifier: Apache-2.0
"""Every branch on a torch version, each with the condition that deletes it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch._library.opaque_object import MemberType, register_opaque_type

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def register_value_type(cls: type[Any], *, real: tuple[str, ...]) -> None:
    """Register ``cls`` with torch as an opaque value: a constant of the graph, guarded by ``==``.

    Args:
        cls: a frozen dataclass that derives from ``torch._opaque_base.OpaqueBase``.
        real: methods whose arguments are constants and which run for real while tracing. Fields do
            so too; all other methods are traced.
    """
    members = {field.name: MemberType.USE_REAL for field in fields(cls)}
    members.update(dict.fromkeys(real, MemberType.USE_REAL))
    if _TORCH < (2, 12):
        # 2.11 traces only the methods that are named. Later versions trace every unnamed one, also
        # on a quantizer made inside the graph, where a named one would become an opaque call.
        # Delete when 2.11 is no longer supported.
        methods = (name for name in dir(cls) if callable(getattr(cls, name)) and name[:2] != "__")
        members.update({name: MemberType.INLINED for name in methods if name not in members})
    register_opaque_type(cls, typ="value", members=members)
