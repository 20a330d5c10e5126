# SPDX-License-Identifier: Apache-2.0
"""Views, concatenation, transposition: exact, or through the visible fallback.

The expectation is always the same: what quantizing the view of ``x`` gives, byte for byte.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_mxfp8.quantizer import MXFP8Quantizer
from te_proto.errors import FallbackError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Known = Callable[[Any], dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """An op that is claimed exact must not dequantize on the way."""
    with te_proto.fallback("error"):
        yield


@pytest.fixture
def quantizers(options: Options) -> list[MXFP8Quantizer]:
    return [MXFP8Quantizer(**fields) for fields in options]


# -- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.view(64, 3, 96), id="rows-split"),
        pytest.param(lambda t: t.view(2, 2, 48, 96), id="rows-split-twice"),
        pytest.param(lambda t: t.view(2, 96, 96).view(-1, 96), id="rows-merged"),
        pytest.param(lambda t: t.reshape(6, 32, 96), id="reshape"),
        pytest.param(lambda t: t.unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda t: t.unsqueeze(0).squeeze(0), id="squeeze"),
        pytest.param(lambda t: t.flatten(0, 0), id="flatten"),
        pytest.param(lambda t: t.view(t.shape), id="same"),
    ],
)
def test_view_that_keeps_k_shares_the_memory(
    view: Callable[[Tensor], Any], quantizers: list[MXFP8Quantizer], assert_same_planes: Same
) -> None:
    x = hostile((192, 96))
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        viewed = view(q)
        assert viewed.shape == view(x).shape
        assert_same_planes(viewed, quantizer.quantize(view(x)))
        viewed.copy_(torch.zeros(viewed.shape))  # a view: the write reaches the whole
        assert not q.dequantize().any()


@pytest.mark.parametrize("shape", [(-1, 32), (96, 192), (3, 2, 3072), (18432,)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
def test_reshape_that_moves_whole_blocks_between_rows_is_exact(
    shape: tuple[int, ...], swizzled: bool, assert_same_planes: Same
) -> None:
    x = hostile((192, 96))
    quantizer = MXFP8Quantizer(columnwise=False, optimize_for_gemm=swizzled)
    reshaped = quantizer.quantize(x).reshape(shape)
    assert_same_planes(reshaped, quantizer.quantize(x.reshape(shape)))
    assert_same_bits(reshaped.dequantize(), quantizer.quantize(x).dequantize().reshape(shape))
    with pytest.raises(UsageError, match="a write would not reach the whole"):
        reshaped.copy_(torch.zeros(reshaped.shape))  # its scales moved, so they are copies


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        pytest.param({"columnwise": False}, (384, 48), id="k-ragged"),
        pytest.param({}, (576, 32), id="column-plane-held"),
        pytest.param({"rowwise": False}, (96, 192), id="column-plane-only"),
        pytest.param({"columnwise": False, "with_2d_quantization": True}, (96, 192), id="2d"),
    ],
)
def test_view_that_would_cut_blocks_falls_back_and_says_so(
    fields: dict[str, bool], shape: tuple[int, int]
) -> None:
    q = MXFP8Quantizer(**fields).quantize(hostile((192, 96)))
    message = "mxfp8: aten.view.default has no quantized form and dequantizes its MXFP8Tensor"
    with pytest.raises(FallbackError, match=message):
        q.view(shape)
    with te_proto.fallback("allow"):
        plain = q.view(shape)
    assert type(plain) is torch.Tensor
    assert_same_bits(plain, q.dequantize().view(shape))


def test_fallback_warns_with_op_format_and_bytes() -> None:
    q = MXFP8Quantizer(columnwise=False).quantize(torch.ones(32, 64))
    message = (
        "mxfp8: aten.cos.default has no quantized form and dequantizes its MXFP8Tensor: 2560 bytes "
        "become 8192 of float32; call .dequantize() first, or te_proto.fallback('allow')"
    )
    with te_proto.fallback("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = torch.cos(q)
    assert [str(w.message) for w in caught] == [message]
    assert_same_bits(out, torch.cos(torch.ones(32, 64)))


# -- concatenation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        pytest.param([(32, 96), (64, 96), (160, 96)], 0, id="rows"),
        pytest.param([(64, 32), (64, 160)], 1, id="columns"),
        pytest.param([(64, 32), (64, 160)], -1, id="last"),
        pytest.param([(2, 32, 64), (2, 64, 64)], 1, id="middle"),
        pytest.param([(2, 32, 64), (3, 32, 64)], 0, id="outer"),
        pytest.param([(0, 64), (32, 64)], 0, id="with-an-empty-one"),
        pytest.param([(64, 64)], 0, id="alone"),
    ],
)
def test_cat_is_exact(
    shapes: list[tuple[int, ...]],
    dim: int,
    quantizers: list[MXFP8Quantizer],
    assert_same_planes: Same,
) -> None:
    xs = [hostile(shape, seed=i) for i, shape in enumerate(shapes)]
    for quantizer in quantizers:
        joined = torch.cat([quantizer.quantize(x) for x in xs], dim)
        assert_same_planes(joined, quantizer.quantize(torch.cat(xs, dim)))


def test_cat_of_split_gives_the_whole_back(
    quantizers: list[MXFP8Quantizer], assert_same_planes: Same
) -> None:
    for quantizer in quantizers:
        q = quantizer.quantize(hostile((160, 288)))
        assert_same_planes(torch.cat(q.split(32)), q)
        assert_same_planes(torch.cat(q.split(96, -1), -1), q)


def test_cat_of_single_rows_of_a_row_plane_is_exact(assert_same_planes: Same) -> None:
    quantizer = MXFP8Quantizer(columnwise=False)
    xs = [hostile((rows, 64), seed=rows) for rows in (1, 5, 130)]
    joined = torch.cat([quantizer.quantize(x) for x in xs])
    assert_same_planes(joined, quantizer.quantize(torch.cat(xs)))


@pytest.mark.parametrize(
    ("first", "second", "dim"),
    [
        pytest.param(({}, (2, 16, 64)), ({}, (2, 16, 64)), 1, id="blocks-would-move"),
        pytest.param(({}, (32, 64)), ({"columnwise": False}, (32, 64)), 0, id="other-planes"),
        pytest.param(({}, (32, 64)), ({"optimize_for_gemm": True}, (32, 64)), 0, id="other-order"),
        pytest.param(({}, (32, 64)), ({"dtype": "e5m2"}, (32, 64)), 0, id="other-element"),
    ],
)
def test_cat_that_is_not_exact_falls_back_and_says_so(
    first: tuple[Any, Any], second: tuple[Any, Any], dim: int
) -> None:
    both = [MXFP8Quantizer(**fields).quantize(hostile(shape)) for fields, shape in (first, second)]
    with pytest.raises(FallbackError, match=r"^mxfp8: aten.cat.default has no quantized form"):
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
    quantizers: list[MXFP8Quantizer],
    known: Known,
    assert_same_planes: Same,
) -> None:
    x = hostile(shape)
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        swapped = quantizer.with_usage(rowwise=quantizer.columnwise, columnwise=quantizer.rowwise)
        turned = transpose(q)
        assert turned.quantizer == swapped
        assert known(turned) == known(te_proto.to_tensor_proto(turned).create_tensor())
        assert_same_planes(turned, swapped.quantize(x.t()))
        assert_same_planes(transpose(turned), q)


def test_single_plane_is_read_transposed_and_not_as_it_lies() -> None:
    x = torch.arange(32 * 64.0).reshape(32, 64).div(64).floor()  # row i holds i, exact in E4M3
    for usage in ({"columnwise": False}, {"rowwise": False}):
        q = MXFP8Quantizer(**usage).quantize(x)
        assert torch.equal(q.t().dequantize(), q.dequantize().t())
        assert q.t().shape == (64, 32)


def test_transpose_of_more_axes_falls_back_and_says_so() -> None:
    q = MXFP8Quantizer().quantize(hostile((2, 32, 64)))
    with pytest.raises(FallbackError, match=r"aten\.transpose\.int has no quantized form"):
        q.transpose(1, 2)
    with te_proto.fallback("allow"):
        assert_same_bits(q.transpose(1, 2), q.dequantize().transpose(1, 2))
