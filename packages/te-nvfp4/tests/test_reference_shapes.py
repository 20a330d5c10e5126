# SPDX-License-Identifier: Apache-2.0
"""Shapes, strides, memory and compilation of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from te_nvfp4 import NVFP4Quantizer, layout
from te_proto.numerics import slabs, swizzle, unpack_e2m1, unswizzle
from te_proto.testing import assert_same_bits, count_compiles, hostile, new_quantizer_in_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Run = Callable[..., Any]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Dtypes = Callable[[dict[str, Any]], tuple[torch.dtype, ...]]

RHT = {"with_rht": True, "with_post_rht_amax": True}

SHAPES = [
    # shape, planes, shapes of the two scale buffers
    pytest.param((96, 160), "both", (128, 12), (256, 8), id="ragged-tiles"),
    pytest.param((128, 128), "both", (128, 8), (128, 8), id="whole-tiles"),
    pytest.param((5, 96), "rowwise", (128, 8), None, id="any-rows"),
    pytest.param((32, 5), "columnwise", None, (128, 4), id="any-columns"),
    pytest.param((32,), "rowwise", (128, 4), None, id="one-axis"),
    pytest.param((3, 32, 64), "both", (128, 4), (128, 8), id="three-axes"),
    pytest.param((2, 2, 8, 64), "both", (128, 4), (128, 4), id="blocks-across-axes"),
    pytest.param((1, 1, 2080, 32), "both", (2176, 4), (128, 132), id="many-rows"),
    pytest.param((0, 64), "both", (0, 4), (128, 0), id="no-rows"),
    pytest.param((64, 0), "both", (128, 0), (0, 4), id="no-columns"),
    pytest.param((2, 0, 32), "both", (0, 4), (128, 0), id="no-rows-3d"),
    pytest.param((0,), "rowwise", (128, 0), None, id="one-empty-axis"),
]


@pytest.mark.parametrize(("shape", "planes", "row_scale", "column_scale"), SHAPES)
def test_buffers_have_the_described_shapes(
    shape: tuple[int, ...],
    planes: str,
    row_scale: tuple[int, int] | None,
    column_scale: tuple[int, int] | None,
    run: Run,
) -> None:
    row, column = planes != "columnwise", planes != "rowwise"
    k, m = shape[-1], torch.Size(shape[:-1]).numel()
    expected: dict[str, tuple[int, ...]] = {}
    if row_scale is not None:
        expected |= {"rowwise_data": (*shape[:-1], k // 2), "rowwise_scale_inv": row_scale}
    if column_scale is not None:
        expected |= {"columnwise_data": (k, m // 2), "columnwise_scale_inv": column_scale}
    expected |= {"amax_rowwise": (1,)} if row else {}
    expected |= {"amax_columnwise": (1,)} if column else {}
    assert layout.buffer_shapes(shape, rowwise=row, columnwise=column, row_scaled=False) == expected
    features = [{}, {"optimize_for_gemm": True}, {"stochastic_rounding": True}, RHT]
    features += [{"with_2d_quantization": True}] if planes == "both" else []
    for feature in features:
        q = NVFP4Quantizer(rowwise=row, columnwise=column, **feature)
        t = run(q, torch.zeros(shape, dtype=torch.bfloat16))
        found = t.inner_tensors()
        assert {name: tuple(buffer.shape) for name, buffer in found.items()} == expected
        assert list(found) == list(expected)
        assert all(buffer.is_contiguous() for buffer in found.values())
        for plane in ("rowwise", "columnwise"):
            if expected.get(f"{plane}_data"):
                other = "columnwise" if plane == "rowwise" else "rowwise"
                assert t.with_usage(**{other: False}).dequantize().shape == shape
                assert getattr(t, f"amax_{plane}").tolist() == [0.0]


@pytest.mark.parametrize("shape", [(2, 3, 16, 64), (4, 8, 96)])
def test_leading_axes_are_flattened(shape: tuple[int, ...], options: Options, run: Run) -> None:
    x = hostile(shape, seed=1, block=(1, 16), nonfinite=True)
    for fields in options:
        q = NVFP4Quantizer(**fields)
        got, flat = run(q, x), run(q, x.view(-1, shape[-1]))
        for name, buffer in got.inner_tensors().items():
            assert_same_bits(buffer.view(getattr(flat, name).shape), getattr(flat, name), what=name)


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
def test_strides_do_not_matter(
    make: Callable[[], Tensor], options: Options, run: Run, assert_same_planes: Same
) -> None:
    x = make()
    assert not x.is_contiguous()
    for fields in options[::2]:  # each feature, with one order of scales
        q = NVFP4Quantizer(**fields)
        assert_same_planes(run(q, x), run(q, x.contiguous()))


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
@pytest.mark.usefixtures("poisoned")
def test_scale_padding_is_zero_whatever_memory_held(two_d: bool, swizzled: bool) -> None:
    assert torch.empty(4, dtype=torch.uint8).tolist() == [255] * 4
    m, k = 160, 96
    q = NVFP4Quantizer(with_2d_quantization=two_d, optimize_for_gemm=swizzled)
    t = q.quantize(torch.ones(m, k))
    for plane, (outer, inner) in {"rowwise": (m, k), "columnwise": (k, m)}.items():
        scale = getattr(t, f"{plane}_scale_inv")
        scale = unswizzle(scale) if swizzled else scale
        inside = torch.zeros_like(scale)
        inside[:outer, : inner // 16] = 0x7E
        assert_same_bits(scale, inside, what=plane)


def test_slabs_change_no_byte(
    options: Options, run: Run, assert_same_planes: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = hostile((176, 96), seed=13, block=(1, 16), nonfinite=True)
    for fields in options:
        quantizer = NVFP4Quantizer(**fields)
        shape = (160, 96) if quantizer.row_scaled_nvfp4 else (176, 96)
        made = []
        for slab in (2**30, 96 * 16, 1):  # one; rows and a rest; the fewest rows there can be
            monkeypatch.setattr(slabs, "SLAB", slab)
            q = run(quantizer, x[: shape[0]])
            made.append((q, q.dequantize().nan_to_num(nan=-1.0)))
        for q, values in made[1:]:
            assert_same_planes(q, made[0][0])
            assert_same_bits(values, made[0][1])


def own_memory(tensors: dict[str, Tensor]) -> bool:
    """Whether no two share memory, and none holds more than it needs."""
    storages = {t.untyped_storage().data_ptr() for t in tensors.values()}
    exact = all(t.untyped_storage().nbytes() == t.nbytes for t in tensors.values())
    return exact and len(storages) == len(tensors)


def test_planes_never_share_memory(options: Options, run: Run) -> None:
    for shape in ((32, 32), (128, 128)):
        for fields in options:
            t = run(NVFP4Quantizer(**fields), torch.ones(shape, dtype=torch.bfloat16))
            inner = t.inner_tensors()
            assert len({b.untyped_storage().data_ptr() for b in inner.values()}) == len(inner)


def test_swizzled_scales_are_the_swizzle_of_compact_ones(options: Options, run: Run) -> None:
    x = hostile((160, 96), seed=12, block=(1, 16))
    seen = 0
    for fields in options:
        if not fields["optimize_for_gemm"]:
            continue
        swizzled = run(NVFP4Quantizer(**fields), x)
        compact = run(NVFP4Quantizer(**{**fields, "optimize_for_gemm": False}), x)
        for name, buffer in swizzled.inner_tensors().items():
            expected = getattr(compact, name)
            expected = swizzle(expected) if name.endswith("scale_inv") else expected
            assert_same_bits(buffer, expected, what=name)
        assert_same_bits(swizzled.dequantize(), compact.dequantize())
        seen += 1
    assert seen > 10


COMPILED = [
    pytest.param("inductor", torch.bfloat16, {**RHT, "stochastic_rounding": True}, id="gradient"),
    pytest.param(
        "inductor",
        torch.float32,
        {"with_2d_quantization": True, "optimize_for_gemm": True},
        id="weight",
    ),
    pytest.param("aot_eager", torch.bfloat16, {"row_scaled_nvfp4": True}, id="aot-row-scaled"),
    pytest.param(
        "aot_eager",
        torch.float16,
        {"nvfp4_use_4over6": True, "with_2d_quantization": True, "columnwise": False},
        id="aot-4over6-2d",
    ),
]


@new_quantizer_in_graph
@pytest.mark.parametrize(("backend", "x_dtype", "fields"), COMPILED)
def test_compiled_equals_eager_in_one_graph(
    backend: str, x_dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    q = NVFP4Quantizer(internal=True, **fields)
    rng = torch.tensor([5, 6]) if q.stochastic_rounding else None

    def there_and_back(x: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        # exact neighbours on both sides: Inductor does not round between fused operations
        t = q.quantize(-x, rng=rng)
        planes = [t.with_usage(columnwise=False)]
        planes += [t.with_usage(rowwise=False)] if q.columnwise else []
        return t.inner_tensors(), [plane.dequantize().abs() for plane in planes]

    with count_compiles() as counts:
        compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend=backend)
        for m in (32, 64, 96, 160):
            x = hostile((m, 96), x_dtype, seed=m, block=(1, 16), nonfinite=True)
            inner, values = compiled(x)
            expected_inner, expected_values = there_and_back(x)
            assert list(inner) == list(expected_inner)
            for name, buffer in expected_inner.items():
                assert_same_bits(inner[name], buffer, what=name)
                assert inner[name].is_contiguous()
            if backend == "inductor":
                assert own_memory(inner)
            for got, expected in zip(values, expected_values, strict=True):
                # which NaN it is depends on the instruction that multiplied
                assert_same_bits(got.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


def test_seed_is_no_constant_of_the_graph() -> None:
    q = NVFP4Quantizer(internal=True, stochastic_rounding=True, columnwise=False)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with count_compiles() as counts:
        compiled = torch.compile(
            lambda x, rng: unpack_e2m1(q.quantize(x, rng=rng).rowwise_data),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        seen = {}
        for seed in range(4):
            rng = torch.tensor([seed, 7])
            seen[seed] = compiled(x, rng)
            expected = unpack_e2m1(q.quantize(x, rng=rng).rowwise_data)
            assert_same_bits(seen[seed], expected)
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)
    assert len({codes.numpy().tobytes() for codes in seen.values()}) == 4
