# SPDX-License-Identifier: Apache-2.0
"""The quantize kernel against the reference, byte for byte; ``--te-device`` chooses the device."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from te_mxfp8 import layout, reference
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits, hostile

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_mxfp8.kernels import quantize as quantize_module
from te_mxfp8.kernels.quantize import TILE, launch_quantize

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cpu_triton")

WHOLE = (256, 256)  # the interpreter pays by the program: one for a small matrix


def fresh(x: Tensor, planes: str) -> dict[str, Tensor]:
    """Return buffers in which a byte that the kernel does not write is 0xFF."""
    shapes = layout.buffer_shapes(
        x.shape, rowwise=planes != "columnwise", columnwise=planes != "rowwise"
    )
    return {
        name: torch.full(shape, 0xFF, dtype=torch.uint8, device=x.device)
        for name, shape in shapes.items()
    }


def check(
    x: Tensor,
    planes: str = "both",
    *,
    dtype: str = "e4m3",
    two_d: bool = False,
    swizzled: bool = False,
    **launch: Any,
) -> None:
    buffers = fresh(x, planes)
    launch_quantize(x, buffers, dtype=dtype, two_d=two_d, swizzled=swizzled, **launch)
    expected = reference.quantize(
        x.cpu().contiguous(),
        dtype=dtype,
        rowwise=planes != "columnwise",
        columnwise=planes != "rowwise",
        two_d=two_d,
        swizzled=swizzled,
    )
    for name, buffer in expected.items():
        assert_same_bits(buffers[name].cpu(), buffer, what=name)


LAYOUTS = [
    # shape, planes, two_d
    pytest.param((96, 160), "both", False, id="both"),
    pytest.param((96, 160), "both", True, id="both-2d"),
    pytest.param((64, 96), "rowwise", True, id="rowwise-2d"),
    pytest.param((64, 96), "columnwise", True, id="columnwise-2d"),
    pytest.param((5, 96), "rowwise", False, id="rowwise-any-rows"),
    pytest.param((64, 41), "columnwise", False, id="columnwise-any-columns"),
    pytest.param((2, 48, 96), "both", False, id="three-axes"),
    pytest.param((64,), "rowwise", False, id="one-axis"),
]


@pytest.mark.parametrize(("shape", "planes", "two_d"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_option(
    shape: tuple[int, ...],
    planes: str,
    two_d: bool,
    dtype: str,
    swizzled: bool,
    x_dtype: torch.dtype,
    device: torch.device,
) -> None:
    block = (32, 32) if two_d else (32, 1) if planes == "columnwise" else (1, 32)
    x = hostile(shape, x_dtype, seed=20, block=block, nonfinite=True).to(device)
    check(x, planes, dtype=dtype, two_d=two_d, swizzled=swizzled, tile=WHOLE)


@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_blocks_of_nan_alone(two_d: bool, device: torch.device) -> None:
    x = torch.full((64, 64), math.nan, device=device)
    x[:32, :32] = 1.0
    check(x, two_d=two_d, tile=WHOLE)


@pytest.mark.parametrize("tile", [TILE, (64, 64)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_production_tiles_on_ragged_edges(
    tile: tuple[int, int], swizzled: bool, two_d: bool, device: torch.device
) -> None:
    x = hostile((160, 288), seed=21, block=(32, 32), nonfinite=True).to(device)
    check(x, two_d=two_d, swizzled=swizzled, tile=tile)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_blocks(x_dtype: torch.dtype, device: torch.device) -> None:
    for seed, block in ((22, (1, 32)), (23, (32, 1))):
        x = hostile((512, 512), x_dtype, seed=seed, block=block, nonfinite=True).to(device)
        check(x, swizzled=True, tile=WHOLE)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_hardware_conversion_gives_the_same_bytes(dtype: str, device: torch.device) -> None:
    # on a CPU the interpreter executes the PTX of the conversion
    for x_dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hostile((96, 160), x_dtype, seed=24, nonfinite=True).to(device)
        check(x, dtype=dtype, tile=WHOLE, hardware=True)


VIEWS = [
    pytest.param(lambda x: x[:64, :96].t(), id="transposed"),
    pytest.param(lambda x: x[:64, :192:2], id="every-second-column"),
    pytest.param(lambda x: x[:128:2, :96], id="every-second-row"),
    pytest.param(lambda x: x[:1, :96].expand(64, 96), id="expanded-rows"),
    pytest.param(lambda x: x[:64, :1].expand(64, 96), id="expanded-columns"),
    pytest.param(lambda x: x[3:67, 5:101], id="offset"),
    pytest.param(lambda x: x[:, :192].view(2, 64, 192)[..., ::2], id="strided-3d"),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_a_strided_matrix_is_read_in_place(
    view: Callable[[Tensor], Tensor],
    two_d: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = view(hostile((128, 224), seed=25, nonfinite=True).to(device))
    assert not x.is_contiguous()
    check(x, two_d=two_d, tile=WHOLE)
    launches = record(monkeypatch)
    launch_quantize(x, fresh(x, "both"), dtype="e4m3", two_d=two_d, swizzled=False)
    assert [args[0].data_ptr() for args, _ in launches] == [x.data_ptr()]


def test_axes_that_are_no_matrix_are_copied(device: torch.device) -> None:
    x = hostile((4, 2, 32, 64), seed=26).to(device).transpose(1, 2)
    check(x, tile=WHOLE)


def test_offsets_pass_32_bits(device: torch.device) -> None:
    # three rows of 64 bytes in 4 GiB of memory that is never touched
    storage = torch.empty(2**31 + 32, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((3, 32), (2**30, 1))
    x.copy_(hostile((3, 32), seed=27))
    check(x, "rowwise", tile=(32, 32))


@pytest.mark.parametrize("flag", [1.0, 0.0, 1.0 - 2.0**-24, 2.0, -1.0, math.nan])
def test_noop_of_exactly_1_leaves_every_byte(flag: float, device: torch.device) -> None:
    x = hostile((64, 96), seed=28).to(device)
    noop = torch.tensor(flag, device=device)
    if flag != 1.0:
        check(x, noop=noop, tile=WHOLE)
        return
    buffers = fresh(x, "both")
    launch_quantize(x, buffers, dtype="e4m3", two_d=False, swizzled=False, noop=noop)
    for name, buffer in buffers.items():
        assert_same_bits(buffer, torch.full_like(buffer, 0xFF), what=name)


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a list that every later launch is appended to, instead of running."""
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launches.append((args, {"grid": grid, **options}))

    monkeypatch.setattr(quantize_module, "quantize_kernel", Recorder())
    return launches


def test_an_empty_tensor_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(monkeypatch)
    for shape in ((0, 64), (64, 0), (2, 0, 32)):
        x = torch.empty(shape)
        launch_quantize(x, fresh(x, "both"), dtype="e4m3", two_d=False, swizzled=False)
    assert not launches


def test_the_grid_covers_the_scale_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(monkeypatch)
    x = torch.empty(160, 96)
    launch_quantize(x, fresh(x, "both"), dtype="e4m3", two_d=False, swizzled=False)
    ((_, options),) = launches
    assert options["grid"] == (256 // 32,)
    # a contracted multiply-add would be another rounding
    assert options["enable_fp_fusion"] is False


def test_a_buffer_with_gaps_is_refused() -> None:
    x = torch.zeros(32, 64)
    buffers = fresh(x, "both")
    buffers["columnwise_data"] = torch.empty(64, 32, dtype=torch.uint8).t()
    message = (
        "mxfp8: columnwise_data must be contiguous to be written in place, got strides (1, 32) "
        "for shape (32, 64); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_quantize(x, buffers, dtype="e4m3", two_d=False, swizzled=False)


def test_a_long_row_needs_one_grid_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    # 65536 tiles of 128 columns are more than the second axis of a GPU's grid takes
    launches = record(monkeypatch)
    x = torch.empty(1, dtype=torch.bfloat16).expand(2**23)
    buffers = {
        name: torch.empty(1, dtype=torch.uint8).expand(shape)
        for name, shape in layout.buffer_shapes(x.shape, rowwise=True, columnwise=False).items()
    }
    with monkeypatch.context() as patch:
        patch.setattr(quantize_module, "check_contiguous", lambda *_: None)
        launch_quantize(x, buffers, dtype="e4m3", two_d=False, swizzled=False)
    ((_, options),) = launches
    assert options["grid"] == (4 * 2**16,)


def test_all_shapes_up_to_two_tiles(device: torch.device) -> None:
    for m, k in itertools.product((32, 128, 160), (32, 96, 128)):
        x = hostile((m, k), seed=m + k).to(device)
        check(x, tile=WHOLE)
        check(x, two_d=True, swizzled=True, tile=WHOLE)
