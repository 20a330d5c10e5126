# SPDX-License-Identifier: Apache-2.0
"""EXAMPLE tensors: say here what shares a scale with what.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_example.__about__ import __version__
from te_proto import lazy_exports

if TYPE_CHECKING:
    from te_example._format import FORMAT
    from te_example.quantizer import ExampleQuantizer
    from te_example.recipe import ExampleScaling
    from te_example.tensor import ExampleStorage, ExampleTensor
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FORMAT": "_format",
            "ExampleScaling": "recipe",
            "ExampleQuantizer": "quantizer",
            "ExampleStorage": "tensor",
            "ExampleTensor": "tensor",
        },
    )

__all__ = [
    "FORMAT",
    "ExampleQuantizer",
    "ExampleScaling",
    "ExampleStorage",
    "ExampleTensor",
    "__version__",
]
