# SPDX-License-Identifier: Apache-2.0
"""The dequantize kernel against the reference, bit for bit; ``--te-device`` chooses the device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_nvfp4 import NVFP4Quantizer, reference
from te_proto.blocks import matrix_shape
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_nvfp4.kernels.dequantize import TILE, launch_dequantize

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.usefixtures("cpu_triton")

RHT = {"with_rht": True, "with_post_rht_amax": True}
WHOLE = (256, 256)  # the interpreter pays by the program: one for a small matrix


def plane(
    shape: tuple[int, ...], q: NVFP4Quantizer, *, columnwise: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random bytes for the codes and scales of one plane: every value occurs."""
    g = torch.Generator().manual_seed(30)
    name = "columnwise" if columnwise else "rowwise"
    specs = q.describe_buffers(shape)
    made = [
        torch.randint(256, specs[f"{name}_{what}"].shape, dtype=torch.uint8, generator=g)
        for what in ("data", "scale_inv")
    ]
    amax = torch.randn(specs[f"amax_{name}"].shape, generator=g).abs() * 7.0
    return made[0].to(device), made[1].to(device), amax.to(device)


def check(
    shape: tuple[int, ...],
    q: NVFP4Quantizer,
    *,
    columnwise: bool,
    device: torch.device,
    out_dtype: torch.dtype = torch.float32,
    tile: tuple[int, int] = WHOLE,
    float8: bool | None = None,
) -> None:
    data, scale_inv, amax = plane(shape, q, columnwise=columnwise, device=device)
    out = torch.full(shape, 7.0, dtype=out_dtype, device=device)
    launch_dequantize(
        data, scale_inv, amax, out, q, columnwise=columnwise, tile=tile, float8=float8
    )
    expected = reference.dequantize(
        data.cpu(),
        scale_inv.cpu(),
        amax.cpu(),
        q,
        shape,
        columnwise=columnwise,
        out_dtype=out_dtype,
    )
    got = out.cpu()
    # which NaN it is depends on the instruction that multiplied
    assert_same_bits(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    assert not expected.isnan().all()


PLANES = [
    pytest.param((96, 160), False, {}, id="rowwise"),
    pytest.param((96, 160), True, {}, id="columnwise"),
    pytest.param((96, 160), False, {"row_scaled_nvfp4": True}, id="rowwise-lines"),
    pytest.param((96, 160), True, {"row_scaled_nvfp4": True}, id="columnwise-lines"),
    pytest.param((5, 96), False, {"columnwise": False}, id="rowwise-any-rows"),
    pytest.param((64, 41), True, {"rowwise": False}, id="columnwise-any-columns"),
    pytest.param((64, 41), True, {"rowwise": False, **RHT}, id="transformed"),
    pytest.param((64, 96), True, {**RHT, "with_random_sign_mask": False}, id="unsigned"),
    pytest.param((2, 48, 96), True, {}, id="three-axes"),
    pytest.param((64,), False, {"columnwise": False}, id="one-axis"),
    pytest.param(
        (64, 96), False, {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}, id="4over6-256"
    ),
]


@pytest.mark.parametrize(("shape", "columnwise", "fields"), PLANES)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_option(
    shape: tuple[int, ...],
    columnwise: bool,
    fields: dict[str, Any],
    swizzled: bool,
    out_dtype: torch.dtype,
    device: torch.device,
) -> None:
    if swizzled and fields.get("nvfp4_use_4over6"):
        return  # no such layout
    q = NVFP4Quantizer(**fields, optimize_for_gemm=swizzled)
    check(shape, q, columnwise=columnwise, device=device, out_dtype=out_dtype)


@pytest.mark.parametrize("tile", [TILE, (64, 64)], ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_production_tiles_on_ragged_edges(
    tile: tuple[int, int], columnwise: bool, device: torch.device
) -> None:
    for fields in ({"optimize_for_gemm": True}, RHT):
        q = NVFP4Quantizer(**fields)
        check((80, 144), q, columnwise=columnwise, device=device, tile=tile)


def test_hardware_conversion_gives_the_same_values(device: torch.device) -> None:
    check((96, 160), NVFP4Quantizer(), columnwise=False, device=device, float8=True)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_an_empty_tensor_is_left_alone(shape: tuple[int, int], device: torch.device) -> None:
    for columnwise in (False, True):
        q = NVFP4Quantizer()
        data, scale_inv, amax = plane(shape, q, columnwise=columnwise, device=device)
        out = torch.empty(shape, device=device)
        launch_dequantize(data, scale_inv, amax, out, q, columnwise=columnwise)
        assert matrix_shape(out.shape) == shape


def test_an_output_with_gaps_is_refused() -> None:
    q = NVFP4Quantizer()
    data, scale_inv, amax = plane((32, 64), q, columnwise=False, device=torch.device("cpu"))
    message = (
        "nvfp4: out must be contiguous to be written in place, got strides (1, 32) "
        "for shape (32, 64); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_dequantize(data, scale_inv, amax, torch.empty(64, 32).t(), q, columnwise=False)
