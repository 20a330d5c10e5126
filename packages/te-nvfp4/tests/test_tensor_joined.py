# SPDX-License-Identifier: Apache-2.0
"""Concatenation and transposition: exact, or said out loud."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_nvfp4.quantizer import NVFP4Quantizer
from te_proto.errors import FallbackError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]

RHT = {"with_rht": True, "with_post_rht_amax": True}
LINES = {"row_scaled_nvfp4": True}


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


@pytest.fixture(scope="module")
def quantizers(options: Options) -> list[NVFP4Quantizer]:
    """Every quantizer without a transform and without chance."""
    found = [NVFP4Quantizer(**f) for f in options]
    return [q for q in found if not (q.with_rht or q.stochastic_rounding)]


# -- concatenation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        pytest.param([(1, 96), (64, 96), (130, 96)], 0, id="rows"),
        pytest.param([(2, 3, 64), (2, 5, 64)], 1, id="middle"),
        pytest.param([(2, 32, 64), (3, 32, 64)], 0, id="outer"),
        pytest.param([(0, 64), (32, 64)], 0, id="with-an-empty-one"),
    ],
)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
def test_cat_of_rows_with_scales_of_their_own_is_exact(
    shapes: list[tuple[int, ...]], dim: int, swizzled: bool, assert_same_planes: Same
) -> None:
    quantizer = NVFP4Quantizer(columnwise=False, optimize_for_gemm=swizzled, **LINES)
    xs = [hostile(shape, seed=i) for i, shape in enumerate(shapes)]
    joined = torch.cat([quantizer.quantize(x) for x in xs], dim)
    assert_same_planes(joined, quantizer.quantize(torch.cat(xs, dim)))


def test_cat_of_columns_with_scales_of_their_own_is_exact(assert_same_planes: Same) -> None:
    quantizer = NVFP4Quantizer(**LINES)
    xs = [hostile((64, k), seed=k) for k in (32, 96)]
    joined = torch.cat([quantizer.quantize(x).with_usage(rowwise=False) for x in xs], -1)
    whole = quantizer.quantize(torch.cat(xs, -1)).with_usage(rowwise=False)
    assert_same_planes(joined, whole)


@pytest.mark.parametrize(
    ("fields", "dim"),
    [
        pytest.param({}, 0, id="one-amax-each"),
        pytest.param(LINES, 0, id="rows-that-share-column-scales"),
        pytest.param({**LINES, "columnwise": False}, 1, id="parts-of-a-row"),
    ],
)
def test_cat_that_is_not_exact_falls_back_and_says_so(fields: dict[str, bool], dim: int) -> None:
    both = [NVFP4Quantizer(**fields).quantize(hostile((32, 64), seed=s)) for s in (1, 2)]
    with pytest.raises(FallbackError, match=r"^nvfp4: aten.cat.default has no quantized form"):
        torch.cat(both, dim)
    with te_proto.fallback("allow"):
        plain = torch.cat(both, dim)
    assert_same_bits(plain, torch.cat([q.dequantize() for q in both], dim))


# -- transposition --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(160, 288), (32, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "transpose",
    [
        pytest.param(lambda t: t.t(), id="t"),
        pytest.param(lambda t: t.T, id="T"),
        pytest.param(lambda t: t.transpose(-1, 0), id="transpose"),
        pytest.param(lambda t: t.permute(1, 0), id="permute"),
    ],
)
def test_transpose_swaps_the_planes_exactly(
    shape: tuple[int, int],
    transpose: Callable[[Any], Any],
    quantizers: list[NVFP4Quantizer],
    assert_same_planes: Same,
) -> None:
    x = hostile(shape)
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        swapped = quantizer.with_usage(rowwise=quantizer.columnwise, columnwise=quantizer.rowwise)
        turned = transpose(q)
        assert turned.quantizer == swapped
        assert turned.stride() == (shape[0], 1)  # dense: what its prototype says
        if swapped.rowwise or not (quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6):
            assert_same_planes(turned, swapped.quantize(x.t()))
        assert_same_planes(transpose(turned), q)


def test_transposed_column_plane_is_a_row_plane(assert_same_planes: Same) -> None:
    x = hostile((48, 64))
    for fields in ({}, {"optimize_for_gemm": True}, {"with_2d_quantization": True}):
        columns = NVFP4Quantizer(rowwise=False, **fields).quantize(x)
        rows = NVFP4Quantizer(columnwise=False, **fields).quantize(x.t())
        assert_same_planes(columns.t(), rows)
        assert_same_planes(rows.t(), columns)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        pytest.param(RHT, (32, 64), id="transformed"),
        pytest.param({**RHT, "columnwise": False}, (32, 64), id="would-have-to-be-transformed"),
        pytest.param({**LINES, "columnwise": False}, (5, 64), id="row-scaled-of-5-rows"),
    ],
)
def test_transpose_that_is_not_exact_falls_back_and_says_so(
    fields: dict[str, bool], shape: tuple[int, int]
) -> None:
    q = NVFP4Quantizer(**fields).quantize(hostile(shape))
    with pytest.raises(FallbackError, match=r"aten\.t\.default has no quantized form"):
        q.t()
    with te_proto.fallback("allow"):
        assert_same_bits(q.t(), q.dequantize().t())
