# SPDX-License-Identifier: Apache-2.0
"""The number formats that all plugins share: encode, decode, pack; plain torch on any device.

Every function takes any shape and strides, traces with dynamic shapes, and gives the same bits
in eager and compiled code. ``te_proto.numerics.device`` holds the same as Triton device functions.
"""

from __future__ import annotations

from te_proto.numerics.elements import (
    as_float8,
    decode,
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    e2m1_with_sign,
    encode,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    magnitudes,
    pack_e2m1,
    unpack_e2m1,
)
from te_proto.numerics.formats import (
    E2M1,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    E5M2,
    E5M2_MAX,
    ElementFormat,
    element_format,
)
from te_proto.numerics.loops import materialize, round_to
from te_proto.numerics.scales import decode_e8m0, e8m0_from_amax, e8m0_reciprocal, encode_e8m0
from te_proto.numerics.slabs import in_slabs, is_plain_cpu
from te_proto.numerics.tiles import (
    cut,
    swizzle,
    unswizzle,
    whole_tiles,
)

__all__ = [
    "E2M1",
    "E2M1_MAX",
    "E4M3",
    "E4M3_MAX",
    "E5M2",
    "E5M2_MAX",
    "ElementFormat",
    "as_float8",
    "cut",
    "decode",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "e2m1_with_sign",
    "e8m0_from_amax",
    "e8m0_reciprocal",
    "element_format",
    "encode",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "encode_e8m0",
    "in_slabs",
    "is_plain_cpu",
    "magnitudes",
    "materialize",
    "pack_e2m1",
    "round_to",
    "swizzle",
    "unpack_e2m1",
    "unswizzle",
    "whole_tiles",
]
