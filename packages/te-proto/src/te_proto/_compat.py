# SPDX-License-Identifier: Apache-2.0
"""Every branch on a torch version, each with the condition that deletes it.

What te-proto stands on is private to torch, so a version that was not tried is refused.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

SUPPORTED = ((2, 11), (2, 15))
"""The first and the last minor version of torch that the tests were run on."""

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def check_torch(version: str, found: tuple[int, ...]) -> None:
    """Raise ImportError unless torch is of a supported version."""
    first, last = (".".join(map(str, v)) for v in SUPPORTED)
    if not SUPPORTED[0] <= found <= SUPPORTED[1]:
        msg = (
            f"te-proto needs torch {first} to {last}, got {version}; "
            f'pip install "torch>={first},<{SUPPORTED[1][0]}.{SUPPORTED[1][1] + 1}", '
            "or a te-proto that knows this one"
        )
        raise ImportError(msg)


check_torch(torch.__version__, _TORCH)

from torch._library.opaque_object import MemberType, get_opaque_type_name  # noqa: E402

if TYPE_CHECKING or _TORCH < (2, 14):
    # the names before 2.14, which warns of them; delete when 2.13 is no longer supported
    from torch._library.opaque_object import register_opaque_type as _register
    from torch._opaque_base import OpaqueBase

    _VALUE = "value"
else:
    from torch._custom_class_base import CustomClassBase as OpaqueBase
    from torch._library.opaque_object import register_custom_class as _register

    _VALUE = "constant"

TRACES_NEW_QUANTIZERS = _TORCH >= (2, 12)
"""Whether a graph sees through the methods of a quantizer that is made inside it.

2.11 calls them as opaque ops, and fails. Delete, with what asks for it, when 2.11 is no longer
supported.
"""

TRACES_SUPER = _TORCH >= (2, 12)
"""Whether a traced method of a quantizer may call ``super()``. Delete as the one above."""

HAS_SCALED_MM_ON_CPU = _TORCH >= (2, 12)
"""Whether ``scaled_mm`` runs on a CPU. Delete when 2.11 is no longer supported."""

if TYPE_CHECKING or _TORCH >= (2, 12):
    FAKE_VALUES: tuple[type[Any], ...] = ()
else:
    # what 2.11 shows traced code in place of an opaque value; delete when it is not supported
    from torch._library.fake_class_registry import FakeScriptObject

    FAKE_VALUES = (FakeScriptObject,)

if TYPE_CHECKING or _TORCH >= (2, 13):
    from torch.compiler import is_compiling
else:
    # what is run on fakes while a graph is made is not told so; delete when 2.12 is not supported
    from torch._guards import TracingContext

    def is_compiling() -> bool:
        """Return whether a graph is being made."""
        return torch.compiler.is_compiling() or TracingContext.try_get() is not None


__all__ = [
    "FAKE_VALUES",
    "HAS_SCALED_MM_ON_CPU",
    "TRACES_NEW_QUANTIZERS",
    "TRACES_SUPER",
    "OpaqueBase",
    "check_torch",
    "get_opaque_type_name",
    "is_compiling",
    "register_value_type",
]


def register_value_type(cls: type[Any], *, real: tuple[str, ...]) -> None:
    """Register ``cls`` with torch as an opaque value: a constant of the graph, guarded by ``==``.

    Args:
        cls: a frozen dataclass that derives from :class:`OpaqueBase`.
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
    if _TORCH < (2, 13):
        # else a quantizer made inside a graph equals none that comes from outside. Delete when 2.12
        # is no longer supported.
        members.update(__eq__=MemberType.USE_REAL, __ne__=MemberType.USE_REAL)
    _register(cls, typ=_VALUE, members=members)
