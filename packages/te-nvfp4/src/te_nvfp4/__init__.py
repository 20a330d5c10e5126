# SPDX-License-Identifier: Apache-2.0
"""NVFP4 tensors: blocks of 16 four-bit elements under an E4M3 scale and one float32 maximum.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_nvfp4.__about__ import __version__
from te_proto import lazy_exports

if TYPE_CHECKING:
    from te_nvfp4._format import FORMAT
    from te_nvfp4.quantizer import NVFP4Quantizer
    from te_nvfp4.recipe import NVFP4BlockScaling
    from te_nvfp4.tensor import NVFP4Storage, NVFP4Tensor
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FORMAT": "_format",
            "NVFP4BlockScaling": "recipe",
            "NVFP4Quantizer": "quantizer",
            "NVFP4Storage": "tensor",
            "NVFP4Tensor": "tensor",
        },
    )

__all__ = [
    "FORMAT",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Storage",
    "NVFP4Tensor",
    "__version__",
]
