# SPDX-License-Identifier: Apache-2.0
"""Allocations full of 0xFF, so that a result that depends on uninitialized memory shows."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_Allocate = Callable[..., Tensor]

# filling may allocate: what it allocates is left as it is
_filling = threading.local()


@contextmanager
def poisoned_allocations(byte: int = 0xFF) -> Iterator[None]:
    """Fill what ``torch.empty`` and its kin return with 0xFF bytes, or others, while active.

    0xFF is NaN in every float format of the house, E8M0 included, -1 or the largest unsigned
    integer, and two codes of -6 in packed E2M1. The kernels of ``aten::empty`` and
    ``aten::empty_strided`` are
    replaced for CPU and, where there is one, CUDA: so ``empty_like``, ``new_empty``,
        ``empty_permuted``
    and allocations inside custom ops are covered, and fake tensors are not disturbed. Graphs that
    Inductor compiles while active are covered too; those compiled before are not, nor is
    ``resize_``.
    """
    from torch._C._dynamo import guards

    devices = {"CPU": "_empty_strided_cpu"}
    if torch.cuda.is_available():
        devices["CUDA"] = "_empty_strided_cuda"
    with ExitStack() as undo:
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        # patched here first: what is undone last must still see an unpatched allocator
        for key, name in devices.items():
            allocate = _poisoning(getattr(guards, name), byte)
            undo.enter_context(mock.patch.object(guards, name, allocate))
            with warnings.catch_warnings():
                # replacing a kernel is the point; torch warns of it once a process
                warnings.simplefilter("ignore")
                library.impl("empty.memory_format", _empty(allocate), key, allow_override=True)
                library.impl("empty_strided", _empty_strided(allocate), key, allow_override=True)
        yield


def _poisoning(allocate: _Allocate, byte: int) -> _Allocate:
    def poisoned(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        out = allocate(tuple(size), tuple(stride), dtype)
        if getattr(_filling, "active", False):
            return out
        _filling.active = True
        try:
            storage = out.untyped_storage()
            if out.device.type == "cpu":
                ctypes.memset(storage.data_ptr(), byte, storage.nbytes())
            else:
                storage.fill_(byte)  # type: ignore[attr-defined]
        finally:
            _filling.active = False
        return out

    return poisoned


def _empty(allocate: _Allocate) -> Callable[..., Tensor]:
    def empty(
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        stride = _strides(size, memory_format)
        return _empty_strided(allocate)(
            size, stride, dtype=dtype, device=device, pin_memory=pin_memory
        )

    return empty


def _empty_strided(allocate: _Allocate) -> Callable[..., Tensor]:
    def empty_strided(
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        kind = torch.get_default_dtype() if dtype is None else dtype
        if device is not None and device.type == "cuda":
            with torch.cuda.device(device):
                return allocate(size, stride, kind)
        out = allocate(size, stride, kind)
        return out.pin_memory() if pin_memory else out

    return empty_strided


def _strides(size: Sequence[int], memory_format: torch.memory_format | None) -> tuple[int, ...]:
    from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for

    if memory_format in (torch.channels_last, torch.channels_last_3d):
        return tuple(make_channels_last_strides_for(tuple(size)))
    return tuple(make_contiguous_strides_for(tuple(size)))
