# SPDX-License-Identifier: Apache-2.0
"""MXFP8 tensors: blocks of 32 elements under one power-of-two scale.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_mxfp8.__about__ import __version__

if TYPE_CHECKING:
    from te_mxfp8._format import FORMAT
    from te_mxfp8.quantizer import MXFP8Quantizer
    from te_mxfp8.recipe import MXFP8BlockScaling
    from te_mxfp8.tensor import MXFP8Storage, MXFP8Tensor

_WHERE = {
    "FORMAT": "_format",
    "MXFP8BlockScaling": "recipe",
    "MXFP8Quantizer": "quantizer",
    "MXFP8Storage": "tensor",
    "MXFP8Tensor": "tensor",
}

__all__ = [
    "FORMAT",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Storage",
    "MXFP8Tensor",
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
