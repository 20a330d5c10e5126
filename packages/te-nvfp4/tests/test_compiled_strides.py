# SPDX-License-Identifier: Apache-2.0
"""What Inductor makes has the strides of eager: a transposed plane once came out as a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    ("fields", "dynamic"),
    [
        pytest.param({}, False, id="1d-static"),
        pytest.param({}, True, id="1d-dynamic"),
        pytest.param({"with_2d_quantization": True}, False, id="2d-static"),
    ],
)
def test_compiled_buffers_are_contiguous(
    fields: dict[str, Any], dynamic: bool, assert_same_planes: Same
) -> None:
    quantizer = NVFP4Quantizer(**fields)
    run = torch.compile(quantizer.quantize, fullgraph=True, dynamic=dynamic)
    for shape in SHAPES:
        torch.compiler.reset()
        x = hostile(shape, seed=1, block=(1, 16)).bfloat16()
        made = run(x)
        assert_same_planes(made, quantizer.quantize(x))
        for name, buffer in made.inner_tensors().items():
            contiguous = torch.empty(buffer.shape, device="meta").stride()
            assert buffer.stride() == contiguous, f"{name} of {shape}"
