# SPDX-License-Identifier: Apache-2.0
"""How far the conformance kit looks; chosen by ``--te-profile``. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Bounds of a search.

    Attributes:
        examples: cases that Hypothesis draws for each property, besides the fixed ones.
        interpreted: the same where kernels run in the interpreter, which is slow.
        compiled: quantizers that are compiled for each property.
        shrink: look for the smallest case once one fails.
    """

    examples: int
    interpreted: int
    compiled: int
    shrink: bool = True


PROFILES = {
    "ci": Profile(examples=10, interpreted=1, compiled=2),
    "long": Profile(examples=400, interpreted=20, compiled=100),
}

_active = PROFILES["ci"]


def active() -> Profile:
    """Return the profile in use."""
    return _active


def use(profile: Profile) -> None:
    """Use ``profile`` from now on."""
    global _active  # an option of the process
    _active = profile
