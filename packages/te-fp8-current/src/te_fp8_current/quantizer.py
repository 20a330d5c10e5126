# SPDX-License-Identifier: Apache-2.0
"""The quantizer of FP8 with current scaling: one float32 scale a tensor, from its own maximum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_fp8_current import ops
from te_fp8_current._format import FORMAT
from te_fp8_current.layout import buffer_shapes
from te_fp8_current.tensor import Float8Storage, Float8Tensor
from te_proto.layout import BufferSpec
from te_proto.quantizer import Quantizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self


_FLT_MAX = torch.finfo(torch.float32).max


class Float8CurrentScalingQuantizer(Quantizer):
    """Quantize to FP8 under one scale that takes the tensor's maximum to the largest code.

    Both usages have the same codes. A GEMM that sums over rows reads them in place, transposed, or
    from a transposed buffer of its own; :func:`needs_separate_transpose` says what a device wants.
    ``optimize_for_gemm`` changes nothing: there are no scales to reorder.

    Attributes:
        dtype: element format, ``"e4m3"`` or ``"e5m2"``.
        with_amax_reduction: take the maximum over a process group, whose c10d name comes with each
            call as ``group``; the tensor it makes keeps the quantizer without this option.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: a smaller maximum counts as this, in the input's unit.
        separate_transpose: hold transposed codes for the columnwise usage, instead of one buffer
            for both.

    Source:
        ``Float8CurrentScalingQuantizer`` of TransformerEngine.
    """

    dtype: str = "e4m3"
    with_amax_reduction: bool = False
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    separate_transpose: bool = False

    format_name: ClassVar[str] = FORMAT.name
    storage_class: ClassVar[type[Float8Storage]] = Float8Storage
    tensor_class: ClassVar[type[Float8Tensor]] = Float8Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in FORMAT.elements:
            self._refuse("dtype", f"must be one of {', '.join(FORMAT.elements)}", self.dtype)
        if not 0.0 <= self.amax_epsilon <= _FLT_MAX:
            self._refuse("amax_epsilon", f"must be from 0 to {_FLT_MAX}", self.amax_epsilon)

    def alignment(self) -> tuple[int, int]:
        """Return ``(1, 1)``: there are no blocks."""
        return 1, 1

    def check_shape(self, shape: Sequence[int]) -> None:
        """Accept every shape: there are no blocks."""

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        """Return uint8 codes in up to two orders and the float32 scale."""
        shapes = buffer_shapes(
            shape,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            separate_transpose=self.separate_transpose,
        )
        return {
            name: BufferSpec(size, torch.float32 if name == "fp8_scale_inv" else torch.uint8)
            for name, size in shapes.items()
        }

    def call_arguments(self) -> tuple[str, ...]:
        """Return ``("group",)`` if the maximum is taken over a group."""
        return ("group",) if self.with_amax_reduction else ()

    def at_rest(self) -> Self:
        """Return the quantizer without the reduction, which concerns a call and no buffer."""
        return self.replace(with_amax_reduction=False) if self.with_amax_reduction else self

    def quantize_impl(self, x: Tensor, group: str | None = None) -> dict[str, Tensor]:
        """Quantize ``x``; see :func:`te_fp8_current.reference.quantize` for the arithmetic."""
        return ops.quantize(x, self, group)

    def quantize_into_impl(
        self, x: Tensor, out: dict[str, Tensor], noop: Tensor | None, **call: Any
    ) -> None:
        """Quantize ``x`` into ``out``; all ranks of a group must call it, whatever their noop."""
        ops.quantize_into(x, self, out, noop, **call)

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Dequantize the codes, or the transposed ones if those alone are held."""
        storage = self.replace(internal=True).create_metadata(dtype).build(inner, shape)
        return ops.dequantize(storage, self, dtype)


def needs_separate_transpose(device: torch.device | str) -> bool:
    """Return whether GEMMs on ``device`` want transposed codes in a buffer of their own.

    True for CUDA devices whose FP8 GEMM sums over the last axis of both operands alone: compute
    capability 8.9, 9.x and 12.x. One buffer serves both usages on 10.x, 11.x and from 13.0 on, and
    on a CPU; where it is used against this advice, each product transposes it anew.

    Source:
        ``is_non_tn_fp8_gemm_supported`` of TransformerEngine.
    """
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return not (major in (10, 11) or major >= 13)
