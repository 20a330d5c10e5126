# SPDX-License-Identifier: Apache-2.0
"""The inner tensors of EXAMPLE, in flatten order."""

from __future__ import annotations

from te_proto.storage import InnerTensor, QuantizedStorage
from te_proto.tensor import QuantizedTensor


class ExampleStorage(QuantizedStorage):
    """Per plane int8 codes of the logical shape and float32 ``scale_inv``.

    Say here what slices, views, concatenation and transposition do with them, by overriding
    ``narrow_inner``, ``view_inner``, ``cat_inner`` and ``transpose_inner``; without, a slice raises
    and the others dequantize.
    """

    rowwise_data: InnerTensor
    rowwise_scale_inv: InnerTensor
    columnwise_data: InnerTensor
    columnwise_scale_inv: InnerTensor


class ExampleTensor(ExampleStorage, QuantizedTensor):
    """An EXAMPLE tensor that torch sees as one of the logical shape and nominal dtype."""
