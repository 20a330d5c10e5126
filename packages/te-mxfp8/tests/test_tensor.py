# SPDX-License-Identifier: Apache-2.0
"""Views, slices, concatenation, transposition: exact, refused, or through the visible fallback.

The expectation is always the same: what quantizing the view of ``x`` gives, byte for byte.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_mxfp8.quantizer import MXFP8Quantizer
from te_mxfp8.tensor import MXFP8Tensor
from te_proto.errors import FallbackError, ShapeError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]

BLOCKS_FIT = [(128, 256), (96, 160), (4, 32, 96), (2, 3, 64, 64), (3, 4, 8, 64)]


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """An op that is claimed exact must not dequantize on the way."""
    with te_proto.fallback("error"):
        yield


@pytest.fixture
def quantizers(options: Options) -> list[MXFP8Quantizer]:
    return [MXFP8Quantizer(**fields) for fields in options]


def ways(quantizer: MXFP8Quantizer, shape: tuple[int, ...], dim: int) -> int:
    """Return the unit along ``dim`` at which no block of a plane that is on is cut."""
    two_d = quantizer.with_2d_quantization
    if dim == len(shape) - 1:
        return 32 if quantizer.rowwise or two_d else 1
    if not (quantizer.columnwise or two_d):
        return 1
    rows = 1  # of the matrix, in one entry of dim
    for size in shape[dim + 1 : -1]:
        rows *= size
    unit = 1
    while unit * rows % 32:
        unit += 1
    # a block that is made of rows of several outer entries is cut wherever dim is
    outer = 1
    for size in shape[:dim]:
        outer *= size
    return unit if outer == 1 or shape[dim] * rows % 32 == 0 else 0


# -- slices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", BLOCKS_FIT, ids=str)
def test_slice_is_exact_where_no_block_is_cut_and_refused_elsewhere(
    shape: tuple[int, ...], quantizers: list[MXFP8Quantizer], assert_same_planes: Same
) -> None:
    x = hostile(shape)
    cases = ((0, 32), (32, 32), (32, 64), (0, 1), (1, 2), (2, 2), (0, 0), (31, 1))
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        seen = set()
        for dim, (start, length) in itertools.product(range(len(shape)), cases):
            if start + length > shape[dim]:
                continue
            unit = ways(quantizer, shape, dim)
            whole = unit and start % unit == length % unit == 0
            if length == shape[dim] or whole:
                piece = q.narrow(dim, start, length)
                assert type(piece) is MXFP8Tensor
                assert_same_planes(piece, quantizer.quantize(x.narrow(dim, start, length)))
            else:
                with pytest.raises(ShapeError, match=f"mxfp8: a slice of axis {dim} must begin"):
                    q.narrow(dim, start, length)
            seen.add(bool(whole))
        assert seen == {True, False}


@pytest.mark.parametrize(
    ("fields", "shape", "take", "message"),
    [
        pytest.param(
            {},
            (64, 64),
            lambda q: q[0:31],
            "mxfp8: a slice of axis 0 must begin and end at a multiple of 32, whole columnwise "
            "blocks of 32, got [0:31] of shape (64, 64); slice elsewhere, drop the columnwise "
            "plane with with_usage(), or call .dequantize() first",
            id="rows",
        ),
        pytest.param(
            {"columnwise": False},
            (64, 96),
            lambda q: q[:, 48:96],
            "mxfp8: a slice of axis 1 must begin and end at a multiple of 32, whole rowwise "
            "blocks of 32, got [48:96] of shape (64, 96); slice elsewhere, drop the rowwise plane "
            "with with_usage(), or call .dequantize() first",
            id="columns",
        ),
        pytest.param(
            {},
            (4, 16, 64),
            lambda q: q[1:3],
            "mxfp8: a slice of axis 0 must begin and end at a multiple of 2, whole columnwise "
            "blocks of 32, got [1:3] of shape (4, 16, 64); slice elsewhere, drop the columnwise "
            "plane with with_usage(), or call .dequantize() first",
            id="outer-axis-of-3",
        ),
        pytest.param(
            {},
            (64, 64),
            lambda q: q[::2],
            "mxfp8: a slice must have step 1, got 2 on axis 0; call .dequantize() first",
            id="step-with-implicit-end",
        ),
        pytest.param(
            {},
            (64, 64),
            lambda q: q[0:64:2],
            "mxfp8: a slice must have step 1, got 2 on axis 0; call .dequantize() first",
            id="step-with-full-end",
        ),
    ],
)
def test_refused_slice_names_axis_block_and_offsets(
    fields: dict[str, bool],
    shape: tuple[int, ...],
    take: Callable[[Tensor], Tensor],
    message: str,
) -> None:
    q = MXFP8Quantizer(**fields).quantize(torch.ones(shape))
    with pytest.raises(ShapeError) as raised:
        take(q)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(lambda t: t.split(32), id="split"),
        pytest.param(lambda t: t.split([32, 64, 64]), id="split-sizes"),
        pytest.param(lambda t: t.split(96, dim=-1), id="split-last"),
        pytest.param(lambda t: t.chunk(5), id="chunk"),
        pytest.param(lambda t: t.chunk(3, dim=-1), id="chunk-last"),
        pytest.param(lambda t: [t[32:], t[:-64], t[32:96], t[..., -96:], t[32:32]], id="indices"),
        pytest.param(lambda t: [t.narrow(1, 64, 32), t.narrow(-2, 128, 32)], id="narrow"),
    ],
)
def test_pieces_are_exact(
    pieces: Callable[[Any], Any], quantizers: list[MXFP8Quantizer], assert_same_planes: Same
) -> None:
    x = hostile((160, 288), torch.float32)
    for quantizer in quantizers:
        found, plain = pieces(quantizer.quantize(x)), pieces(x)
        assert len(found) == len(plain) > 1
        for piece, part in zip(found, plain, strict=True):
            assert_same_planes(piece, quantizer.quantize(part))


def test_uneven_split_is_refused_when_it_cuts_a_block() -> None:
    q = MXFP8Quantizer().quantize(torch.ones(96, 64))
    with pytest.raises(ShapeError, match=r"multiple of 32, whole columnwise .* got \[0:31\] of"):
        q.split(31)
    with pytest.raises(ShapeError, match=r"multiple of 32, whole columnwise .* got \[0:48\] of"):
        q.chunk(2)
    with pytest.raises(ShapeError, match=r"multiple of 32, whole rowwise .* got \[0:22\] of"):
        q.chunk(3, dim=-1)


def test_rows_of_a_row_plane_can_be_taken_one_by_one(assert_same_planes: Same) -> None:
    x = hostile((5, 3, 64))
    for swizzled in (False, True):
        quantizer = MXFP8Quantizer(columnwise=False, optimize_for_gemm=swizzled)
        q = quantizer.quantize(x)
        assert_same_planes(q[2], quantizer.quantize(x[2]))
        assert_same_planes(q[:, -1], quantizer.quantize(x[:, -1]))
        assert_same_planes(q[4, 1], quantizer.quantize(x[4, 1]))
        for found, part in zip(q.unbind(), x.unbind(), strict=True):
            assert_same_planes(found, quantizer.quantize(part))


def test_experts_of_both_planes_can_be_taken_one_by_one(assert_same_planes: Same) -> None:
    x = hostile((3, 64, 96))
    for swizzled in (False, True):
        quantizer = MXFP8Quantizer(optimize_for_gemm=swizzled)
        for found, part in zip(quantizer.quantize(x).unbind(), x.unbind(), strict=True):
            assert_same_planes(found, quantizer.quantize(part))


def test_slice_and_transpose_refuse_writes_that_would_be_lost() -> None:
    q = MXFP8Quantizer().quantize(torch.ones(64, 64))
    for piece in (q[:32], q.t()):
        with pytest.raises(UsageError, match="a write would not reach the whole"):
            piece.copy_(torch.zeros(piece.shape))
        piece.clone().copy_(torch.zeros(piece.shape))
    assert q.dequantize().unique().tolist() == [1.0]


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
    assert_same_planes: Same,
) -> None:
    x = hostile(shape)
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        swapped = quantizer.with_usage(rowwise=quantizer.columnwise, columnwise=quantizer.rowwise)
        turned = transpose(q)
        assert turned.quantizer == swapped
        assert turned.stride() == (shape[0], 1)  # dense: what its prototype says
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
