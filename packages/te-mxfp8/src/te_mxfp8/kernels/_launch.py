# SPDX-License-Identifier: Apache-2.0
"""What every launcher of this folder needs to know about a device and its buffers."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from te_proto.errors import LayoutError


def has_float8_conversion(device: torch.device) -> bool:
    """Return whether the device converts float32 to float8 in hardware (sm_89 and later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton launches on ``device``: it takes the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_contiguous(name: str, buffer: Tensor) -> None:
    """Refuse a buffer that a kernel, which writes rows one after another, would fill wrongly.

    Raises:
        LayoutError: ``buffer`` is not contiguous.
    """
    if not buffer.is_contiguous():
        msg = (
            f"mxfp8: {name} must be contiguous to be written in place, got strides "
            f"{tuple(buffer.stride())} for shape {tuple(buffer.shape)}; write into a new buffer"
        )
        raise LayoutError(msg)
