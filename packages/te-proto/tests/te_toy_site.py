# SPDX-License-Identifier: Apache-2.0
"""A folder in which te-toy is installed, for the path of this process or of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CARD = """\
from te_proto.spec import PROTOCOL, FormatSpec

FORMAT = FormatSpec(
    name="toy", distribution="te-toy", protocol=PROTOCOL, summary="int8 with float32 scales",
    elements=("int8",), scale="float32", block=(1, 4), quantizer="te_toy:ToyQuantizer",
    tensor="te_toy:ToyTensor", storage="te_toy:ToyStorage", recipe="te_toy:recipe",
)
"""


def install(site: Path, card: str = CARD) -> Path:
    """Make ``site`` such a folder and return it."""
    info = site / "te_toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: te-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[te_proto.formats]\ntoy = te_toy_card:FORMAT\n")
    (site / "te_toy_card.py").write_text(card)
    return site
