# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors under one scale each, taken from their own maximum.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_fp8_current.__about__ import __version__

if TYPE_CHECKING:
    from te_fp8_current._format import FORMAT
    from te_fp8_current.quantizer import Float8CurrentScalingQuantizer, needs_separate_transpose
    from te_fp8_current.recipe import Float8CurrentScaling
    from te_fp8_current.tensor import Float8Storage, Float8Tensor

_WHERE = {
    "FORMAT": "_format",
    "Float8CurrentScaling": "recipe",
    "Float8CurrentScalingQuantizer": "quantizer",
    "Float8Storage": "tensor",
    "Float8Tensor": "tensor",
    "needs_separate_transpose": "quantizer",
}

__all__ = [
    "FORMAT",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Storage",
    "Float8Tensor",
    "__version__",
    "needs_separate_transpose",
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
