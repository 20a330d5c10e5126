# SPDX-License-Identifier: Apache-2.0
"""MXFP8 tensors: blocks of 32 elements under one power-of-two scale.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_mxfp8.__about__ import __version__
from te_proto import lazy_exports

if TYPE_CHECKING:
    from te_mxfp8._format import FORMAT
    from te_mxfp8.quantizer import MXFP8Quantizer
    from te_mxfp8.recipe import MXFP8BlockScaling
    from te_mxfp8.tensor import MXFP8Storage, MXFP8Tensor
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FORMAT": "_format",
            "MXFP8BlockScaling": "recipe",
            "MXFP8Quantizer": "quantizer",
            "MXFP8Storage": "tensor",
            "MXFP8Tensor": "tensor",
        },
    )

__all__ = [
    "FORMAT",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Storage",
    "MXFP8Tensor",
    "__version__",
]
