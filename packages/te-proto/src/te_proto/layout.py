# SPDX-License-Identifier: Apache-2.0
"""How inner tensors are described, and whether given ones are as described."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

import te_proto._compat  # noqa: F401  # refuses a torch that was never tried, whatever comes first
from te_proto.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from te_proto.quantizer import Quantizer

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""High-precision dtypes a quantizer takes and a quantized tensor stands for."""


class BufferSpec(NamedTuple):
    """One inner tensor before it exists: dense, row-major.

    Attributes:
        shape: sizes in elements of ``dtype``; may hold SymInts.
        dtype: dtype of the buffer; raw codes and E8M0 scales are ``torch.uint8``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_layout(inner: Mapping[str, Tensor], quantizer: Quantizer, shape: Sequence[int]) -> None:
    """Raise :class:`LayoutError` unless ``inner`` is what ``quantizer`` describes for ``shape``."""
    described = quantizer.describe_buffers(shape)
    if list(inner) != list(described):
        msg = (
            f"{quantizer.format_name}: a tensor of shape {tuple(shape)} needs the inner tensors "
            f"{list(described)} in this order, got {list(inner)}"
        )
        raise LayoutError(msg)
    devices = {t.device for t in inner.values()}
    if len(devices) > 1:
        msg = (
            f"{quantizer.format_name}: inner tensors must share one device, "
            f"got {sorted(map(str, devices))}"
        )
        raise LayoutError(msg)
    for name, spec in described.items():
        tensor = inner[name]
        if (
            tuple(tensor.shape) != tuple(spec.shape)
            or tensor.dtype != spec.dtype
            or not tensor.is_contiguous()
        ):
            msg = (
                f"{quantizer.format_name}: {name} of a tensor of shape {tuple(shape)} must be a "
                f"contiguous {spec.dtype} of shape {tuple(spec.shape)}, got {tensor.dtype} of "
                f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )
            raise LayoutError(msg)
