# SPDX-License-Identifier: Apache-2.0
"""Slices and concatenation: exact, refused, or through the visible fallback.

The expectation is always the same: what quantizing the slice of ``x`` gives, byte for byte.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.tensor import Float8BlockwiseTensor
from te_proto.errors import FallbackError, ShapeError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]

# what slices depend on
QUANTIZERS = {
    f"{dim}d-{plane}": Float8BlockQuantizer(
        block_scaling_dim=dim, rowwise=plane != "columnwise", columnwise=plane != "rowwise"
    )
    for dim, plane in itertools.product((1, 2), ("both", "rowwise", "columnwise"))
}


@pytest.fixture(params=QUANTIZERS.values(), ids=QUANTIZERS)
def quantizer(request: pytest.FixtureRequest) -> Float8BlockQuantizer:
    value: Float8BlockQuantizer = request.param
    return value


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """An op that is claimed exact must not dequantize on the way."""
    with te_proto.fallback("error"):
        yield


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return hostile(shape, torch.float32, block=(1, 128))


def keeps_blocks(
    quantizer: Float8BlockQuantizer, shape: tuple[int, ...], dim: int, start: int, length: int
) -> bool:
    """Whether each block of the slice is one of the whole, found by looking at every row."""
    last, two_d = dim == len(shape) - 1, quantizer.is_2d()
    blocked = two_d or (quantizer.rowwise if last else quantizer.columnwise)
    if not blocked:
        return True
    if last:
        lines, total = torch.arange(start, start + length), shape[-1]
    else:
        total = math.prod(shape[:-1])
        lines = torch.arange(total).reshape(shape[:-1]).narrow(dim, start, length).flatten()
    whole = {tuple(range(b, min(b + 128, total))) for b in range(0, total, 128)}
    return all(tuple(block.tolist()) in whole for block in lines.split(128) if len(lines))


SHAPES = [(300, 400), (4, 64, 200), (2, 128, 130), (2, 3, 128, 140), (3, 4, 8, 130), (257,)]
CASES = ((0, 128), (128, 128), (0, 1), (1, 2), (2, 2), (0, 0), (5, 0), (64, 64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slice_is_exact_where_no_block_is_cut_and_refused_elsewhere(
    shape: tuple[int, ...], quantizer: Float8BlockQuantizer, assert_same_planes: Same
) -> None:
    x = values(shape)
    q = quantizer.quantize(x)
    for dim, size in enumerate(shape):
        # also what runs to the end, which may be ragged
        to_the_end = [(start, size - start) for start in (128, 256, size - 1)]
        for start, length in (*CASES, *to_the_end):
            if start < 0 or length < 0 or start + length > size or length == size:
                continue
            if keeps_blocks(quantizer, shape, dim, start, length):
                piece = q.narrow(dim, start, length)
                assert type(piece) is Float8BlockwiseTensor
                assert_same_planes(piece, quantizer.quantize(x.narrow(dim, start, length)))
            else:
                with pytest.raises(ShapeError, match=f"fp8_block: a slice of axis {dim} must"):
                    q.narrow(dim, start, length)


@pytest.mark.parametrize(
    ("name", "shape", "take", "message"),
    [
        pytest.param(
            "1d-both",
            (300, 300),
            lambda q: q[0:31],
            "fp8_block: a slice of axis 0 must begin and end at a multiple of 128, whole "
            "columnwise blocks of 128, got [0:31] of shape (300, 300); slice elsewhere, drop the "
            "columnwise plane with with_usage(), or call .dequantize() first",
            id="rows",
        ),
        pytest.param(
            "1d-rowwise",
            (64, 300),
            lambda q: q[:, 48:300],
            "fp8_block: a slice of axis 1 must begin and end at a multiple of 128, whole rowwise "
            "blocks of 128, got [48:300] of shape (64, 300); slice elsewhere, drop the rowwise "
            "plane with with_usage(), or call .dequantize() first",
            id="columns",
        ),
        pytest.param(
            "2d-columnwise",
            (16, 32, 64),
            lambda q: q[1:4],
            "fp8_block: a slice of axis 0 must begin and end at a multiple of 4, whole columnwise "
            "blocks of 128, got [1:4] of shape (16, 32, 64); slice elsewhere, drop the columnwise "
            "plane with with_usage(), or call .dequantize() first",
            id="outer-axis-of-3",
        ),
        pytest.param(
            "2d-both",
            (64, 64),
            lambda q: q[::2],
            "fp8_block: a slice must have step 1, got 2 on axis 0; call .dequantize() first",
            id="step",
        ),
    ],
)
def test_refused_slice_names_axis_block_and_offsets(
    name: str,
    shape: tuple[int, ...],
    take: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    q = QUANTIZERS[name].quantize(torch.ones(shape))
    with pytest.raises(ShapeError) as raised:
        take(q)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(lambda t: t.split(128), id="split"),
        pytest.param(lambda t: t.split([128, 256, 16]), id="split-sizes"),
        pytest.param(lambda t: t.split(256, dim=-1), id="split-last"),
        pytest.param(lambda t: t.chunk(4, dim=1), id="chunk-last"),
        pytest.param(lambda t: [t[128:], t[:-16], t[128:256], t[..., -126:], t[:0]], id="indices"),
        pytest.param(lambda t: [t.narrow(1, 384, 126), t.narrow(-2, 256, 144)], id="narrow"),
    ],
)
def test_pieces_are_exact(
    pieces: Callable[[Any], Any], quantizer: Float8BlockQuantizer, assert_same_planes: Same
) -> None:
    x = values((400, 510))
    found, plain = pieces(quantizer.quantize(x)), pieces(x)
    assert len(found) == len(plain) > 1
    for piece, part in zip(found, plain, strict=True):
        assert_same_planes(piece, quantizer.quantize(part))


def test_rows_of_a_row_plane_can_be_taken_one_by_one(assert_same_planes: Same) -> None:
    x = values((5, 3, 300))
    quantizer = QUANTIZERS["1d-rowwise"]
    q = quantizer.quantize(x)
    assert_same_planes(q[2], quantizer.quantize(x[2]))
    assert_same_planes(q[:, -1], quantizer.quantize(x[:, -1]))
    assert_same_planes(q[4, 1], quantizer.quantize(x[4, 1]))
    for found, part in zip(q.unbind(), x.unbind(), strict=True):
        assert_same_planes(found, quantizer.quantize(part))


def test_experts_can_be_taken_one_by_one(
    quantizer: Float8BlockQuantizer, assert_same_planes: Same
) -> None:
    x = values((3, 256, 100))
    for found, part in zip(quantizer.quantize(x).unbind(), x.unbind(), strict=True):
        assert_same_planes(found, quantizer.quantize(part))


def test_slice_refuses_a_write_that_would_be_lost(quantizer: Float8BlockQuantizer) -> None:
    q = quantizer.quantize(torch.ones(256, 256))
    piece = q[:128]
    with pytest.raises(UsageError, match="a write would not reach the whole"):
        piece.copy_(torch.zeros(piece.shape))
    piece.clone().copy_(torch.zeros(piece.shape))
    assert q.dequantize().unique().tolist() == [1.0]


def test_slice_shares_no_buffer(quantizer: Float8BlockQuantizer) -> None:
    q = quantizer.quantize(torch.ones(256, 256))
    held = {t.untyped_storage().data_ptr() for t in q.inner_tensors().values()}
    for piece in (q[128:], q[:, 128:]):
        for buffer in piece.inner_tensors().values():
            assert buffer.untyped_storage().data_ptr() not in held
            assert buffer.untyped_storage().nbytes() == buffer.numel() * buffer.itemsize


# -- concatenation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        pytest.param([(128, 96), (256, 96), (10, 96)], 0, id="rows"),
        pytest.param([(60, 128), (60, 50)], 1, id="columns"),
        pytest.param([(60, 256), (60, 128), (60, 1)], -1, id="last"),
        pytest.param([(2, 128, 64), (2, 256, 64)], 1, id="middle"),
        pytest.param([(2, 64, 70), (3, 64, 70)], 0, id="outer"),
        pytest.param([(0, 64), (32, 64)], 0, id="with-an-empty-one"),
        pytest.param([(130,)], 0, id="alone"),
        pytest.param([(128,), (7,)], 0, id="lines"),
    ],
)
def test_cat_is_exact(
    shapes: list[tuple[int, ...]],
    dim: int,
    quantizer: Float8BlockQuantizer,
    assert_same_planes: Same,
) -> None:
    xs = [hostile(shape, seed=i, block=(1, 128)) for i, shape in enumerate(shapes)]
    joined = torch.cat([quantizer.quantize(x) for x in xs], dim)
    assert_same_planes(joined, quantizer.quantize(torch.cat(xs, dim)))


def test_cat_of_split_gives_the_whole_back(
    quantizer: Float8BlockQuantizer, assert_same_planes: Same
) -> None:
    q = quantizer.quantize(values((300, 400)))
    assert_same_planes(torch.cat(q.split(128)), q)
    assert_same_planes(torch.cat(q.split(256, -1), -1), q)


def test_cat_of_any_rows_of_a_row_plane_and_columns_of_a_column_plane_is_exact(
    assert_same_planes: Same,
) -> None:
    for name, dim in (("1d-rowwise", 0), ("1d-columnwise", 1)):
        shapes = [(n, 70) if dim == 0 else (70, n) for n in (1, 5, 130)]
        xs = [hostile(shape, seed=shape[dim]) for shape in shapes]
        joined = torch.cat([QUANTIZERS[name].quantize(x) for x in xs], dim)
        assert_same_planes(joined, QUANTIZERS[name].quantize(torch.cat(xs, dim)))


@pytest.mark.parametrize(
    ("first", "second", "dim"),
    [
        pytest.param(("1d-both", (100, 64)), ("1d-both", (28, 64)), 0, id="rows-would-move"),
        pytest.param(("1d-rowwise", (4, 100)), ("1d-rowwise", (4, 28)), 1, id="columns-would-move"),
        pytest.param(("2d-both", (2, 64, 64)), ("2d-both", (2, 64, 64)), 1, id="middle"),
        pytest.param(("1d-both", (128, 64)), ("1d-rowwise", (128, 64)), 0, id="other-planes"),
        pytest.param(("1d-both", (128, 64)), ("2d-both", (128, 64)), 0, id="other-blocks"),
    ],
)
def test_cat_that_is_not_exact_falls_back_and_says_so(
    first: tuple[str, Any], second: tuple[str, Any], dim: int
) -> None:
    both = [QUANTIZERS[name].quantize(values(shape)) for name, shape in (first, second)]
    with pytest.raises(FallbackError, match=r"^fp8_block: aten.cat.default has no quantized form"):
        torch.cat(both, dim)
    with te_proto.fallback("allow"):
        plain = torch.cat(both, dim)
    assert_same_bits(plain, torch.cat([q.dequantize() for q in both], dim))
