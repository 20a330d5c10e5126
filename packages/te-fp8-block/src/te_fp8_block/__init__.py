# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 tensors: 1x128 or 128x128 elements under one float32 scale.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fp8_block.__about__ import __version__
from te_proto import lazy_exports

if TYPE_CHECKING:
    from te_fp8_block._format import FORMAT
    from te_fp8_block.quantizer import Float8BlockQuantizer
    from te_fp8_block.recipe import Float8BlockScaling
    from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FORMAT": "_format",
            "Float8BlockQuantizer": "quantizer",
            "Float8BlockScaling": "recipe",
            "Float8BlockwiseStorage": "tensor",
            "Float8BlockwiseTensor": "tensor",
        },
    )

__all__ = [
    "FORMAT",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseStorage",
    "Float8BlockwiseTensor",
    "__version__",
]
