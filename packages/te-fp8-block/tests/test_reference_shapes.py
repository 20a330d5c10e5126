# SPDX-License-Identifier: Apache-2.0
"""Shapes, strides, memory and compilation of the reference."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from te_fp8_block import layout, reference
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

Buffers = dict[str, Tensor]
two_dims = pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])


def quantize(x: Tensor, planes: str = "both", *, two_d: bool = False, **options: Any) -> Buffers:
    return reference.quantize(
        x,
        rowwise=planes != "columnwise",
        columnwise=planes != "rowwise",
        two_d=two_d,
        **{"dtype": "e4m3", "pow_2": True, "amax_epsilon": 0.0, **options},
    )


def dequantize(
    out: Buffers, plane: str, shape: tuple[int, ...], *, two_d: bool, dtype: str = "e4m3"
) -> Tensor:
    return reference.dequantize(
        out[f"{plane}_data"],
        out[f"{plane}_scale_inv"],
        shape,
        dtype=dtype,
        columnwise=plane == "columnwise",
        two_d=two_d,
        out_dtype=torch.float32,
    )


def assert_same_buffers(actual: Buffers, expected: Buffers) -> None:
    assert list(actual) == list(expected)
    for name, buffer in expected.items():
        assert_same_bits(actual[name], buffer, what=name)


def storages(out: Buffers) -> int:
    return len({buffer.untyped_storage().data_ptr() for buffer in out.values()})


SHAPES = [
    (), (1,), (128,), (311,), (1, 1), (3, 129), (128, 128), (250, 500), (2, 3, 5), (2, 3, 4, 130),
    (1, 1, 1, 1), (0,), (0, 128), (128, 0), (2, 0, 3), (0, 0),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@two_dims
def test_every_shape_has_the_described_buffers_and_comes_back(
    shape: tuple[int, ...], two_d: bool
) -> None:
    x = torch.full(shape, -3.0)
    for planes in ("both", "rowwise", "columnwise"):
        out = quantize(x, planes, two_d=two_d)
        described = layout.buffer_shapes(
            shape, rowwise=planes != "columnwise", columnwise=planes != "rowwise", two_d=two_d
        )
        assert {name: tuple(buffer.shape) for name, buffer in out.items()} == described
        assert list(out) == list(described)
        for name, buffer in out.items():
            assert buffer.dtype == (torch.uint8 if name.endswith("_data") else torch.float32)
            assert buffer.is_contiguous()
        for plane in ("rowwise", "columnwise"):
            if f"{plane}_data" in out:
                assert_same_bits(dequantize(out, plane, shape, two_d=two_d), x)


@pytest.mark.parametrize("shape", [(2, 3, 50, 70), (4, 8, 130), (7,), ()], ids=str)
@two_dims
def test_columnwise_plane_is_the_rowwise_plane_of_the_transpose(
    shape: tuple[int, ...], two_d: bool
) -> None:
    x = hostile(shape, seed=1, nonfinite=True)
    m, k = layout.matrix_shape(shape)
    got = quantize(x, two_d=two_d)
    turned = quantize(x.reshape(m, k).t(), "rowwise", two_d=two_d)
    assert_same_bits(got["columnwise_data"].reshape(k, m), turned["rowwise_data"])
    assert_same_bits(got["columnwise_scale_inv"], turned["rowwise_scale_inv"])
    # the last axis comes first
    last_first = got["columnwise_data"].movedim(0, -1) if shape else got["columnwise_data"]
    if two_d:
        assert_same_bits(last_first, got["rowwise_data"])


@pytest.mark.parametrize("shape", [(2, 3, 50, 70), (4, 8, 130)], ids=str)
@two_dims
def test_leading_axes_are_flattened(shape: tuple[int, ...], two_d: bool) -> None:
    x = hostile(shape, seed=1, nonfinite=True)
    flat = quantize(x.view(-1, shape[-1]), two_d=two_d)
    got = quantize(x, two_d=two_d)
    assert_same_bits(got["rowwise_data"], flat["rowwise_data"].view(shape))
    assert_same_bits(got["columnwise_data"].flatten(1), flat["columnwise_data"])
    assert_same_bits(got["rowwise_scale_inv"], flat["rowwise_scale_inv"])
    assert_same_bits(got["columnwise_scale_inv"], flat["columnwise_scale_inv"])


@two_dims
def test_a_ragged_block_is_one_filled_up_with_zeros(two_d: bool) -> None:
    x = hostile((130, 200), torch.float32, seed=2)
    full = torch.zeros(256, 256)
    full[:130, :200] = x
    ragged, filled = quantize(x, two_d=two_d), quantize(full, two_d=two_d)
    assert_same_bits(ragged["rowwise_data"], filled["rowwise_data"][:130, :200])
    assert_same_bits(ragged["columnwise_data"], filled["columnwise_data"][:200, :130])
    columns = 2 if two_d else 130
    got, expected = ragged["rowwise_scale_inv"], filled["rowwise_scale_inv"]
    assert_same_bits(got[:, :columns], expected[:, :columns])


VIEWS = [
    pytest.param(lambda: hostile((96, 164), seed=2).t(), id="transposed"),
    pytest.param(lambda: hostile((64, 300), seed=3)[:, ::2], id="every-second-column"),
    pytest.param(lambda: hostile((300, 96), seed=4)[::2], id="every-second-row"),
    pytest.param(lambda: hostile((1, 196), seed=5).expand(140, 196), id="expanded-rows"),
    pytest.param(lambda: hostile((140, 1), seed=6).expand(140, 96), id="expanded-columns"),
    pytest.param(lambda: hostile((140, 201), seed=7)[3:137, 5:196], id="offset"),
    pytest.param(lambda: hostile((130, 4, 16), seed=8).permute(1, 2, 0), id="permuted-3d"),
    pytest.param(lambda: hostile((4, 2, 32, 64), seed=9).transpose(1, 2), id="inner-axes-swapped"),
    pytest.param(lambda: torch.tensor(3.0).expand(5, 6), id="expanded-scalar"),
]


@pytest.mark.parametrize("make", VIEWS)
@two_dims
def test_strides_do_not_matter(make: Callable[[], Tensor], two_d: bool) -> None:
    x = make()
    assert not x.is_contiguous()
    before = x.clone()
    assert_same_buffers(quantize(x, two_d=two_d), quantize(x.contiguous(), two_d=two_d))
    assert_same_bits(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@two_dims
def test_the_input_is_left_as_it_was(dtype: torch.dtype, two_d: bool) -> None:
    for shape in ((128, 128), (5, 130)):
        x = hostile(shape, dtype, seed=3, nonfinite=True)
        before = x.clone()
        out = quantize(x, two_d=two_d)
        assert_same_bits(x, before)
        codes = out["rowwise_data"].clone()
        dequantize(out, "rowwise", shape, two_d=two_d)
        assert_same_bits(out["rowwise_data"], codes)


@two_dims
def test_dequantize_takes_any_strides(two_d: bool) -> None:
    out = quantize(hostile((140, 150), seed=10), two_d=two_d)
    spread = {name: torch.stack((b, b), -1)[..., 0] for name, b in out.items()}
    for plane in ("rowwise", "columnwise"):
        assert not spread[f"{plane}_data"].is_contiguous()
        got = dequantize(spread, plane, (140, 150), two_d=two_d)
        assert got.is_contiguous()
        assert_same_bits(got, dequantize(out, plane, (140, 150), two_d=two_d))


@two_dims
@pytest.mark.usefixtures("poisoned")
def test_scale_padding_is_zero_whatever_memory_held(two_d: bool) -> None:
    assert torch.empty(4, dtype=torch.uint8).tolist() == [255] * 4
    m, k = 130, 650
    out = quantize(torch.ones(m, k), two_d=two_d)
    used = {"rowwise": (2, 6), "columnwise": (6, 2)} if two_d else {
        "rowwise": (6, m), "columnwise": (2, k)
    }  # fmt: skip
    for plane, (rows, columns) in used.items():
        expected = torch.zeros_like(out[f"{plane}_scale_inv"])
        assert expected.shape[1] > columns
        expected[:rows, :columns] = 2.0**-8
        assert_same_bits(out[f"{plane}_scale_inv"], expected, what=plane)


@pytest.mark.parametrize("shape", [(128, 128), (1, 128), (128, 1), (5, 7), (1, 1), ()], ids=str)
@two_dims
def test_planes_own_their_memory(shape: tuple[int, ...], two_d: bool) -> None:
    out = quantize(torch.ones(shape), two_d=two_d)
    assert storages(out) == 4
    for buffer in out.values():
        assert buffer.untyped_storage().nbytes() == buffer.numel() * buffer.itemsize


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (130, 300), (256, 520)], ids=str)
def test_columnwise_plane_is_made_from_the_rowwise_one(shape: tuple[int, int]) -> None:
    out = quantize(hostile(shape, seed=11, block=(128, 128), nonfinite=True), two_d=True)
    codes = reference.transpose_codes(out["rowwise_data"])
    assert_same_bits(codes, out["columnwise_data"])
    assert codes.data_ptr() != out["rowwise_data"].data_ptr()
    scale = reference.columnwise_scale(out["rowwise_scale_inv"], *shape)
    assert_same_bits(scale, out["columnwise_scale_inv"])


@two_dims
def test_compact_scales_are_where_the_layout_says_and_are_stored_back(two_d: bool) -> None:
    m, k = 300, 700
    out = quantize(hostile((m, k), seed=12, block=(128, 128)), two_d=two_d)
    for columnwise, plane in ((False, "rowwise"), (True, "columnwise")):
        buffer = out[f"{plane}_scale_inv"]
        options = {"columnwise": columnwise, "two_d": two_d}
        scale = reference.compact_scale(buffer, m, k, **options)
        for i, j in itertools.product((0, 127, 128, 299), (0, 127, 128, 640, 699)):
            if two_d:
                here = buffer[j // 128, i // 128] if columnwise else buffer[i // 128, j // 128]
                found = scale[i // 128, j // 128]
            else:
                here = buffer[i // 128, j] if columnwise else buffer[j // 128, i]
                found = scale[i // 128, j] if columnwise else scale[i, j // 128]
            assert found == here
        assert_same_bits(reference.store_scale(scale, **options), buffer)


# -- compiled -------------------------------------------------------------------------------------

ROWS = (160, 256, 320, 130, 1024)  # of several blocks: one is another graph
COMPILED = [
    pytest.param(torch.bfloat16, False, {}, id="1d"),
    pytest.param(
        torch.float16, True, {"dtype": "e5m2", "pow_2": False, "amax_epsilon": 1e-4}, id="2d"
    ),
]


@pytest.mark.parametrize(("x_dtype", "two_d", "options"), COMPILED)
@pytest.mark.usefixtures("poisoned")
def test_compiled_equals_eager_in_one_graph(
    x_dtype: torch.dtype, two_d: bool, options: dict[str, Any]
) -> None:
    def there_and_back(x: Tensor) -> tuple[Buffers, list[Tensor]]:
        # exact neighbours on both sides: Inductor does not round between fused operations
        out = quantize(-x, two_d=two_d, **options)
        planes = ("rowwise", "columnwise")
        dtype = options.get("dtype", "e4m3")
        back = [dequantize(out, p, x.shape, two_d=two_d, dtype=dtype).abs() for p in planes]
        return out, back

    with count_compiles() as counts:
        compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True)
        for m in ROWS:
            block = (128, 128) if two_d else (1, 128)
            x = hostile((m, 300), x_dtype, seed=m, block=block, nonfinite=True)
            out, values = compiled(x)
            assert storages(out) == 4
            expected_out, expected_values = there_and_back(x)
            assert_same_buffers(out, expected_out)
            for got, expected in zip(values, expected_values, strict=True):
                # which NaN it is depends on the instruction that multiplied
                assert_same_bits(got.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (5, 0), (1, 1), (3, 1), (256, 512)], ids=str)
@two_dims
def test_graph_of_a_fixed_shape_gives_the_bytes_of_eager(
    shape: tuple[int, ...], two_d: bool
) -> None:
    def run(x: Tensor) -> Buffers:
        return quantize(x, two_d=two_d)

    x = torch.linspace(-1, 1, max(math.prod(shape), 1))[: math.prod(shape)].reshape(shape)
    with count_compiles():
        out = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")(x)
    assert_same_buffers(out, run(x))
    assert all(buffer.is_contiguous() for buffer in out.values())
