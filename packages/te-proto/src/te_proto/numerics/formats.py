# SPDX-License-Identifier: Apache-2.0
"""Element formats as numbers: how many bits, which bias, the largest finite value."""

from __future__ import annotations

from dataclasses import dataclass

from te_proto.errors import QuantizerError


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """A floating-point format of at most eight bits.

    Attributes:
        name: ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``.
        exponent_bits: bits of the exponent.
        mantissa_bits: bits of the mantissa, without the hidden one.
        bias: subtracted from the exponent field of a normal number.
        max: largest finite value.
        max_code: code of ``max``.
        torch_dtype: name of the torch dtype with the same bits, or None where torch has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    torch_dtype: str | None

    @property
    def sign_bit(self) -> int:
        """Position of the sign, which is also the number of bits below it."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.sign_bit + 1

    @property
    def nan_code(self) -> int:
        """Code that every NaN becomes: all bits below the sign set.

        E2M1 has no NaN, and that code is +6, as the hardware conversion gives.
        """
        return (1 << self.sign_bit) - 1

    @property
    def min_normal(self) -> float:
        """Smallest normal value."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, and the distance of neighbours below ``2 * min_normal``."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


E4M3 = ElementFormat(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    max_code=0x7E,
    torch_dtype="float8_e4m3fn",
)
E5M2 = ElementFormat(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    max_code=0x7B,
    torch_dtype="float8_e5m2",
)
E2M1 = ElementFormat(
    name="e2m1",
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max=6.0,
    max_code=0x7,
    torch_dtype=None,
)

E4M3_MAX = E4M3.max
E5M2_MAX = E5M2.max
E2M1_MAX = E2M1.max


def element_format(name: str) -> ElementFormat:
    """Return the element format called ``name``.

    Raises:
        QuantizerError: there is none of that name.
    """
    for known in (E4M3, E5M2, E2M1):
        if known.name == name:
            return known
    msg = f"element format must be 'e4m3', 'e5m2' or 'e2m1', got {name!r}; use one of these names"
    raise QuantizerError(msg)
