# SPDX-License-Identifier: Apache-2.0
"""A format of the tests: int8 codes, one float32 scale a row (rowwise) or a column (columnwise)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch

from te_proto.errors import ShapeError
from te_proto.quantizer import BufferSpec, Quantizer, Recipe
from te_proto.storage import InnerTensor, QuantizedStorage
from te_proto.tensor import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ToyStorage(QuantizedStorage):
    rowwise_data: InnerTensor
    rowwise_scale_inv: InnerTensor
    columnwise_data: InnerTensor
    columnwise_scale_inv: InnerTensor


class ToyTensor(ToyStorage, QuantizedTensor):
    pass


class ToyQuantizer(Quantizer):
    levels: int = 127
    multiple: int = 1  # rows of the columnwise plane and columns of the rowwise one

    format_name: ClassVar[str] = "toy"
    storage_class: ClassVar = ToyStorage
    tensor_class: ClassVar = ToyTensor

    def alignment(self) -> tuple[int, int]:
        return (self.multiple if self.columnwise else 1, self.multiple if self.rowwise else 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        sizes = (math.prod(shape[:-1]), shape[-1])
        for axis, size, multiple in zip("MK", sizes, self.alignment(), strict=True):
            if size % multiple:
                msg = f"toy: {axis} must be a multiple of {multiple}, got {size}"
                raise ShapeError(msg)

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        m, k = math.prod(shape[:-1]), shape[-1]
        out = {}
        for plane, on, scales in (
            ("rowwise", self.rowwise, (m, 1)),
            ("columnwise", self.columnwise, (1, k)),
        ):
            if on:
                out[f"{plane}_data"] = BufferSpec(tuple(shape), torch.int8)
                out[f"{plane}_scale_inv"] = BufferSpec(scales, torch.float32)
        return out

    def quantize_impl(
        self, x: Tensor, out: dict[str, Tensor] | None = None, noop: Tensor | None = None
    ) -> dict[str, Tensor]:
        matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
        made = {}
        for plane, on, axis in (("rowwise", self.rowwise, 1), ("columnwise", self.columnwise, 0)):
            if on:
                one = (*matrix.shape[:axis], 1, *matrix.shape[axis + 1 :])  # an empty axis has an amax
                amax = torch.cat([matrix.abs(), matrix.new_zeros(one)], axis).amax(axis, keepdim=True)
                scale_inv = (amax / self.levels).clamp_min(2.0**-100)
                codes = (matrix / scale_inv).round().to(torch.int8)
                made[f"{plane}_data"] = codes.reshape(x.shape).contiguous()
                made[f"{plane}_scale_inv"] = scale_inv
        for name, buffer in (out or {}).items():
            buffer.copy_(made[name] if noop is None else torch.where(noop == 1, buffer, made[name]))
        return out or made

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        plane = "rowwise" if "rowwise_data" in inner else "columnwise"
        codes = inner[f"{plane}_data"].reshape(math.prod(shape[:-1]), shape[-1])
        return (codes.float() * inner[f"{plane}_scale_inv"]).to(dtype).reshape(tuple(shape))


RECIPE = Recipe(
    name="toy",
    input=ToyQuantizer(),
    weight=ToyQuantizer(levels=63),
    grad_output=ToyQuantizer(levels=31),
)
