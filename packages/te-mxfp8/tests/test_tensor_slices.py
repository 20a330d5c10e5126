# SPDX-License-Identifier: Apache-2.0
"""Slices: exact where no block is cut, refused elsewhere, never dequantized on the way.

The expectation is always the same: what quantizing the view of ``x`` gives, byte for byte.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_mxfp8.quantizer import MXFP8Quantizer
from te_mxfp8.tensor import MXFP8Tensor
from te_proto.errors import ShapeError, UsageError
from te_proto.testing import hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Known = Callable[[Any], dict[str, Any]]
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


def unit_of(quantizer: MXFP8Quantizer, shape: tuple[int, ...], dim: int) -> int:
    """Return the unit along ``dim`` that cuts no block of a plane that is on; 0 if all do."""
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
            unit = unit_of(quantizer, shape, dim)
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
            assert piece.shape == part.shape
            assert piece.is_contiguous()  # dense, whatever the strides of the plain piece
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
