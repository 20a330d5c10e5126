# SPDX-License-Identifier: Apache-2.0
"""The quantizer of block-scaled FP8: 1x128 or 128x128 blocks of codes under float32 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_fp8_block import ops
from te_fp8_block._format import FORMAT
from te_fp8_block.layout import BLOCK, buffer_shapes
from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor
from te_proto.layout import BufferSpec
from te_proto.quantizer import Quantizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Float8BlockQuantizer(Quantizer):
    """Quantize to FP8 with a float32 scale for each 1x128 or 128x128 block, of any shape.

    The columnwise plane is stored transposed, its last axis first. With 1x128 blocks it is a
    quantization of its own, of 128 rows of a column; with 128x128 blocks it is the rowwise plane,
    transposed. ``optimize_for_gemm`` changes nothing.

    Attributes:
        dtype: element format, ``"e4m3"`` or ``"e5m2"``.
        block_len: elements of a block along an axis; the format says 128.
        amax_epsilon: smallest maximum that a block counts with, in the unit of the input.
        force_pow_2_scales: round ``scale`` down to a power of two. On a GPU of compute capability
            10.0 or later, whose GEMM takes no others, it must be.
        block_scaling_dim: 1 for blocks of 1x128, 2 for blocks of 128x128.

    Source:
        ``Float8BlockQuantizer`` of TransformerEngine.
    """

    dtype: str = "e4m3"
    block_len: int = BLOCK
    amax_epsilon: float = 0.0
    force_pow_2_scales: bool = True
    block_scaling_dim: int = 2

    format_name: ClassVar[str] = FORMAT.name
    storage_class: ClassVar[type[Float8BlockwiseStorage]] = Float8BlockwiseStorage
    tensor_class: ClassVar[type[Float8BlockwiseTensor]] = Float8BlockwiseTensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in FORMAT.elements:
            self._refuse("dtype", f"must be one of {', '.join(FORMAT.elements)}", self.dtype)
        if self.block_len != BLOCK:
            self._refuse("block_len", f"must be {BLOCK}", self.block_len)
        if not 0.0 <= self.amax_epsilon <= _FLOAT32_MAX:
            self._refuse("amax_epsilon", "must be a float32 of at least 0", self.amax_epsilon)
        if self.block_scaling_dim not in (1, 2):
            self._refuse("block_scaling_dim", "must be 1 or 2", self.block_scaling_dim)

    def alignment(self) -> tuple[int, int]:
        """Any ``M`` and ``K`` will do: a ragged block counts as filled up with zeros."""
        return 1, 1

    def check_shape(self, shape: Sequence[int]) -> None:
        """Accept every shape."""

    def is_2d(self) -> bool:
        """Return whether blocks are 128x128."""
        # dynamo may take the number for a symbol; a branch on it makes a constant, bool() does not
        return True if self.block_scaling_dim == 2 else False  # noqa: SIM210

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        """Return uint8 codes and float32 scales; the columnwise codes have the last axis first."""
        shapes = buffer_shapes(
            shape,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            two_d=self.is_2d(),
        )
        return {
            name: BufferSpec(buffer, torch.uint8 if name.endswith("_data") else torch.float32)
            for name, buffer in shapes.items()
        }

    def quantize_impl(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize ``x``; see :func:`te_fp8_block.reference.quantize` for the arithmetic."""
        return ops.quantize(x, self)

    def quantize_into_impl(
        self, x: Tensor, out: dict[str, Tensor], noop: Tensor | None, **call: Any
    ) -> None:
        """Quantize ``x`` into ``out``, with the kernel where it runs."""
        if not ops.quantize_into(x, self, out, noop):
            self.copy_quantized(x, out, noop)

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Dequantize the rowwise plane if it is held, else the columnwise one."""
        storage = self.replace(internal=True).create_metadata(dtype).build(inner, shape)
        return ops.dequantize(storage, dtype)
