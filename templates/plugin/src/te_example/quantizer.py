# SPDX-License-Identifier: Apache-2.0
"""The EXAMPLE quantizer: int8 codes under one float32 scale a row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch

from te_example import reference
from te_example._format import FORMAT
from te_example.tensor import ExampleStorage, ExampleTensor
from te_proto.errors import ShapeError
from te_proto.layout import BufferSpec
from te_proto.quantizer import Quantizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ExampleQuantizer(Quantizer):
    """Quantize to int8, one scale a row (rowwise) or a column (columnwise).

    Attributes:
        bits: of a code, 2 to 8; codes are symmetric around zero.
    """

    bits: int = 8

    format_name: ClassVar[str] = FORMAT.name
    storage_class: ClassVar[type[ExampleStorage]] = ExampleStorage
    tensor_class: ClassVar[type[ExampleTensor]] = ExampleTensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.bits <= 8:
            self._refuse("bits", "must be 2 to 8", self.bits)

    def alignment(self) -> tuple[int, int]:
        """Any ``M`` and ``K`` will do."""
        return 1, 1

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise :class:`ShapeError` for a 0-d tensor, which has no rows."""
        if len(shape) == 0:
            msg = "example: x must have at least one axis, got a 0-d tensor; reshape it to (1, 1)"
            raise ShapeError(msg)

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        """Return codes of the logical shape and a scale for each row, or for each column."""
        m, k = math.prod(shape[:-1]), shape[-1]
        buffers: dict[str, BufferSpec] = {}
        if self.rowwise:
            buffers["rowwise_data"] = BufferSpec(tuple(shape), torch.int8)
            buffers["rowwise_scale_inv"] = BufferSpec((m, 1), torch.float32)
        if self.columnwise:
            buffers["columnwise_data"] = BufferSpec(tuple(shape), torch.int8)
            buffers["columnwise_scale_inv"] = BufferSpec((1, k), torch.float32)
        return buffers

    def quantize_impl(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize ``x``; see :mod:`te_example.reference` for the arithmetic."""
        made: dict[str, Tensor] = {}
        for plane, on in (("rowwise", self.rowwise), ("columnwise", self.columnwise)):
            if on:
                made[f"{plane}_data"], made[f"{plane}_scale_inv"] = reference.quantize(
                    x, levels=2 ** (self.bits - 1) - 1, columnwise=plane == "columnwise"
                )
        return made

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Dequantize the rowwise plane if it is held, else the columnwise one."""
        plane = "rowwise" if "rowwise_data" in inner else "columnwise"
        return reference.dequantize(
            inner[f"{plane}_data"], inner[f"{plane}_scale_inv"], shape, dtype
        )
