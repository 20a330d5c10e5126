# SPDX-License-Identifier: Apache-2.0
"""The format of these tests: the one of templates/plugin, with a shape rule."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from te_proto.errors import ShapeError
from te_proto.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[3] / "templates/plugin/src"))

from te_example.quantizer import ExampleQuantizer  # not installed beside te-linear

if TYPE_CHECKING:
    from collections.abc import Sequence


class ToyQuantizer(ExampleQuantizer):
    multiple: int = 1  # of the rows of the columnwise plane and of the columns of the rowwise one

    format_name: ClassVar[str] = "toy"

    def check_shape(self, shape: Sequence[int]) -> None:
        for axis, size, on in (
            ("M", math.prod(shape[:-1]), self.columnwise),
            ("K", shape[-1], self.rowwise),
        ):
            if on and size % self.multiple:
                msg = f"toy: {axis} must be a multiple of {self.multiple}, got {size}"
                raise ShapeError(msg)


RECIPE = Recipe(
    name="toy",
    input=ToyQuantizer(),
    weight=ToyQuantizer(bits=7),
    grad_output=ToyQuantizer(bits=6),
)
