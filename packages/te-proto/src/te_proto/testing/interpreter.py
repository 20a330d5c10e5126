# SPDX-License-Identifier: Apache-2.0
"""Run Triton kernels on CPU tensors, with the bits a GPU would give.

The interpreter that comes with Triton is not exact: its casts to bf16 and fp8 are wrong, bf16
    arithmetic
runs on bit patterns, and stray pointers touch raw memory. This one corrects it for triton 3.6 to
3.9, and emulates the inline PTX that quantizers use. It does not show races, layouts or the order
of sums, and
its division, square root and exponentials are exact where a GPU may choose an approximation: check
    the PTX
with :func:`te_proto.testing.aot_report`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from te_proto.errors import TeError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def cpu_launches_interpreted() -> Iterator[None]:
    """Interpret launches whose first tensor argument is a real CPU tensor.

    Kernels stay what ``@triton.jit`` made, so they can be compiled ahead of time, traced with fake
    tensors or launched on CUDA tensors in the same process, before, after and inside. All patches
    are undone on exit. Not thread-safe: names of ``triton.language`` are patched while a kernel
    runs.

    Raises:
        TeError: ``TRITON_INTERPRET`` was set when triton was imported, so that kernels belong to
            the stock interpreter for good.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        msg = (
            "interpreter: TRITON_INTERPRET is set, which selects triton's own interpreter; unset it"
        )
        raise TeError(msg)
    from te_proto.testing import _launch

    with _launch.intercepted(_is_real_cpu_tensor):
        yield


def _is_real_cpu_tensor(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return value.device.type == "cpu" and not isinstance(value, (FakeTensor, FunctionalTensor))
