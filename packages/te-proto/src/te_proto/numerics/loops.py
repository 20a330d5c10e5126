# SPDX-License-Identifier: Apache-2.0
"""Where a compiled graph starts a new loop: nothing here changes a value, or does a thing in eager.

Inductor makes one loop of all pointwise steps between two stored tensors. Values seen through
strides it computes in a loop of their own, which it may then join with the loop that reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_proto._compat import is_compiling

_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def on_avx512(x: Tensor) -> bool:
    """Return whether ``x`` is on a CPU for which torch has code with AVX-512."""
    return _AVX512 and x.device.type == "cpu"


def materialize(x: Tensor) -> Tensor:
    """Return ``x``; a compiled graph computes it once and stores it, however often it is read.

    Otherwise a pointwise value is computed again at each use, such as a scale at each element of
    its block, and all that led to it in the loop of what reads it.

    Args:
        x: any strides.
    """
    if not is_compiling():
        return x
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def single_vectors(x: Tensor) -> Tensor:
    """Return ``x``, an eight-bit or float32 step between two of which one has 16 bits.

    A loop with bfloat16 or float16 in it takes float32 vectors in pairs, for which AVX-512 code is
    3 to 7 times as slow as for one. A loop is free of them if one of those joined in it is.
    """
    return materialize(x) if is_compiling() and on_avx512(x) else x


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 ``values`` in ``dtype``, as :func:`single_vectors`."""
    return single_vectors(values).to(dtype) if values.dtype != dtype else values
