# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors under one scale each, taken from their own maximum.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fp8_current.__about__ import __version__
from te_proto import lazy_exports

if TYPE_CHECKING:
    from te_fp8_current._format import FORMAT
    from te_fp8_current.quantizer import Float8CurrentScalingQuantizer, needs_separate_transpose
    from te_fp8_current.recipe import Float8CurrentScaling
    from te_fp8_current.tensor import Float8Storage, Float8Tensor
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FORMAT": "_format",
            "Float8CurrentScaling": "recipe",
            "Float8CurrentScalingQuantizer": "quantizer",
            "Float8Storage": "tensor",
            "Float8Tensor": "tensor",
            "needs_separate_transpose": "quantizer",
        },
    )

__all__ = [
    "FORMAT",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Storage",
    "Float8Tensor",
    "__version__",
    "needs_separate_transpose",
]
