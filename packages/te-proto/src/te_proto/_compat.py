# SPDX-License-Identifier: Apache-2.0
"""Every branch on a torch version, each with the condition that deletes it."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property, wraps
from typing import Any

import torch
from torch._library.opaque_object import MemberType, register_opaque_type

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def register_value_type(cls: type[Any], *, real: tuple[str, ...]) -> None:
    """Register ``cls`` with torch as an opaque value: a constant of the graph, guarded by ``==``.

    Args:
        cls: a frozen dataclass that derives from ``torch._opaque_base.OpaqueBase``.
        real: methods whose arguments are constants and which run for real while tracing. Fields do
            so too, and properties, which are computed when the value is made; all other methods
            are traced.
    """
    members = {field.name: MemberType.USE_REAL for field in fields(cls)}
    members.update(dict.fromkeys(_compute_properties_once(cls), MemberType.USE_REAL))
    members.update(dict.fromkeys(real, MemberType.USE_REAL))
    if _TORCH < (2, 12):
        # 2.11 traces only the methods that are named. Later versions trace every unnamed one, also
        # on a quantizer made inside the graph, where a named one would become an opaque call.
        # Delete when 2.11 is no longer supported.
        methods = (name for name in dir(cls) if callable(getattr(cls, name)) and name[:2] != "__")
        members.update({name: MemberType.INLINED for name in methods if name not in members})
    register_opaque_type(cls, typ="value", members=members)


def _compute_properties_once(cls: type[Any]) -> list[str]:
    """Make the properties of ``cls`` attributes that its constructor fills, and return their names.

    Dynamo fails on a property of an opaque value that comes from outside the graph ("cls_source must
    not be None"), where it reads what stands in ``__dict__`` like a field. Delete when every supported
    torch traces one.
    """
    for name, member in tuple(vars(cls).items()):
        if isinstance(member, property) and member.fget is not None:
            stored = cached_property(member.fget)
            stored.__set_name__(cls, name)
            setattr(cls, name, stored)
    names = [name for name in dir(cls) if isinstance(getattr(cls, name), cached_property)]
    construct = cls.__init__

    @wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        for name in names:
            getattr(self, name)

    if names:
        setattr(cls, "__init__", init)  # noqa: B010  # mypy refuses the assignment
    return names
