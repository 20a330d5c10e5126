# SPDX-License-Identifier: Apache-2.0
"""E2M1 codes rounded stochastically, and codes packed two a byte along either axis."""

from __future__ import annotations

import torch
from torch import Tensor

from te_proto.graphs import is_compiling
from te_proto.numerics import E2M1, decode_e2m1, e2m1_with_sign, materialize, pack_e2m1, unpack_e2m1


def encode_e2m1_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Return the E2M1 code of each element, rounded up with the probability of what is cut off.

    ``bits / 256`` of a step, the distance of the codes around ``|x|``, is added before the rest is
    cut off: a code stays as it is, and what lies between two becomes the upper one in so many of
    256 cases as it is 256ths of a step above the lower, rounded down. NaN becomes +6; zeros keep
    their sign.

    Args:
        x: float32.
        bits: integers of 0 to 255, of the same shape.
    """
    magnitude = x.abs()
    step = (magnitude >= 4.0).float() + (magnitude >= 2.0).float() * 0.5 + 0.5
    moved = magnitude + bits.float() * (1.0 / 256.0) * step
    # each of the three is the code in its own range and above it in the others
    code = torch.minimum((moved * 2.0).floor(), moved.floor() + 2.0)
    code = torch.minimum(code, (moved * 0.5).floor() + 4.0).clamp(max=float(E2M1.max_code))
    return e2m1_with_sign(code, x)


def pack_rows(codes: Tensor) -> Tensor:
    """Return ``[R, C // 2]`` of codes ``[R, C]``, two neighbours of a row a byte; C % 8 == 0."""
    if not is_compiling():
        return pack_e2m1(codes)
    # eight bytes at a time: Inductor vectorizes no load of every second byte
    words = codes.view(torch.int64)
    words = words | (words >> 4)
    packed = (words & 0xFF) | ((words >> 8) & 0xFF00)
    packed = packed | ((words >> 16) & 0xFF0000) | ((words >> 24) & 0xFF000000)
    return packed.to(torch.int32).view(torch.uint8)


def pack_columns(codes: Tensor) -> Tensor:
    """Return ``[R // 2, C]`` of codes ``[R, C]``, two neighbours of a column a byte."""
    low, high = materialize(codes).unflatten(0, (-1, 2)).unbind(1)
    packed: Tensor = low | (high << 4)
    return packed


def decode_rows(packed: Tensor) -> Tensor:
    """Return the float32 values ``[R, C]`` of packed codes ``[R, C // 2]``."""
    if is_compiling():
        return decode_e2m1(unpack_e2m1(packed))
    return _pairs(packed).flatten(1)


def decode_columns(packed: Tensor) -> Tensor:
    """Return the float32 values ``[R, C]`` of codes that :func:`pack_columns` packed."""
    if is_compiling():
        return decode_e2m1(torch.stack((packed & 0xF, packed >> 4), 1).flatten(0, 1))
    return _pairs(packed).transpose(1, 2).flatten(0, 1)


def _pairs(packed: Tensor) -> Tensor:
    """Return the two values of each byte, from a table: one pass instead of ten."""
    every = torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    table = decode_e2m1(unpack_e2m1(every))
    return table.index_select(0, packed.flatten().int()).view(*packed.shape, 2)


def transpose_packed(packed: Tensor) -> Tensor:
    """Return ``[C, R // 2]`` of packed codes ``[R, C // 2]``, those of the transposed matrix."""
    return pack_columns(unpack_e2m1(packed)).t().contiguous()
