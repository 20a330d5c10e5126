# SPDX-License-Identifier: Apache-2.0
"""What Inductor makes has the strides of eager: a transposed plane once came out as a view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from te_nvfp4 import NVFP4Quantizer
from te_proto.testing import hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]

# whole tiles of scales, and multiples of 16 that fill none
SHAPES = [(1024, 1024), (4096, 256), (48, 1040), (1040, 16)]


@pytest.mark.parametrize(
    ("shapes", "dynamic"),
    [
        pytest.param(SHAPES[:1], False, id="static"),
        pytest.param(SHAPES[2:3], False, id="static-ragged"),
        pytest.param(SHAPES, True, id="dynamic"),
    ],
)
def test_compiled_buffers_are_contiguous(
    shapes: list[tuple[int, int]], dynamic: bool, assert_same_planes: Same
) -> None:
    quantizer = NVFP4Quantizer()
    run = torch.compile(quantizer.quantize, fullgraph=True, dynamic=dynamic)
    for shape in shapes:
        x = hostile(shape, seed=1, block=(1, 16)).bfloat16()
        made = run(x)
        assert_same_planes(made, quantizer.quantize(x))
        for name, buffer in made.inner_tensors().items():
            contiguous = torch.empty(buffer.shape, device="meta").stride()
            assert buffer.stride() == contiguous, f"{name} of {shape}"
