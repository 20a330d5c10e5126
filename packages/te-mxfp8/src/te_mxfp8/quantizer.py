# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 quantizer: 1x32 blocks of FP8 codes under E8M0 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_mxfp8 import ops
from te_mxfp8._format import FORMAT
from te_mxfp8.layout import BLOCK, buffer_shapes
from te_mxfp8.tensor import MXFP8Storage, MXFP8Tensor
from te_proto.blocks import matrix_shape, round_up
from te_proto.errors import ShapeError
from te_proto.layout import BufferSpec
from te_proto.quantizer import Quantizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class MXFP8Quantizer(Quantizer):
    """Quantize to MXFP8: 32 elements share a power-of-two scale, rounded up so that none saturates.

    Attributes:
        dtype: element format, ``"e4m3"`` or ``"e5m2"``.
        with_2d_quantization: one scale for 32x32 elements, the same codes in both planes, instead
            of 1x32 rowwise and 32x1 columnwise.
        optimize_for_gemm: scales in the swizzled order that a GEMM reads.

    Source:
        OCP Microscaling Formats (MX) v1.0; TransformerEngine's MXFP8 kernels, which round scales
        up.
    """

    dtype: str = "e4m3"
    with_2d_quantization: bool = False

    format_name: ClassVar[str] = FORMAT.name
    storage_class: ClassVar[type[MXFP8Storage]] = MXFP8Storage
    tensor_class: ClassVar[type[MXFP8Tensor]] = MXFP8Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in FORMAT.elements:
            self._refuse("dtype", f"must be one of {', '.join(FORMAT.elements)}", self.dtype)

    def alignment(self) -> tuple[int, int]:
        """Multiples that ``(M, K)`` must have for the usages that are on."""
        both = self.with_2d_quantization and (self.rowwise or self.columnwise)
        return (BLOCK if self.columnwise or both else 1, BLOCK if self.rowwise or both else 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise :class:`ShapeError` if a block of a plane that is on would be ragged."""
        if len(shape) == 0:
            msg = "mxfp8: x must have at least one axis, got a 0-d tensor; reshape it to (1, K)"
            raise ShapeError(msg)
        (m, k), (rows, columns) = matrix_shape(shape), self.alignment()
        if k % columns:
            msg = (
                f"mxfp8: the last axis of x must be a multiple of {columns}, got {k} in shape "
                f"{tuple(shape)}; pad it to {round_up(k, columns)} first"
            )
            raise ShapeError(msg)
        if m % rows:
            todo = "" if self.with_2d_quantization else ", or turn the columnwise usage off"
            msg = (
                "mxfp8: the rows of x, all axes but the last together, "
                f"must be a multiple of {rows}, "
                f"got {m} in shape {tuple(shape)}; pad them to {round_up(m, rows)} first{todo}"
            )
            raise ShapeError(msg)

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        """Return codes of the logical shape and scales padded to 128x4 tiles, all uint8."""
        shapes = buffer_shapes(shape, rowwise=self.rowwise, columnwise=self.columnwise)
        return {name: BufferSpec(buffer, torch.uint8) for name, buffer in shapes.items()}

    def quantize_impl(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize ``x``; see :func:`te_mxfp8.reference.quantize` for the arithmetic."""
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
