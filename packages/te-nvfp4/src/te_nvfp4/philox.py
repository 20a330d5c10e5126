# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 in plain torch, and the random bytes of stochastic rounding.

A counter-based generator: the bits of an element are a function of seed, offset, plane and place,
so eager, compiled and recomputed code and the Triton kernels, which call ``tl.philox``, agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit words, in int64.

    ``b`` has its top bit set. The product with ``b - 2**32`` stays within 63 bits.
    """
    product = a * (b - (1 << 32))
    return ((product >> 32) + a) & _MASK, product & _MASK


def philox(seed: Tensor, counter: Sequence[Tensor]) -> list[Tensor]:
    """Return the four 32-bit words of Philox4x32-10 for each counter, in int64.

    Args:
        seed: one int64, the key; all 64 bits count.
        counter: four int64 tensors that broadcast, of 32-bit words, least significant first.

    Source:
        Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"; equal to ``tl.philox``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for i in range(10):
        high_a, low_a = _multiply(c0, _ROUND_A)
        high_b, low_b = _multiply(c2, _ROUND_B)
        key_a, key_b = (k0 + i * _KEY_A) & _MASK, (k1 + i * _KEY_B) & _MASK
        c0, c1, c2, c3 = high_b ^ c1 ^ key_a, low_b, high_a ^ c3 ^ key_b, low_a
    return [c0, c1, c2, c3]


def block_bytes(rng: Tensor, block: Tensor, axis: int, *, columnwise: bool) -> Tensor:
    """Return 16 random bytes for each block, along a new axis of 16.

    One draw of 128 bits a block: word ``j`` holds the bytes of elements ``4 * j`` to ``4 * j + 3``,
    the lowest first. The counter is the offset and, above it, the number of the block in its plane
    with the plane in its top bit, so the planes of one call never share a draw.

    Args:
        rng: int64 ``[2]``, seed and offset.
        block: int64 number of each block in its plane, row-major.
        axis: where the new axis is put.
        columnwise: which plane.

    Returns:
        uint8.
    """
    seed, offset = rng[0], rng[1]
    plane = 1 << 31 if columnwise else 0
    words = philox(
        seed, (offset & _MASK, (offset >> 32) & _MASK, block & _MASK, block >> 32 | plane)
    )
    # a stack is stored, so that no element computes its block's draw anew
    stacked = torch.stack([word.to(torch.int32) for word in words], axis)
    if axis == block.dim():
        return stacked.view(torch.uint8)  # lowest first, as on every machine that torch trains on
    parts = [((stacked >> shift) & 0xFF).to(torch.uint8) for shift in (0, 8, 16, 24)]
    return torch.stack(parts, axis + 1).flatten(axis, axis + 1)
