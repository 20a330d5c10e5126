# SPDX-License-Identifier: Apache-2.0
"""What is timed of each format, as data: the one place of this repository that lists formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODES = ("eager", "compiled")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One quantizer of a format, and the peers that do the same work.

    Attributes:
        name: shown in the table.
        role: field of the format's recipe whose quantizer is taken.
        columnwise: make the columnwise plane too. Only the quantization is timed then, since a
            dequantization reads one plane.
        options: changed on that quantizer.
        peers: keys of ``subjects.PEERS``. With both planes, a peer casts the input and then its
            transpose.
        block: ``(rows, columns)`` that share a scale rowwise, 0 for the whole axis, None for what
            the format's card says. Errors are bounded by the maximum of a block.
        checks_columnwise: False where the columnwise plane holds values that were transformed.
    """

    name: str
    role: str = "input"
    columnwise: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    checks_columnwise: bool = True


DEFAULT = (Case(name="rowwise"), Case(name="both planes", columnwise=True))
"""Cases of a format without an entry."""

_NO_RHT = {"with_rht": False, "with_post_rht_amax": False}

CASES: dict[str, tuple[Case, ...]] = {
    "fp8_current": (
        Case(name="rowwise", peers=("float8 tensorwise", "Float8Tensor tensor")),
        Case(
            name="both planes, transposed",
            columnwise=True,
            options={"separate_transpose": True},
            peers=("float8 tensorwise", "Float8Tensor tensor"),
        ),
    ),
    "fp8_block": (
        Case(name="1x128 rowwise", block=(1, 128), peers=("Float8Tensor 1x128",)),
        Case(
            name="1x128 both planes", block=(1, 128), columnwise=True, peers=("Float8Tensor 1x128",)
        ),
        Case(name="128x128 rowwise", role="weight", peers=("Float8Tensor 128x128",)),
        Case(
            name="128x128 both planes",
            role="weight",
            columnwise=True,
            peers=("Float8Tensor 128x128",),
        ),
    ),
    "mxfp8": (
        Case(name="rowwise", peers=("MXTensor rceil",)),
        Case(name="both planes", columnwise=True, peers=("MXTensor rceil",)),
        Case(
            name="32x32 both planes",
            role="weight",
            columnwise=True,
            options={"with_2d_quantization": True},
            block=(32, 32),
        ),
    ),
    "nvfp4": (
        Case(name="rowwise", options=_NO_RHT, peers=("NVFP4Tensor two-level",)),
        Case(
            name="both planes",
            columnwise=True,
            options=_NO_RHT,
            peers=("NVFP4Tensor two-level",),
        ),
        Case(name="input: RHT", columnwise=True, checks_columnwise=False),
        Case(name="weight: 16x16", role="weight", columnwise=True, block=(16, 16)),
        Case(
            name="gradient: RHT, stochastic",
            role="grad_output",
            columnwise=True,
            checks_columnwise=False,
        ),
    ),
}
"""Format id -> what is timed of it; an entry waits until the format is installed."""
