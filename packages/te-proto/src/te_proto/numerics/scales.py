# SPDX-License-Identifier: Apache-2.0
"""E8M0 scales: a byte ``c`` stands for ``2**(c - 127)``, 255 for NaN; there is no zero.

Bits only, in int32. torch's own ``float8_e8m0fnu`` cast rounds to nearest and Inductor's C++
backend does not know the dtype; exponents built from bits are exact on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_proto.errors import QuantizerError
from te_proto.numerics.elements import as_float32, check_codes

_INF = 0x7F800000
_NAN = 0x7FC00000
_TWO_TO_MINUS_127 = 0x00400000
# 448 and 57344 are 1.75 * 2**8 and 1.75 * 2**15
_MAX_EXPONENT = {"e4m3": 8, "e5m2": 15}
_MAX_MANTISSA = 0x600000


def encode_e8m0(x: Tensor) -> Tensor:
    """Return the code of the smallest power of two that is at least ``|x|``.

    It is rounded toward infinity, so a block divided by it never exceeds what ``x`` stood for.
    Codes end at ``2**-127``, which zero gets, and ``2**127``, which infinity gets. NaN is 255.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; the sign is ignored.

    Returns:
        uint8 of the shape of ``x``.

    Raises:
        DtypeError: ``x`` has another dtype.
    """
    bits = as_float32(x, "e8m0").view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    # A field of 0 stands for 2**-127, half of the smallest normal.
    spill = torch.where(exponent > 0, bits & 0x7FFFFF, bits - _TWO_TO_MINUS_127) > 0
    code = (exponent + spill).clamp(max=254)
    return torch.where(bits > _INF, 255, code).to(torch.uint8)


def e8m0_from_amax(amax: Tensor, name: str) -> Tensor:
    """Return the E8M0 ``scale_inv`` of blocks with these maxima: no element of them saturates.

    Equal to ``encode_e8m0(amax * fl32(1 / max))`` for every float32 ``amax``, without the product,
    and so the same where subnormals are flushed.

    Args:
        amax: float32, bfloat16 or float16, any shape and strides; the sign is ignored.
        name: element format of the block, ``"e4m3"`` or ``"e5m2"``.

    Returns:
        uint8 of the shape of ``amax``; 0 also for an all-zero block, 254 for infinity, 255 for NaN.

    Raises:
        DtypeError: ``amax`` has another dtype.
        QuantizerError: ``name`` is another.
    """
    if name not in _MAX_EXPONENT:
        msg = f"e8m0: the element format must be 'e4m3' or 'e5m2', got {name!r}; use one of these"
        raise QuantizerError(msg)
    drop = _MAX_EXPONENT[name] << 23
    bits = as_float32(amax, "e8m0").view(torch.int32) & 0x7FFFFFFF

    # Take the exponent of the largest element off; a mantissa above its own carries into one more.
    code = (bits + (0x7FFFFF - _MAX_MANTISSA - drop)) >> 23
    # The one amax whose product lies above 2**-127 and rounds down to it, being subnormal there.
    code = code - (bits == drop + _MAX_MANTISSA + 1).to(torch.int32)
    special = torch.where(bits > _INF, 255, 254)
    return torch.where(bits >= _INF, special, code.clamp(min=0)).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Return the float32 values of uint8 E8M0 codes; code 0 is the subnormal ``2**-127``."""
    check_codes(codes, "e8m0")
    return _power_of_two(codes.to(torch.int32))


def e8m0_reciprocal(codes: Tensor) -> Tensor:
    """Return ``1 / decode_e8m0(codes)`` in float32, exactly; code 254 gives a subnormal."""
    check_codes(codes, "e8m0")
    wide = codes.to(torch.int32)
    return _power_of_two(torch.where(wide == 255, 255, 254 - wide))


def _power_of_two(code: Tensor) -> Tensor:
    bits = torch.where(code == 0, _TWO_TO_MINUS_127, code << 23)
    return torch.where(code == 255, _NAN, bits).view(torch.float32)
