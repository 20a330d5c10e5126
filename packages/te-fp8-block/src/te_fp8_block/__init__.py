# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 tensors: 1x128 or 128x128 elements under one float32 scale.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_fp8_block.__about__ import __version__

if TYPE_CHECKING:
    from te_fp8_block._format import FORMAT
    from te_fp8_block.quantizer import Float8BlockQuantizer
    from te_fp8_block.recipe import Float8BlockScaling
    from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor

_WHERE = {
    "FORMAT": "_format",
    "Float8BlockQuantizer": "quantizer",
    "Float8BlockScaling": "recipe",
    "Float8BlockwiseStorage": "tensor",
    "Float8BlockwiseTensor": "tensor",
}

__all__ = [
    "FORMAT",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseStorage",
    "Float8BlockwiseTensor",
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
