# SPDX-License-Identifier: Apache-2.0
"""The dequantize kernel against the reference; ``--te-device`` chooses the device."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from te_fp8_current import reference
from te_fp8_current.layout import transpose_shape
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_current.kernels import dequantize as dequantize_module
from te_fp8_current.kernels.dequantize import TILE, launch_dequantize

pytestmark = pytest.mark.usefixtures("cpu_triton")

WHOLE = (128, 128)  # the interpreter pays by the program: one for a small matrix
ALL = (torch.float32, torch.bfloat16, torch.float16)


def random_codes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(30)
    return torch.randint(256, shape, dtype=torch.uint8, generator=g).to(device)


def check(
    buffers: dict[str, Tensor],
    shape: tuple[int, ...],
    *,
    dtype: str = "e4m3",
    out_dtype: torch.dtype = torch.float32,
    tile: tuple[int, int] = WHOLE,
    hardware: bool | None = None,
) -> None:
    scale_inv = buffers["fp8_scale_inv"]
    out = torch.full(shape, 7.0, dtype=out_dtype, device=scale_inv.device)
    launch_dequantize(buffers, out, dtype=dtype, tile=tile, hardware=hardware)
    if "fp8_data" in buffers:
        codes = buffers["fp8_data"].cpu()
    else:
        codes = reference.move_front_to_last(buffers["data_transpose"].cpu(), shape)
    expected = reference.dequantize(codes, scale_inv.cpu(), dtype=dtype, out_dtype=out_dtype)
    got = out.cpu()
    # which NaN it is depends on the instruction that multiplied
    assert_same_bits(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("shape", [(70, 133), (5, 3), (2, 3, 40), (300,), ()], ids=str)
@pytest.mark.parametrize("name", ["fp8_data", "data_transpose"])
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("out_dtype", ALL)
def test_every_option(
    shape: tuple[int, ...], name: str, dtype: str, out_dtype: torch.dtype, device: torch.device
) -> None:
    size = shape if name == "fp8_data" else transpose_shape(shape)
    for scale_inv in (1 / 448, 2.0**-127, 7.6e35):
        scale = torch.tensor([scale_inv], device=device)
        check(
            {name: random_codes(size, device), "fp8_scale_inv": scale},
            shape,
            dtype=dtype,
            out_dtype=out_dtype,
        )


@pytest.mark.parametrize("tile", [TILE, (32, 128)], ids=str)
@pytest.mark.parametrize("name", ["fp8_data", "data_transpose"])
def test_tiles_on_ragged_edges(name: str, tile: tuple[int, int], device: torch.device) -> None:
    size = (70, 133) if name == "fp8_data" else (133, 70)
    scale = torch.tensor([0.3], device=device)
    check({name: random_codes(size, device), "fp8_scale_inv": scale}, (70, 133), tile=tile)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_hardware_conversion_gives_the_same_values(dtype: str, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)
    scale = torch.tensor([0.3], device=device)
    check({"fp8_data": codes, "fp8_scale_inv": scale}, (16, 16), dtype=dtype, hardware=True)


def test_codes_are_read_rather_than_the_transpose(device: torch.device) -> None:
    codes, scale = random_codes((5, 9), device), torch.ones(1, device=device)
    stale = torch.zeros((9, 5), dtype=torch.uint8, device=device)
    buffers = {"fp8_data": codes, "data_transpose": stale, "fp8_scale_inv": scale}
    check(buffers, (5, 9))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)], ids=str)
def test_an_empty_tensor_is_not_launched(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize_module, "dequantize_kernel", None)
    codes = torch.empty(shape, dtype=torch.uint8)
    check({"fp8_data": codes, "fp8_scale_inv": torch.ones(1)}, shape)


def test_an_output_with_gaps_is_refused() -> None:
    buffers = {
        "fp8_data": random_codes((3, 8), torch.device("cpu")),
        "fp8_scale_inv": torch.ones(1),
    }
    message = (
        "fp8_current: out must be contiguous to be written in place, got strides (1, 3) "
        "for shape (3, 8); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_dequantize(buffers, torch.empty(8, 3).t(), dtype="e4m3")
