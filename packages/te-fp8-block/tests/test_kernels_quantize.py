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

from te_fp8_block import layout, reference
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits, hostile

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_block.kernels import quantize as quantize_module
from te_fp8_block.kernels.quantize import COLUMNWISE_TILE, ROWWISE_TILE, TILE, launch_quantize

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cpu_triton")

WHOLE = (512, 512)  # the interpreter pays by the program: one for a small matrix
PLANES = ("both", "rowwise", "columnwise")
two_dims = pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])


def fresh(x: Tensor, planes: str, *, two_d: bool) -> dict[str, Tensor]:
    """Return buffers in which a byte that the kernel does not write is 0xFF."""
    shapes = layout.buffer_shapes(
        x.shape, rowwise=planes != "columnwise", columnwise=planes != "rowwise", two_d=two_d
    )
    buffers = {}
    for name, shape in shapes.items():
        width = 1 if name.endswith("_data") else 4
        size = math.prod(shape) * width
        filled = torch.full((size,), 0xFF, dtype=torch.uint8, device=x.device)
        buffers[name] = (filled if width == 1 else filled.view(torch.float32)).view(shape)
    return buffers


def check(
    x: Tensor,
    planes: str = "both",
    *,
    two_d: bool = False,
    dtype: str = "e4m3",
    pow_2: bool = True,
    amax_epsilon: float = 0.0,
    **launch: Any,
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "pow_2": pow_2, "amax_epsilon": amax_epsilon}
    buffers = fresh(x, planes, two_d=two_d)
    launch_quantize(x, buffers, two_d=two_d, **options, **launch)
    expected = reference.quantize(
        x.cpu().contiguous(),
        rowwise=planes != "columnwise",
        columnwise=planes != "rowwise",
        two_d=two_d,
        **options,
    )
    assert list(buffers) == list(expected)
    for name, buffer in expected.items():
        assert_same_bits(buffers[name].cpu(), buffer, what=name)


@pytest.mark.parametrize("planes", PLANES)
@two_dims
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("pow_2", [True, False], ids=["pow2", "float32"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_option(
    planes: str,
    two_d: bool,
    dtype: str,
    pow_2: bool,
    x_dtype: torch.dtype,
    device: torch.device,
) -> None:
    block = (128, 128) if two_d else (128, 1) if planes == "columnwise" else (1, 128)
    x = hostile((130, 300), x_dtype, seed=20, block=block, nonfinite=True).to(device)
    epsilon = 0.0 if dtype == "e4m3" else 0.3
    check(x, planes, two_d=two_d, dtype=dtype, pow_2=pow_2, amax_epsilon=epsilon, tile=WHOLE)


@pytest.mark.parametrize(
    "shape", [(), (1,), (311,), (1, 1), (3, 129), (129, 3), (2, 3, 4, 130), (640, 2)], ids=str
)
@two_dims
def test_every_rank_and_raggedness(
    shape: tuple[int, ...], two_d: bool, device: torch.device
) -> None:
    x = hostile(shape, seed=21, block=(1, 128), nonfinite=True).to(device)
    for planes in PLANES:
        check(x, planes, two_d=two_d, tile=(512, 1024))


@two_dims
def test_blocks_of_nan_alone_of_zeros_and_with_infinity(two_d: bool, device: torch.device) -> None:
    x = torch.ones(256, 512, device=device)
    x[:128, :128] = math.nan
    x[:128, 128:256] = -0.0
    x[128:, :128] = math.inf
    x[5, 300] = -math.inf
    for pow_2, epsilon in ((True, 0.0), (False, 0.0), (False, 1e-30)):
        check(x, two_d=two_d, pow_2=pow_2, amax_epsilon=epsilon, tile=WHOLE)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quotient_that_overflows(x_dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(8, 256, dtype=x_dtype)
    tiny = torch.finfo(x_dtype).smallest_normal * torch.finfo(x_dtype).eps
    x[:, 0] = torch.tensor([tiny, -tiny, 2 * tiny, 3 * tiny, 0, 1.75 * 2.0**-120, 1e-38, 1e-37])
    for pow_2, epsilon in itertools.product((True, False), (0.0, 1e-37)):
        check(x.to(device), pow_2=pow_2, amax_epsilon=epsilon, tile=WHOLE)


@pytest.mark.parametrize(
    ("planes", "two_d", "tile"),
    [
        pytest.param("both", False, TILE, id="both"),
        pytest.param("rowwise", False, ROWWISE_TILE, id="rowwise"),
        pytest.param("columnwise", False, COLUMNWISE_TILE, id="columnwise"),
        pytest.param("both", True, TILE, id="2d"),
    ],
)
def test_production_tiles_on_ragged_edges(
    planes: str, two_d: bool, tile: tuple[int, int], device: torch.device
) -> None:
    x = hostile((130, 260), seed=22, block=(1, 128), nonfinite=True).to(device)
    launches: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        record(patch, launches)
        launch_quantize(
            x,
            fresh(x, planes, two_d=two_d),
            dtype="e4m3",
            two_d=two_d,
            pow_2=True,
            amax_epsilon=0.0,
        )
    ((_, options),) = launches
    assert (options["BM"], options["BK"]) == tile
    check(x, planes, two_d=two_d)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_hardware_conversion_gives_the_same_bytes(dtype: str, device: torch.device) -> None:
    # on a CPU the interpreter executes the PTX of the conversion
    for x_dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hostile((130, 160), x_dtype, seed=24, nonfinite=True).to(device)
        check(x, dtype=dtype, tile=WHOLE, hardware=True)


VIEWS = [
    pytest.param(lambda x: x[:130, :96].t(), id="transposed"),
    pytest.param(lambda x: x[:64, :192:2], id="every-second-column"),
    pytest.param(lambda x: x[:130:2, :96], id="every-second-row"),
    pytest.param(lambda x: x[:1, :96].expand(130, 96), id="expanded-rows"),
    pytest.param(lambda x: x[:64, :1].expand(64, 130), id="expanded-columns"),
    pytest.param(lambda x: x[3:67, 5:140], id="offset"),
    pytest.param(lambda x: x[:130, :192].view(2, 65, 192)[..., ::2], id="strided-3d"),
]


@pytest.mark.parametrize("view", VIEWS)
@two_dims
def test_a_strided_matrix_is_read_in_place(
    view: Callable[[Tensor], Tensor], two_d: bool, device: torch.device
) -> None:
    x = view(hostile((140, 224), seed=25, nonfinite=True).to(device))
    assert not x.is_contiguous()
    check(x, two_d=two_d, tile=WHOLE)
    launches: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        record(patch, launches)
        launch_quantize(
            x,
            fresh(x, "both", two_d=two_d),
            dtype="e4m3",
            two_d=two_d,
            pow_2=True,
            amax_epsilon=0.0,
        )
    assert [args[0].data_ptr() for args, _ in launches] == [x.data_ptr()]


def test_axes_that_are_no_matrix_are_copied(device: torch.device) -> None:
    x = hostile((4, 2, 32, 64), seed=26).to(device).transpose(1, 2)
    check(x, tile=WHOLE)


@pytest.mark.parametrize("noop", [0.0, 1.0, 2.0, math.nan])
@two_dims
def test_noop_of_exactly_one_leaves_every_byte(
    noop: float, two_d: bool, device: torch.device
) -> None:
    x = hostile((130, 96), seed=27).to(device)
    flag = torch.tensor(noop, device=device)
    if noop != 1.0:
        check(x, two_d=two_d, noop=flag, tile=WHOLE)
        return
    buffers = fresh(x, "both", two_d=two_d)
    launch_quantize(x, buffers, dtype="e4m3", two_d=two_d, pow_2=True, amax_epsilon=0.0, noop=flag)
    for name, buffer in buffers.items():
        raw = buffer.view(torch.uint8)
        assert_same_bits(raw, torch.full_like(raw, 0xFF), what=name)


def record(patch: pytest.MonkeyPatch, launches: list[Any]) -> None:
    """Append every later launch to ``launches``, instead of running it."""

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launches.append((args, {"grid": grid, **options}))

    patch.setattr(quantize_module, "quantize_kernel", Recorder())


def test_an_empty_tensor_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    record(monkeypatch, launches)
    for shape in ((0, 64), (64, 0), (2, 0, 32)):
        x = torch.empty(shape)
        buffers = fresh(x, "both", two_d=False)
        launch_quantize(x, buffers, dtype="e4m3", two_d=False, pow_2=True, amax_epsilon=0.0)
    assert not launches


@pytest.mark.parametrize(
    ("planes", "two_d", "programs"),
    [
        # 300 x 700: 3 x 6 blocks; in 2-D the padding of the scales is 4 x 8 blocks
        pytest.param("both", False, 3 * 6, id="both"),
        pytest.param("rowwise", False, 10 * 6, id="rowwise"),
        pytest.param("columnwise", False, 3 * 11, id="columnwise"),
        pytest.param("both", True, 4 * 8, id="2d"),
    ],
)
def test_grid_covers_the_matrix_and_the_scale_padding(
    planes: str, two_d: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Any] = []
    record(monkeypatch, launches)
    x = torch.empty(300, 700)
    buffers = fresh(x, planes, two_d=two_d)
    launch_quantize(x, buffers, dtype="e4m3", two_d=two_d, pow_2=True, amax_epsilon=0.0)
    ((_, options),) = launches
    assert options["grid"] == (programs,)
    # a contracted multiply-add would be another rounding
    assert options["enable_fp_fusion"] is False


def test_a_buffer_with_gaps_is_refused() -> None:
    x = torch.zeros(32, 64)
    buffers = fresh(x, "both", two_d=True)
    buffers["columnwise_data"] = torch.empty(32, 64, dtype=torch.uint8).t()
    message = (
        "fp8_block: columnwise_data must be contiguous to be written in place, got strides (1, 64) "
        "for shape (64, 32); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_quantize(x, buffers, dtype="e4m3", two_d=True, pow_2=True, amax_epsilon=0.0)


def test_a_long_row_needs_one_grid_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    # 65536 tiles of 128 columns are more than the second axis of a GPU's grid takes
    launches: list[Any] = []
    record(monkeypatch, launches)
    x = torch.empty(1, dtype=torch.bfloat16).expand(2**23)
    shapes = layout.buffer_shapes(x.shape, rowwise=True, columnwise=False, two_d=False)
    buffers = {name: torch.empty(1).expand(shape) for name, shape in shapes.items()}
    with monkeypatch.context() as patch:
        patch.setattr(quantize_module, "check_contiguous", lambda *_: None)
        launch_quantize(x, buffers, dtype="e4m3", two_d=False, pow_2=True, amax_epsilon=0.0)
    ((_, options),) = launches
    assert options["grid"] == (2**16,)
