# SPDX-License-Identifier: Apache-2.0
"""The amax and quantize kernels against the reference; ``--te-device`` chooses the device."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from te_nvfp4 import NVFP4Quantizer, layout, reference
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits, hostile

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_nvfp4.kernels import quantize as quantize_module
from te_nvfp4.kernels.amax import launch_amax
from te_nvfp4.kernels.quantize import TILE, launch_quantize

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cpu_triton")

RHT = {"with_rht": True, "with_post_rht_amax": True}
GRADIENT = {**RHT, "stochastic_rounding": True}
WHOLE = (256, 256)  # the interpreter pays by the program: one for a small matrix


def fresh(x: Tensor, q: NVFP4Quantizer) -> dict[str, Tensor]:
    """Return buffers in which a byte that the kernel does not write is 0xFF."""
    return {
        name: torch.full((*spec.shape, spec.dtype.itemsize), 0xFF, dtype=torch.uint8)
        .view(spec.dtype)
        .view(spec.shape)
        .to(x.device)
        for name, spec in q.describe_buffers(x.shape).items()
    }


def measure(x: Tensor, q: NVFP4Quantizer, **launch: Any) -> tuple[Tensor | None, Tensor | None]:
    sizes = {name: spec.shape for name, spec in q.describe_buffers(x.shape).items()}
    out = {n: torch.zeros(sizes[n], device=x.device) for n in layout.measured_amaxes(q)}
    launch_amax(x, out, q, **launch)
    row = out.get("amax_rowwise")
    return row, out.get("amax_columnwise", row if q.columnwise else None)


def check(x: Tensor, q: NVFP4Quantizer, seed: int = 5, **launch: Any) -> None:
    buffers = fresh(x, q)
    rng = torch.tensor([seed, 2**33 + 9], device=x.device) if q.stochastic_rounding else None
    row, column = measure(x, q, tile=launch.get("tile", TILE))
    launch_quantize(x, buffers, q, row, column, rng=rng, **launch)
    expected = reference.quantize(x.cpu().contiguous(), q, rng=None if rng is None else rng.cpu())
    assert list(buffers) == list(expected)
    for name, buffer in expected.items():
        assert_same_bits(buffers[name].cpu(), buffer, what=name)


@pytest.mark.parametrize("tile", [TILE, (64, 64)], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"optimize_for_gemm": True}, id="swizzled"),
        pytest.param({"with_2d_quantization": True}, id="2d"),
        pytest.param(GRADIENT, id="gradient"),
        pytest.param({"row_scaled_nvfp4": True}, id="row-scaled"),
        pytest.param(
            {"nvfp4_use_4over6": True, "with_2d_quantization": True, "nvfp4_e4m3_max": 256},
            id="4over6-2d",
        ),
    ],
)
def test_production_tiles_on_ragged_edges(
    tile: tuple[int, int], fields: dict[str, Any], device: torch.device
) -> None:
    x = hostile((160, 96), seed=21, block=(16, 16), nonfinite=True).to(device)
    check(x, NVFP4Quantizer(**fields), tile=tile)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        pytest.param((5, 96), {"columnwise": False}, id="rowwise-any-rows"),
        pytest.param((5, 96), {"columnwise": False, "row_scaled_nvfp4": True}, id="lines"),
        pytest.param((64, 41), {"rowwise": False}, id="columnwise-any-columns"),
        pytest.param((64, 41), {"rowwise": False, **RHT}, id="transformed-any-columns"),
        pytest.param((2, 48, 96), {}, id="three-axes"),
        pytest.param((64,), {"columnwise": False}, id="one-axis"),
        pytest.param((144, 272), {"with_2d_quantization": True}, id="ragged-2d"),
    ],
)
def test_shapes(shape: tuple[int, ...], fields: dict[str, Any], device: torch.device) -> None:
    check(hostile(shape, seed=22, nonfinite=True).to(device), NVFP4Quantizer(**fields), tile=WHOLE)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_blocks(x_dtype: torch.dtype, device: torch.device) -> None:
    for seed, block in ((23, (1, 16)), (24, (16, 1))):
        x = hostile((256, 512), x_dtype, seed=seed, block=block, nonfinite=True).to(device)
        check(x, NVFP4Quantizer(optimize_for_gemm=True), tile=WHOLE)
        check(x, NVFP4Quantizer(stochastic_rounding=True), tile=WHOLE)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_draws_are_the_references_for_every_seed(seed: int, device: torch.device) -> None:
    x = torch.rand(32, 64, generator=torch.Generator().manual_seed(1)).to(device)
    check(x, NVFP4Quantizer(stochastic_rounding=True), seed, tile=WHOLE)


@pytest.mark.parametrize(("float8", "float4"), [(True, False), (True, True), (False, False)])
def test_hardware_conversions_give_the_same_bytes(
    float8: bool, float4: bool, device: torch.device
) -> None:
    # on a CPU the interpreter executes the PTX of the conversions
    for x_dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hostile((96, 160), x_dtype, seed=25, block=(1, 16), nonfinite=True).to(device)
        for fields in ({}, {"with_2d_quantization": True}):
            check(x, NVFP4Quantizer(**fields), tile=WHOLE, float8=float8, float4=float4)


VIEWS = [
    pytest.param(lambda x: x[:64, :96].t(), id="transposed"),
    pytest.param(lambda x: x[:64, :192:2], id="every-second-column"),
    pytest.param(lambda x: x[:128:2, :96], id="every-second-row"),
    pytest.param(lambda x: x[:1, :96].expand(64, 96), id="expanded-rows"),
    pytest.param(lambda x: x[3:67, 5:101], id="offset"),
    pytest.param(lambda x: x[:, :192].view(2, 64, 192)[..., ::2], id="strided-3d"),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_matrix_is_read_in_place(
    view: Callable[[Tensor], Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = view(hostile((128, 224), seed=26, nonfinite=True).to(device))
    assert not x.is_contiguous()
    q = NVFP4Quantizer(**RHT)
    check(x, q, tile=WHOLE)
    row, column = measure(x, q)
    launches = record(monkeypatch)
    launch_quantize(x, fresh(x, q), q, row, column)
    assert [args[0].data_ptr() for args, _ in launches] == [x.data_ptr()]


def test_axes_that_are_no_matrix_are_copied(device: torch.device) -> None:
    check(hostile((4, 2, 32, 64), seed=27).to(device).transpose(1, 2), NVFP4Quantizer(), tile=WHOLE)


def test_offsets_pass_32_bits(device: torch.device) -> None:
    # three rows of 64 bytes in 4 GiB of memory that is never touched
    storage = torch.empty(2**31 + 32, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((3, 32), (2**30, 1))
    x.copy_(hostile((3, 32), seed=28))
    check(x, NVFP4Quantizer(columnwise=False), tile=(32, 32))


@pytest.mark.parametrize("flag", [1.0, 0.0, 1.0 - 2.0**-24, 2.0, -1.0, math.nan])
def test_noop_of_exactly_1_leaves_every_byte(flag: float, device: torch.device) -> None:
    x, q = hostile((64, 96), seed=29).to(device), NVFP4Quantizer()
    noop = torch.tensor(flag, device=device)
    if flag != 1.0:
        check(x, q, noop=noop, tile=WHOLE)
        return
    row, column = measure(x, q, noop=noop)
    assert row is not None
    assert row.tolist() == [0.0]  # who skips counts for nothing
    buffers = fresh(x, q)
    launch_quantize(x, buffers, q, row, column, noop=noop)
    for name, buffer in buffers.items():
        assert_same_bits(buffer, fresh(x, q)[name], what=name)


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
    q, group = NVFP4Quantizer(), torch.tensor([7.0])  # what the group has
    for shape in ((0, 64), (64, 0), (2, 0, 32)):
        x = torch.empty(shape)
        buffers = fresh(x, q)
        launch_quantize(x, buffers, q, group, group)
        assert buffers["amax_rowwise"].tolist() == buffers["amax_columnwise"].tolist() == [7.0]
    assert not launches


def test_the_grid_covers_the_scale_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(monkeypatch)
    x, q, one = torch.empty(160, 96), NVFP4Quantizer(), torch.ones(1)
    launch_quantize(x, fresh(x, q), q, one, one)
    ((_, options),) = launches
    assert options["grid"] == (256 // TILE[0] * (128 // TILE[1]),)
    # a contracted multiply-add would be another rounding
    assert options["enable_fp_fusion"] is False


def test_a_buffer_with_gaps_is_refused() -> None:
    x, q, one = torch.zeros(32, 64), NVFP4Quantizer(), torch.ones(1)
    buffers = fresh(x, q)
    buffers["columnwise_data"] = torch.empty(16, 64, dtype=torch.uint8).t()
    message = (
        "nvfp4: columnwise_data must be contiguous to be written in place, got strides (1, 64) "
        "for shape (64, 16); write into a new buffer"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        launch_quantize(x, buffers, q, one, one)


# -- amax ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lines", [False, True], ids=["one", "per-line"])
def test_amax_of_many_programs(x_dtype: torch.dtype, lines: bool, device: torch.device) -> None:
    x = hostile((160, 224), x_dtype, seed=31, nonfinite=True).to(device)
    x[x.isinf()] = 0.0  # one infinity would be the amax of nearly everything
    q = NVFP4Quantizer(row_scaled_nvfp4=lines)
    row, column = measure(x, q, tile=(32, 32))
    plain = x.cpu().float().nan_to_num(nan=0.0).abs()
    expected = (plain.amax(1), plain.amax(0)) if lines else (plain.amax().view(1),) * 2
    for found, wanted in zip((row, column), expected, strict=True):
        assert found is not None
        assert_same_bits(found.cpu(), wanted)


def test_amax_of_the_transform_is_measured_after_it(device: torch.device) -> None:
    x = torch.zeros(32, 32, dtype=torch.bfloat16, device=device)
    x[:16, 3] = 2.0
    q = NVFP4Quantizer(**RHT, with_random_sign_mask=False)
    row, column = measure(x, q)
    assert row is not None
    assert column is not None
    # 16 equal values gather in one: 16 * 2 / 4
    assert (row.tolist(), column.tolist()) == ([2.0], [8.0])
