# SPDX-License-Identifier: Apache-2.0
"""The quantize kernel against the reference, byte for byte; ``--te-device`` chooses the device."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from te_fp8_current import reference
from te_fp8_current.layout import buffer_shapes
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits, hostile

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_current.kernels import quantize as quantize_module
from te_fp8_current.kernels.quantize import TILE, launch_quantize

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cpu_triton")

WHOLE = (128, 128)  # the interpreter pays by the program: one for a small matrix
ALL = (torch.float32, torch.bfloat16, torch.float16)
WHICH = {"both": (True, True), "codes": (True, False), "transpose": (False, True)}


def fresh(x: Tensor, which: str) -> dict[str, Tensor]:
    """Return buffers in which a byte that the kernel does not write is 0xFF."""
    rowwise, columnwise = WHICH[which]
    shapes = buffer_shapes(x.shape, rowwise=rowwise, columnwise=columnwise, separate_transpose=True)
    return {
        name: torch.full(shape, 0xFF, dtype=torch.uint8, device=x.device)
        if name != "fp8_scale_inv"
        else torch.full(shape, math.nan, device=x.device)
        for name, shape in shapes.items()
    }


def check(
    x: Tensor,
    which: str = "both",
    *,
    amax: Tensor | None = None,
    dtype: str = "e4m3",
    pow_2: bool = False,
    epsilon: float = 0.0,
    **launch: Any,
) -> None:
    buffers = fresh(x, which)
    if amax is None:
        amax = reference.amax(x.cpu())
    options = {"dtype": dtype, "force_pow_2_scales": pow_2, "amax_epsilon": epsilon}
    launch_quantize(x, amax.to(x.device), buffers, **options, **launch)
    data, transpose = WHICH[which]
    expected = reference.quantize(x.cpu(), amax.cpu(), **options, data=data, transpose=transpose)
    assert list(buffers) == list(expected)
    for name, buffer in expected.items():
        assert_same_bits(buffers[name].cpu(), buffer, what=name)


@pytest.mark.parametrize("shape", [(96, 80), (5, 41), (2, 3, 40), (300,), ()], ids=str)
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])
@pytest.mark.parametrize("x_dtype", ALL)
def test_every_option(
    shape: tuple[int, ...],
    which: str,
    dtype: str,
    pow_2: bool,
    x_dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = hostile(shape, x_dtype, seed=20).clamp(-900.0, 900.0).to(device)
    check(x, which, dtype=dtype, pow_2=pow_2, tile=WHOLE)


@pytest.mark.parametrize("tile", [TILE, (32, 128), (128, 64)], ids=str)
def test_tiles_on_ragged_edges(tile: tuple[int, int], device: torch.device) -> None:
    x = hostile((70, 133), seed=21, nonfinite=True).to(device)
    check(x, tile=tile)
    check(x.nan_to_num(0.0, 1.0, -1.0) * 2.0**-9, pow_2=True, tile=tile)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-37, 1.0, 1e-40])
def test_scale_of_every_binade(
    dtype: str, pow_2: bool, epsilon: float, device: torch.device
) -> None:
    bits = [0, 1, 2, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, -0x400000]
    bits += [
        (e << 23) + top + o for e in range(1, 255, 23) for top in (0, 0x600000) for o in (-1, 0, 1)
    ]
    x = torch.tensor([1.0, -(2.0**-130), 2.0**100], device=device)
    for amax in torch.tensor(bits, dtype=torch.int32).view(torch.float32):
        check(
            x, "codes", amax=amax.reshape(1), dtype=dtype, pow_2=pow_2, epsilon=epsilon, tile=(1, 4)
        )


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("x_dtype", ALL)
def test_every_value_under_one_scale(
    dtype: str, x_dtype: torch.dtype, device: torch.device
) -> None:
    if x_dtype == torch.float32:
        x = hostile((256, 256), x_dtype, seed=22, nonfinite=True).to(device)
    else:
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(x_dtype).view(256, 256).to(device)
    for amax in (1.0, 448.0, 3e-5, math.inf):
        check(x, amax=torch.tensor([amax]), dtype=dtype, tile=(256, 256))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_hardware_conversion_gives_the_same_bytes(dtype: str, device: torch.device) -> None:
    # on a CPU the interpreter executes the PTX of the conversion
    for x_dtype in ALL:
        x = hostile((64, 96), x_dtype, seed=24, nonfinite=True).to(device)
        check(x, amax=torch.tensor([3.0]), dtype=dtype, tile=WHOLE, hardware=True)


VIEWS = [
    pytest.param(lambda x: x.t(), id="transposed"),
    pytest.param(lambda x: x[:, ::2], id="every-second-column"),
    pytest.param(lambda x: x[::2], id="every-second-row"),
    pytest.param(lambda x: x[:1].expand(64, -1), id="expanded-rows"),
    pytest.param(lambda x: x[:, :1].expand(-1, 96), id="expanded-columns"),
    pytest.param(lambda x: x[3:, 5:], id="offset"),
    pytest.param(lambda x: x.view(2, 64, 112)[..., ::2], id="strided-3d"),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_matrix_is_read_in_place(
    view: Callable[[Tensor], Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = view(hostile((128, 112), seed=25, nonfinite=True).to(device))
    assert not x.is_contiguous()
    check(x, amax=torch.tensor([5.0]), tile=WHOLE)
    launches = record(monkeypatch)
    launch(x)
    assert [args[0].data_ptr() for args, _ in launches] == [x.data_ptr()]


def test_axes_that_are_no_matrix_are_copied(device: torch.device) -> None:
    x = hostile((4, 6, 20), seed=26).to(device).transpose(0, 1)
    check(x, tile=WHOLE)


@pytest.mark.parametrize("which", WHICH)
def test_offsets_pass_32_bits(which: str, device: torch.device) -> None:
    # three rows of 64 bytes in 4 GiB of memory that is never touched
    storage = torch.empty(2**31 + 32, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((3, 32), (2**30, 1))
    x.copy_(hostile((3, 32), seed=27))
    check(x, which, tile=(4, 32))


@pytest.mark.parametrize("flag", [1.0, 0.0, 1.0 - 2.0**-24, 2.0, -1.0, math.nan])
def test_noop_of_exactly_1_leaves_every_byte(flag: float, device: torch.device) -> None:
    x = hostile((6, 10), seed=28).to(device)
    noop = torch.tensor(flag, device=device)
    if flag != 1.0:
        check(x, noop=noop, tile=WHOLE)
        return
    buffers, untouched = fresh(x, "both"), fresh(x, "both")
    launch(x, buffers, noop=noop)
    for name, buffer in buffers.items():
        assert_same_bits(buffer, untouched[name], what=name)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_an_empty_tensor_gets_a_scale(shape: tuple[int, ...], device: torch.device) -> None:
    check(torch.empty(shape, device=device))
    check(torch.empty(shape, device=device), amax=torch.tensor([7.0]))  # of the other ranks


def launch(x: Tensor, buffers: dict[str, Tensor] | None = None, **more: Any) -> None:
    launch_quantize(
        x,
        torch.ones(1, device=x.device),
        fresh(x, "both") if buffers is None else buffers,
        dtype="e4m3",
        force_pow_2_scales=False,
        amax_epsilon=0.0,
        **more,
    )


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a list that every later launch is appended to, instead of running."""
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launches.append((args, {"grid": grid, **options}))

    monkeypatch.setattr(quantize_module, "quantize_kernel", Recorder())
    return launches


def test_grid_has_one_axis_and_nothing_is_contracted(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(monkeypatch)
    launch(torch.empty(65, 129))
    launch(torch.empty(0, 129))
    assert [options["grid"] for _, options in launches] == [(2 * 3,), (1,)]
    # a contracted multiply-add would be another rounding
    assert [options["enable_fp_fusion"] for _, options in launches] == [False, False]


@pytest.mark.parametrize("name", ["fp8_data", "data_transpose"])
def test_a_buffer_with_gaps_is_refused(name: str) -> None:
    x = torch.zeros(3, 8)
    buffers = fresh(x, "both")
    shape = buffers[name].shape
    buffers[name] = torch.empty(shape[::-1], dtype=torch.uint8).t()
    message = (
        f"fp8_current: {name} must be contiguous to be written in place, got strides "
        f"(1, {shape[0]}) for shape {tuple(shape)}; write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch(x, buffers)
