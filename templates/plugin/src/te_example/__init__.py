# SPDX-License-Identifier: Apache-2.0
"""EXAMPLE tensors: say here what shares a scale with what.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_example.__about__ import __version__

if TYPE_CHECKING:
    from te_example._format import FORMAT
    from te_example.quantizer import ExampleQuantizer
    from te_example.recipe import ExampleScaling
    from te_example.tensor import ExampleStorage, ExampleTensor

_WHERE = {
    "FORMAT": "_format",
    "ExampleScaling": "recipe",
    "ExampleQuantizer": "quantizer",
    "ExampleStorage": "tensor",
    "ExampleTensor": "tensor",
}

__all__ = [
    "FORMAT",
    "ExampleQuantizer",
    "ExampleScaling",
    "ExampleStorage",
    "ExampleTensor",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
