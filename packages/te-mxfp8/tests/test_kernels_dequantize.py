# SPDX-License-Identifier: Apache-2.0
"""The dequantize kernel against the reference; ``--te-device`` chooses the device."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from te_mxfp8 import layout, reference
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_mxfp8.kernels.dequantize import TILE, launch_dequantize

pytestmark = pytest.mark.usefixtures("cpu_triton")

WHOLE = (256, 256)  # the interpreter pays by the program: one for a small matrix


def plane(
    shape: tuple[int, ...], *, columnwise: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random bytes for the codes and scales of one plane: every value occurs."""
    g = torch.Generator().manual_seed(30)
    m, k = layout.matrix_shape(shape)
    scale_shape = layout.scale_shape(m, k, columnwise=columnwise)
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=g)
    scales = torch.randint(256, scale_shape, dtype=torch.uint8, generator=g)
    return codes.to(device), scales.to(device)


def check(
    data: Tensor,
    scale_inv: Tensor,
    *,
    columnwise: bool,
    dtype: str = "e4m3",
    swizzled: bool = False,
    out_dtype: torch.dtype = torch.float32,
    tile: tuple[int, int] = WHOLE,
    hardware: bool | None = None,
) -> None:
    out = torch.full(data.shape, 7.0, dtype=out_dtype, device=data.device)
    launch_dequantize(
        data,
        scale_inv,
        out,
        dtype=dtype,
        columnwise=columnwise,
        swizzled=swizzled,
        tile=tile,
        hardware=hardware,
    )
    expected = reference.dequantize(
        data.cpu(),
        scale_inv.cpu(),
        dtype=dtype,
        columnwise=columnwise,
        swizzled=swizzled,
        out_dtype=out_dtype,
    )
    got = out.cpu()
    # which NaN it is depends on the instruction that multiplied
    assert_same_bits(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


PLANES = [
    pytest.param((96, 160), False, id="rowwise"),
    pytest.param((96, 160), True, id="columnwise"),
    pytest.param((5, 96), False, id="rowwise-any-rows"),
    pytest.param((64, 41), True, id="columnwise-any-columns"),
    pytest.param((2, 48, 96), True, id="three-axes"),
    pytest.param((64,), False, id="one-axis"),
]


@pytest.mark.parametrize(("shape", "columnwise"), PLANES)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_option(
    shape: tuple[int, ...],
    columnwise: bool,
    dtype: str,
    swizzled: bool,
    out_dtype: torch.dtype,
    device: torch.device,
) -> None:
    data, scale_inv = plane(shape, columnwise=columnwise, device=device)
    check(
        data,
        scale_inv,
        columnwise=columnwise,
        dtype=dtype,
        swizzled=swizzled,
        out_dtype=out_dtype,
    )


@pytest.mark.parametrize("tile", [TILE, (64, 64)], ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_production_tiles_on_ragged_edges(
    tile: tuple[int, int], columnwise: bool, device: torch.device
) -> None:
    data, scale_inv = plane((160, 288), columnwise=columnwise, device=device)
    for swizzled in (False, True):
        check(data, scale_inv, columnwise=columnwise, swizzled=swizzled, tile=tile)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_hardware_conversion_gives_the_same_values(dtype: str, device: torch.device) -> None:
    data, scale_inv = plane((96, 160), columnwise=False, device=device)
    check(data, scale_inv, columnwise=False, dtype=dtype, hardware=True)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_strided_codes_and_scales(columnwise: bool, device: torch.device) -> None:
    data, scale_inv = plane((64, 96), columnwise=columnwise, device=device)
    wide = torch.stack((data, data), -1)[..., 0]
    assert wide.stride() == (192, 2)
    check(wide, torch.stack((scale_inv, scale_inv), -1)[..., 0], columnwise=columnwise)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_an_empty_tensor_is_left_alone(shape: tuple[int, int], device: torch.device) -> None:
    for columnwise in (False, True):
        data, scale_inv = plane(shape, columnwise=columnwise, device=device)
        check(data, scale_inv, columnwise=columnwise)


def test_an_output_with_gaps_is_refused() -> None:
    data, scale_inv = plane((32, 64), columnwise=False, device=torch.device("cpu"))
    message = (
        "mxfp8: out must be contiguous to be written in place, got strides (1, 32) "
        "for shape (32, 64); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_dequantize(
            data,
            scale_inv,
            torch.empty(64, 32).t(),
            dtype="e4m3",
            columnwise=False,
            swizzled=False,
        )
