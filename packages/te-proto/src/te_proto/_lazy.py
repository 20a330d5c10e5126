# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are imported on first access (PEP 562); imports no torch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_exports(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package's ``__init__.py``.

    Importing the package then costs nothing; a name is imported on first access and kept. Write
    the same imports under ``TYPE_CHECKING``, and this in its ``else``: with a ``__getattr__`` in
    sight, type checkers take every name for a public one. No module of the package may bear the
    name of an export: once imported, it would stand in its place.

    Args:
        package: ``__name__`` of the package, whose ``__all__`` is what ``dir()`` lists.
        where: export -> module in the package that defines it, such as ``{"Recipe": "recipe"}``.
    """
    namespace = vars(sys.modules[package])

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in where:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = f"{package}.{where[name]}"
        try:
            value = getattr(importlib.import_module(module), name)
        except AttributeError as error:
            # left as it is, hasattr() and `from package import name` would hide it
            msg = f"cannot import {name!r} from {module!r}: {error}"
            raise ImportError(msg, name=module) from error
        namespace[name] = value
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted(namespace["__all__"])

    return __getattr__, __dir__
