# SPDX-License-Identifier: Apache-2.0
"""What the launcher of a Triton kernel needs to know about a device and its buffers.

This module imports no triton.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from te_proto.errors import LayoutError


def has_conversion(device: torch.device, capability: tuple[int, int]) -> bool:
    """Return whether ``device`` is an NVIDIA one of at least this compute capability.

    float32 is converted to float8 in hardware from (8, 9), to E2M1 from (10, 0).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= capability


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton launches on ``device``: it takes the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_contiguous(format_name: str, name: str, buffer: Tensor) -> None:
    """Refuse a buffer that a kernel, which writes rows one after another, would fill wrongly.

    Raises:
        LayoutError: ``buffer`` is not contiguous.
    """
    if not buffer.is_contiguous():
        msg = (
            f"{format_name}: {name} must be contiguous to be written in place, got strides "
            f"{tuple(buffer.stride())} for shape {tuple(buffer.shape)}; write into a new buffer"
        )
        raise LayoutError(msg)
