# SPDX-License-Identifier: Apache-2.0
"""The kernels that read codes against the reference; ``--te-device`` chooses the device."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from te_fp8_block import layout, reference
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_block.kernels.dequantize import TILE, launch_dequantize
from te_fp8_block.kernels.transpose import TILE as TRANSPOSE_TILE
from te_fp8_block.kernels.transpose import launch_transpose

pytestmark = pytest.mark.usefixtures("cpu_triton")

WHOLE = (512, 512)  # the interpreter pays by the program: one for a small matrix
two_dims = pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
planes = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])


def plane(
    shape: tuple[int, ...], *, columnwise: bool, two_d: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random bytes for the codes and scales of one plane: every code occurs."""
    g = torch.Generator().manual_seed(30)
    shapes = layout.buffer_shapes(shape, rowwise=True, columnwise=True, two_d=two_d)
    kept = "columnwise" if columnwise else "rowwise"
    codes = torch.randint(256, shapes[f"{kept}_data"], dtype=torch.uint8, generator=g)
    bits = torch.randint(-(2**31), 2**31, shapes[f"{kept}_scale_inv"], generator=g)
    return codes.to(device), bits.to(torch.int32).view(torch.float32).to(device)


def check(
    data: Tensor,
    scale_inv: Tensor,
    shape: tuple[int, ...],
    *,
    columnwise: bool,
    two_d: bool,
    dtype: str = "e4m3",
    out_dtype: torch.dtype = torch.float32,
    tile: tuple[int, int] = WHOLE,
    hardware: bool | None = None,
) -> None:
    out = torch.full(shape, 7.0, dtype=out_dtype, device=data.device)
    launch_dequantize(
        data,
        scale_inv,
        out,
        dtype=dtype,
        columnwise=columnwise,
        two_d=two_d,
        tile=tile,
        hardware=hardware,
    )
    expected = reference.dequantize(
        data.cpu(),
        scale_inv.cpu(),
        shape,
        dtype=dtype,
        columnwise=columnwise,
        two_d=two_d,
        out_dtype=out_dtype,
    )
    got = out.cpu()
    # which NaN it is depends on the instruction that multiplied
    assert_same_bits(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize(
    "shape", [(130, 300), (3, 129), (2, 48, 130), (311,), (), (640, 2)], ids=str
)
@planes
@two_dims
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_every_option(
    shape: tuple[int, ...], columnwise: bool, two_d: bool, dtype: str, device: torch.device
) -> None:
    options = {"columnwise": columnwise, "two_d": two_d}
    data, scale_inv = plane(shape, **options, device=device)
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(data, scale_inv, shape, **options, dtype=dtype, out_dtype=out_dtype)


@planes
@two_dims
def test_production_tile_on_ragged_edges(
    columnwise: bool, two_d: bool, device: torch.device
) -> None:
    for shape in ((60, 150), (150, 60)):
        data, scale_inv = plane(shape, columnwise=columnwise, two_d=two_d, device=device)
        check(data, scale_inv, shape, columnwise=columnwise, two_d=two_d, tile=TILE)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_hardware_conversion_gives_the_same_values(dtype: str, device: torch.device) -> None:
    options = {"columnwise": False, "two_d": False}
    data, scale_inv = plane((96, 160), **options, device=device)
    check(data, scale_inv, (96, 160), **options, dtype=dtype, hardware=True)


@planes
@two_dims
def test_strided_codes_and_scales(columnwise: bool, two_d: bool, device: torch.device) -> None:
    options = {"columnwise": columnwise, "two_d": two_d}
    data, scale_inv = plane((130, 150), **options, device=device)
    wide = torch.stack((data, data), -1)[..., 0]
    assert not wide.is_contiguous()
    spread = torch.stack((scale_inv, scale_inv), -1)[..., 0]
    check(wide, spread, (130, 150), **options)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
@two_dims
def test_an_empty_tensor_is_left_alone(
    shape: tuple[int, int], two_d: bool, device: torch.device
) -> None:
    for columnwise in (False, True):
        options = {"columnwise": columnwise, "two_d": two_d}
        data, scale_inv = plane(shape, **options, device=device)
        check(data, scale_inv, shape, **options)


def test_an_output_with_gaps_is_refused() -> None:
    options = {"columnwise": False, "two_d": False}
    data, scale_inv = plane((32, 64), **options, device=torch.device("cpu"))
    message = (
        "fp8_block: out must be contiguous to be written in place, got strides (1, 32) "
        "for shape (32, 64); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_dequantize(data, scale_inv, torch.empty(64, 32).t(), dtype="e4m3", **options)


# -- transpose ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(130, 70), (1, 5), (5, 1), (128, 64), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("tile", [TRANSPOSE_TILE, (32, 128)], ids=str)
def test_transpose_moves_every_byte(
    shape: tuple[int, int], tile: tuple[int, int], device: torch.device
) -> None:
    g = torch.Generator().manual_seed(31)
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=g).to(device)
    for given in (codes, torch.stack((codes, codes), -1)[..., 0], codes.t().contiguous().t()):
        out = torch.full(shape[::-1], 0xFF, dtype=torch.uint8, device=device)
        launch_transpose(given, out, tile=tile)
        assert_same_bits(out, reference.transpose_codes(codes))


def test_transpose_into_gaps_is_refused() -> None:
    message = (
        "fp8_block: out must be contiguous to be written in place, got strides (1, 4) "
        "for shape (4, 3); write into a new buffer"
    )
    codes = torch.zeros(3, 4, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_transpose(codes, torch.empty(3, 4, dtype=torch.uint8).t())
