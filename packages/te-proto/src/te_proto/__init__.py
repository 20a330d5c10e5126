# SPDX-License-Identifier: Apache-2.0
"""Prototypes of plain and quantized tensors, and the registry of formats.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_proto.__about__ import __version__
from te_proto._lazy import lazy_exports
from te_proto._rebuild import allow_in_checkpoints

if TYPE_CHECKING:
    from te_proto.custom_ops import custom_op
    from te_proto.layout import BufferSpec
    from te_proto.proto import TensorProto, eval_proto, to_tensor_proto
    from te_proto.quantizer import Quantizer
    from te_proto.recipe import Recipe
    from te_proto.registry import available_formats, describe, get_quantizer, get_recipe
    from te_proto.spec import PROTOCOL, FormatSpec
    from te_proto.storage import QuantizedStorage
    from te_proto.tensor import QuantizedTensor, fallback
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "PROTOCOL": "spec",
            "BufferSpec": "layout",
            "FormatSpec": "spec",
            "QuantizedStorage": "storage",
            "QuantizedTensor": "tensor",
            "Quantizer": "quantizer",
            "Recipe": "recipe",
            "TensorProto": "proto",
            "available_formats": "registry",
            "custom_op": "custom_ops",  # a module of the same name would stand in its place
            "describe": "registry",
            "eval_proto": "proto",
            "fallback": "tensor",
            "get_quantizer": "registry",
            "get_recipe": "registry",
            "to_tensor_proto": "proto",
        },
    )

__all__ = [
    "PROTOCOL",
    "BufferSpec",
    "FormatSpec",
    "QuantizedStorage",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "TensorProto",
    "__version__",
    "available_formats",
    "custom_op",
    "describe",
    "eval_proto",
    "fallback",
    "get_quantizer",
    "get_recipe",
    "lazy_exports",
    "to_tensor_proto",
]

allow_in_checkpoints()
