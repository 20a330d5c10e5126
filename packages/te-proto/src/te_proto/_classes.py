# SPDX-License-Identifier: Apache-2.0
"""The classes that a checkpoint names: storages, tensors and quantizers, by id."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from te_proto.errors import PluginError, UnknownFormatError

_CLASSES: dict[str, type[Any]] = {}
_LOCK = threading.Lock()


def class_id(cls: type[Any]) -> str:
    """Return ``"module:Name"``, by which checkpoints and messages know a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def source_name(cls: type[Any]) -> str:
    """Return a Python identifier that stands for ``cls`` and for no class of another id."""
    return "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in class_id(cls))


def register_class(cls: type[Any]) -> None:
    """Make ``cls`` known by its id.

    Raises:
        PluginError: another class has that id.
    """
    key = class_id(cls)
    with _LOCK:
        if _CLASSES.setdefault(key, cls) is not cls:
            msg = (
                f"two classes claim the name {key!r}; rename one, or do not import the module twice"
            )
            raise PluginError(msg)


def find_class(key: str) -> Any:
    """Return the storage, tensor or quantizer class of that id, loading its plugin if need be.

    Only a class that is loaded or that an installed format names is found: a file cannot have an
    arbitrary module imported.

    Raises:
        UnknownFormatError: no installed format has it; the message says what to install.
    """
    if key not in _CLASSES:
        from te_proto import registry  # only a checkpoint read before its plugin needs it

        for name in registry.available_formats():
            with contextlib.suppress(PluginError):  # a broken plugin hides no other
                spec = registry.describe(name)
                if key in (spec.tensor, spec.storage, spec.quantizer):
                    return registry.resolve(key)
        distribution = key.split(":")[0].split(".")[0].replace("_", "-")
        msg = (
            f"no installed format provides the class {key!r}; "
            f"install it with: pip install {distribution}"
        )
        raise UnknownFormatError(msg)
    return _CLASSES[key]
