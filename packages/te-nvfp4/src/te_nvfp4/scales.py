# SPDX-License-Identifier: Apache-2.0
"""From maxima to scales: the float32 arithmetic that all planes and kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_proto.numerics import E2M1_MAX, decode_e4m3, encode_e4m3, materialize

FLT_MAX = torch.finfo(torch.float32).max


class TensorScales(NamedTuple):
    """What an amax says for all blocks under it.

    Attributes:
        encode: maps amax to ``6 * e4m3_max``; 1 where amax is 0 or infinite.
        decode: its inverse; may be subnormal.
    """

    encode: Tensor
    decode: Tensor


class BlockScales(NamedTuple):
    """What the elements of a block share.

    Attributes:
        code: E4M3 byte of ``scale_inv``, which together with amax gives back the real values.
        multiplier: maps the block's elements to E2M1; FLT_MAX where the code is 0.
    """

    code: Tensor
    multiplier: Tensor


def fill(like: Tensor, value: float) -> Tensor:
    """Return a 0-d float32 on the device of ``like``.

    On CUDA, eager torch divides by a Python number as by a factor, and rounds twice.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def tensor_scales(amax: Tensor, e4m3_max: int) -> TensorScales:
    """Return the scales of float32 ``amax``, which is not NaN."""
    encode = (fill(amax, E2M1_MAX * e4m3_max) / amax).clamp(max=FLT_MAX)
    encode = torch.where((amax == 0.0) | (encode == 0.0), 1.0, encode)
    return TensorScales(encode, fill(amax, 1.0) / encode)


def block_scales(block_amax: Tensor, of: TensorScales) -> BlockScales:
    """Return the scales of blocks with these float32 maxima: the maximum becomes 6.

    Infinity saturates at code 0x7E, 448.
    """
    return scale_blocks(block_amax * (of.encode * fill(block_amax, 1.0 / E2M1_MAX)), of)


def scale_blocks(scale_inv: Tensor, of: TensorScales) -> BlockScales:
    """Return the scales of blocks whose unrounded ``scale_inv`` is given."""
    code = encode_e4m3(scale_inv)
    product = decode_e4m3(code) * of.decode
    return BlockScales(code, materialize((fill(product, 1.0) / product).clamp(max=FLT_MAX)))
