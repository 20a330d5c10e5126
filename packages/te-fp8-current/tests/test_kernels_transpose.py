# SPDX-License-Identifier: Apache-2.0
"""The transpose kernel against the reference; ``--te-device`` chooses the device."""

from __future__ import annotations

import re

import pytest
import torch

from te_fp8_current import reference
from te_fp8_current.layout import transpose_shape
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_current.kernels import transpose as transpose_module
from te_fp8_current.kernels.transpose import TILE, launch_transpose

pytestmark = pytest.mark.usefixtures("cpu_triton")


def check(codes: torch.Tensor, tile: tuple[int, int]) -> None:
    shape = transpose_shape(codes.shape)
    out = torch.full(shape, 0xFF, dtype=torch.uint8, device=codes.device)
    launch_transpose(codes, out, tile=tile)
    assert_same_bits(out.cpu(), reference.move_last_to_front(codes.cpu()))


@pytest.mark.parametrize("tile", [TILE, (16, 16), (128, 64)], ids=str)
@pytest.mark.parametrize("shape", [(), (9,), (64, 128), (70, 133), (1, 5), (5, 1), (2, 3, 41)])
def test_every_byte_is_moved(
    shape: tuple[int, ...], tile: tuple[int, int], device: torch.device
) -> None:
    g = torch.Generator().manual_seed(31)
    codes = torch.randint(255, shape, dtype=torch.uint8, generator=g).to(device)
    check(codes, tile)
    if codes.dim() == 2:
        check(codes.t(), tile)
        check(codes[::2, ::2], tile)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)], ids=str)
def test_an_empty_tensor_is_not_launched(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transpose_module, "transpose_kernel", None)
    check(torch.empty(shape, dtype=torch.uint8), TILE)


def test_an_output_with_gaps_is_refused() -> None:
    message = (
        "fp8_current: out must be contiguous to be written in place, got strides (1, 8) "
        "for shape (8, 3); write into a new buffer"
    )
    out = torch.empty(3, 8, dtype=torch.uint8).t()
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_transpose(torch.zeros(3, 8, dtype=torch.uint8), out)
