# SPDX-License-Identifier: Apache-2.0
"""Shapes, strides, memory and compilation of the reference."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from te_mxfp8 import layout, reference
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

Buffers = dict[str, Tensor]


def quantize(
    x: Tensor,
    planes: str = "both",
    *,
    dtype: str = "e4m3",
    two_d: bool = False,
    swizzled: bool = False,
) -> Buffers:
    return reference.quantize(
        x,
        dtype=dtype,
        rowwise=planes != "columnwise",
        columnwise=planes != "rowwise",
        two_d=two_d,
        swizzled=swizzled,
    )


def assert_same_buffers(actual: Buffers, expected: Buffers) -> None:
    assert list(actual) == list(expected)
    for name, buffer in expected.items():
        assert_same_bits(actual[name], buffer, what=name)


SHAPES = [
    # shape, planes, shapes of the two scale buffers
    pytest.param((96, 160), "both", (128, 8), (4, 256), id="ragged-tiles"),
    pytest.param((128, 128), "both", (128, 4), (4, 128), id="whole-tiles"),
    pytest.param((5, 96), "rowwise", (128, 4), None, id="any-rows"),
    pytest.param((32, 5), "columnwise", None, (4, 128), id="any-columns"),
    pytest.param((32,), "rowwise", (128, 4), None, id="one-axis"),
    pytest.param((3, 32, 64), "both", (128, 4), (4, 128), id="three-axes"),
    pytest.param((2, 2, 8, 64), "both", (128, 4), (4, 128), id="blocks-across-axes"),
    pytest.param((1, 1, 2080, 32), "both", (2176, 4), (68, 128), id="many-rows"),
    pytest.param((0, 64), "both", (0, 4), (0, 128), id="no-rows"),
    pytest.param((64, 0), "both", (128, 0), (4, 0), id="no-columns"),
    pytest.param((2, 0, 32), "both", (0, 4), (0, 128), id="no-rows-3d"),
    pytest.param((0,), "rowwise", (128, 0), None, id="one-empty-axis"),
]


@pytest.mark.parametrize(("shape", "planes", "row_scale", "column_scale"), SHAPES)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
def test_buffers_have_the_described_shapes(
    shape: tuple[int, ...],
    planes: str,
    row_scale: tuple[int, int] | None,
    column_scale: tuple[int, int] | None,
    swizzled: bool,
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    if row_scale is not None:
        expected |= {"rowwise_data": shape, "rowwise_scale_inv": row_scale}
    if column_scale is not None:
        expected |= {"columnwise_data": shape, "columnwise_scale_inv": column_scale}
    described = layout.buffer_shapes(
        shape, rowwise=row_scale is not None, columnwise=column_scale is not None
    )
    assert described == expected
    for two_d in (False, True) if planes == "both" else (False,):
        out = quantize(torch.zeros(shape), planes, two_d=two_d, swizzled=swizzled)
        assert {name: tuple(buffer.shape) for name, buffer in out.items()} == expected
        assert list(out) == list(expected)
        assert {buffer.dtype for buffer in out.values()} == {torch.uint8}
        assert all(buffer.is_contiguous() for buffer in out.values())
        for plane in ("rowwise", "columnwise"):
            if f"{plane}_data" in out:
                assert dequantize(out, plane, swizzled=swizzled).shape == shape


def dequantize(out: Buffers, plane: str, *, dtype: str = "e4m3", swizzled: bool = False) -> Tensor:
    return reference.dequantize(
        out[f"{plane}_data"],
        out[f"{plane}_scale_inv"],
        dtype=dtype,
        columnwise=plane == "columnwise",
        swizzled=swizzled,
        out_dtype=torch.float32,
    )


def test_layout_is_free_of_torch() -> None:
    code = "import sys, te_mxfp8.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shape", [(2, 3, 16, 64), (4, 8, 96)])
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_leading_axes_are_flattened(shape: tuple[int, ...], two_d: bool) -> None:
    x = hostile(shape, seed=1, nonfinite=True)
    flat = quantize(x.view(-1, shape[-1]), two_d=two_d)
    got = quantize(x, two_d=two_d)
    assert_same_bits(got["rowwise_data"], flat["rowwise_data"].view(shape))
    assert_same_bits(got["columnwise_data"], flat["columnwise_data"].view(shape))
    assert_same_bits(got["rowwise_scale_inv"], flat["rowwise_scale_inv"])
    assert_same_bits(got["columnwise_scale_inv"], flat["columnwise_scale_inv"])


VIEWS = [
    pytest.param(lambda: hostile((96, 64), seed=2).t(), id="transposed"),
    pytest.param(lambda: hostile((64, 192), seed=3)[:, ::2], id="every-second-column"),
    pytest.param(lambda: hostile((128, 96), seed=4)[::2], id="every-second-row"),
    pytest.param(lambda: hostile((1, 96), seed=5).expand(64, 96), id="expanded-rows"),
    pytest.param(lambda: hostile((64, 1), seed=6).expand(64, 96), id="expanded-columns"),
    pytest.param(lambda: hostile((70, 101), seed=7)[3:67, 5:101], id="offset"),
    pytest.param(lambda: hostile((96, 4, 16), seed=8).permute(1, 2, 0), id="permuted-3d"),
    pytest.param(lambda: hostile((4, 2, 32, 64), seed=9).transpose(1, 2), id="inner-axes-swapped"),
]


@pytest.mark.parametrize("make", VIEWS)
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_strides_do_not_matter(make: Callable[[], Tensor], two_d: bool) -> None:
    x = make()
    assert not x.is_contiguous()
    assert_same_buffers(quantize(x, two_d=two_d), quantize(x.contiguous(), two_d=two_d))


def test_dequantize_takes_any_strides() -> None:
    out = quantize(hostile((64, 96), seed=10))
    for plane in ("rowwise", "columnwise"):
        spread = {name: torch.stack((b, b), -1)[..., 0] for name, b in out.items()}
        assert not spread[f"{plane}_data"].is_contiguous()
        assert_same_bits(dequantize(spread, plane), dequantize(out, plane))


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
@pytest.mark.usefixtures("poisoned")
def test_scale_padding_is_zero_whatever_memory_held(two_d: bool, swizzled: bool) -> None:
    assert torch.empty(4, dtype=torch.uint8).tolist() == [255] * 4
    m, k = 160, 96
    out = quantize(torch.ones(m, k), two_d=two_d, swizzled=swizzled)
    row, column = out["rowwise_scale_inv"], out["columnwise_scale_inv"]
    if swizzled:
        row = reference.unswizzle(row, columnwise=False)
        column = reference.unswizzle(column, columnwise=True)
    inside = torch.zeros_like(row)
    inside[:m, : k // 32] = 119
    assert_same_bits(row, inside)
    inside = torch.zeros_like(column)
    inside[: m // 32, :k] = 119
    assert_same_bits(column, inside)


def storages(out: Buffers) -> int:
    return len({buffer.untyped_storage().data_ptr() for buffer in out.values()})


def test_planes_never_share_memory() -> None:
    for shape in ((32, 32), (128, 128)):
        for two_d in (False, True):
            assert storages(quantize(torch.ones(shape), two_d=two_d)) == 4


def off(i: int, j: int, tiles: int) -> int:
    """Return the byte of scale ``(i, j)``, as the specification writes it."""
    return ((i // 128) * tiles + (j // 4)) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + (j % 4)


@pytest.mark.parametrize(("outer", "inner"), [(128, 4), (256, 12), (384, 8)])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_swizzle_puts_each_scale_where_the_formula_says(
    outer: int, inner: int, columnwise: bool
) -> None:
    g = torch.Generator().manual_seed(11)
    scale = torch.randint(256, (outer, inner), dtype=torch.uint8, generator=g)
    expected = torch.empty(outer * inner, dtype=torch.uint8)
    for i in range(outer):
        for j in range(inner):
            expected[off(i, j, inner // 4)] = scale[i, j]
    compact = scale.t() if columnwise else scale
    swizzled = reference.swizzle(compact, columnwise=columnwise)
    assert_same_bits(swizzled, expected.view(compact.shape))
    back = reference.unswizzle(swizzled, columnwise=columnwise)
    assert back.is_contiguous()
    assert_same_bits(back, compact)


@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_swizzled_scales_are_the_swizzle_of_compact_ones(two_d: bool) -> None:
    x = hostile((160, 96), seed=12)
    compact, swizzled = quantize(x, two_d=two_d), quantize(x, two_d=two_d, swizzled=True)
    for plane in ("rowwise", "columnwise"):
        columnwise = plane == "columnwise"
        expected = reference.swizzle(compact[f"{plane}_scale_inv"], columnwise=columnwise)
        assert_same_bits(swizzled[f"{plane}_scale_inv"], expected)
        assert_same_bits(
            dequantize(swizzled, plane, swizzled=True), dequantize(compact, plane), what=plane
        )


COMPILED = [
    pytest.param("inductor", torch.bfloat16, "e4m3", False, False, id="inductor-1d-compact"),
    pytest.param("inductor", torch.float32, "e5m2", True, True, id="inductor-2d-swizzled"),
    pytest.param("aot_eager", torch.float16, "e5m2", False, True, id="aot-1d-swizzled"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("backend", "x_dtype", "dtype", "two_d", "swizzled"), COMPILED)
def test_compiled_equals_eager_in_one_graph(
    backend: str, x_dtype: torch.dtype, dtype: str, two_d: bool, swizzled: bool
) -> None:
    def there_and_back(x: Tensor) -> tuple[Buffers, list[Tensor]]:
        # exact neighbours on both sides: Inductor does not round between fused operations
        out = quantize(-x, dtype=dtype, two_d=two_d, swizzled=swizzled)
        planes = ("rowwise", "columnwise")
        return out, [dequantize(out, p, dtype=dtype, swizzled=swizzled).abs() for p in planes]

    with count_compiles() as counts:
        compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend=backend)
        for m in (32, 64, 96, 128, 160):
            block = (32, 32) if two_d else (1, 32)
            # Inductor shares a buffer between two planes only where nothing is padded
            x = hostile((m, 128 if two_d else 96), x_dtype, seed=m, block=block, nonfinite=True)
            out, values = compiled(x)
            expected_out, expected_values = there_and_back(x)
            assert_same_buffers(out, expected_out)
            assert storages(out) == 4
            for got, expected in zip(values, expected_values, strict=True):
                # which NaN it is depends on the instruction that multiplied
                assert_same_bits(got.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)
