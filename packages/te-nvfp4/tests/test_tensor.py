# SPDX-License-Identifier: Apache-2.0
"""Slices and views: exact, refused, or said out loud."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import te_proto
from te_nvfp4.quantizer import NVFP4Quantizer
from te_nvfp4.tensor import NVFP4Tensor
from te_proto.errors import FallbackError, ShapeError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Run = Callable[..., Any]
    Level = Callable[..., Tensor]

RHT = {"with_rht": True, "with_post_rht_amax": True}
LINES = {"row_scaled_nvfp4": True}


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


@pytest.fixture(scope="module")
def quantizers(options: Options) -> list[NVFP4Quantizer]:
    """Every quantizer whose slices round as the whole does, and scale by a like amax."""
    found = [NVFP4Quantizer(**f) for f in options]
    return [q for q in found if not (q.with_rht or q.stochastic_rounding)]


def values(q: Any) -> list[Tensor]:
    """Return what each plane that is held stands for."""
    planes = (("rowwise", "columnwise"), ("columnwise", "rowwise"))
    return [
        q.with_usage(**{other: False}).dequantize(torch.float32)
        for plane, other in planes
        if getattr(q, f"{plane}_data") is not None
    ]


def unit(q: NVFP4Quantizer, shape: tuple[int, ...], dim: int) -> int:
    """Return the unit along ``dim`` at which no block of a plane that is on is cut; 0 for none."""
    rows, columns = q.rowwise, q.columnwise
    both = q.with_2d_quantization
    block = 32 if q.row_scaled_nvfp4 and columns else 16
    if dim == len(shape) - 1:
        return block if rows or both or block == 32 else 1
    if not (columns or both):
        return 1
    in_one = 1  # rows of the matrix in one entry of dim
    for size in shape[dim + 1 : -1]:
        in_one *= size
    outer = 1
    for size in shape[:dim]:
        outer *= size
    # a block that is made of rows of several outer entries is cut wherever dim is
    if outer > 1 and shape[dim] * in_one % block:
        return 0
    return next(n for n in range(1, block + 1) if n * in_one % block == 0)


@pytest.mark.parametrize("shape", [(96, 96), (2, 32, 64), (4, 8, 96), (2, 2, 16, 64)], ids=str)
def test_slice_is_exact_where_no_block_is_cut_and_refused_elsewhere(
    shape: tuple[int, ...], quantizers: list[NVFP4Quantizer], level: Level, assert_same_planes: Same
) -> None:
    x = level(shape)
    cases = ((0, 16), (16, 16), (32, 32), (0, 1), (1, 2), (2, 2), (0, 0), (15, 1), (0, 2))
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        seen = set()
        for dim, (start, length) in itertools.product(range(len(shape)), cases):
            if start + length > shape[dim]:
                continue
            step = unit(quantizer, shape, dim)
            whole = step and start % step == length % step == 0
            if length == shape[dim] or whole:
                piece = q.narrow(dim, start, length)
                assert type(piece) is NVFP4Tensor
                for found, expected in zip(values(piece), values(q), strict=True):
                    assert_same_bits(found, expected.narrow(dim, start, length))
            else:
                with pytest.raises(ShapeError, match=f"nvfp4: a slice of axis {dim} must begin"):
                    q.narrow(dim, start, length)
            seen.add(bool(whole))
        assert seen == {True, False}


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(lambda t: t.split(32), id="split"),
        pytest.param(lambda t: t.split([32, 64, 64]), id="split-sizes"),
        pytest.param(lambda t: t.split(96, dim=-1), id="split-last"),
        pytest.param(lambda t: t.chunk(5), id="chunk"),
        pytest.param(lambda t: [t[32:], t[:-64], t[32:96], t[..., -96:]], id="indices"),
        pytest.param(lambda t: [t.narrow(1, 64, 32), t.narrow(-2, 128, 32)], id="narrow"),
    ],
)
def test_pieces_are_the_pieces_quantized(
    pieces: Callable[[Any], Any],
    quantizers: list[NVFP4Quantizer],
    level: Level,
    assert_same_planes: Same,
) -> None:
    x = level((160, 288))
    for quantizer in quantizers:
        found, plain = pieces(quantizer.quantize(x)), pieces(x)
        assert len(found) == len(plain) > 1
        for piece, part in zip(found, plain, strict=True):
            assert_same_planes(piece, quantizer.quantize(part))


@pytest.mark.parametrize("fields", [RHT, {"stochastic_rounding": True}], ids=["rht", "sr"])
def test_pieces_of_transformed_and_of_stochastic_planes_are_exact(
    fields: dict[str, bool], run: Run
) -> None:
    q = run(NVFP4Quantizer(**fields), hostile((64, 96)))
    for dim, start, length in ((0, 16, 32), (1, 32, 48)):
        for found, whole in zip(values(q.narrow(dim, start, length)), values(q), strict=True):
            assert_same_bits(found, whole.narrow(dim, start, length))


def test_slice_keeps_the_amax_of_the_whole() -> None:
    x = torch.ones(64, 64)
    x[0, 0] = 6.0
    for fields, amax in (({}, [6.0]), ({**LINES, "columnwise": False}, [1.0] * 32)):
        q = NVFP4Quantizer(**fields).quantize(x)
        assert q[32:].amax_rowwise.tolist() == amax


@pytest.mark.parametrize(
    ("fields", "shape", "take", "message"),
    [
        pytest.param(
            {},
            (64, 64),
            lambda q: q[0:31],
            "nvfp4: a slice of axis 0 must begin and end at a multiple of 16, whole columnwise "
            "blocks of 16, got [0:31] of shape (64, 64); slice elsewhere, drop the columnwise "
            "plane with with_usage(), or call .dequantize() first",
            id="rows",
        ),
        pytest.param(
            {"columnwise": False},
            (64, 96),
            lambda q: q[:, 24:96],
            "nvfp4: a slice of axis 1 must begin and end at a multiple of 16, whole rowwise "
            "blocks of 16, got [24:96] of shape (64, 96); slice elsewhere, drop the rowwise plane "
            "with with_usage(), or call .dequantize() first",
            id="columns",
        ),
        pytest.param(
            {},
            (4, 8, 64),
            lambda q: q[1:3],
            "nvfp4: a slice of axis 0 must begin and end at a multiple of 2, whole columnwise "
            "blocks of 16, got [1:3] of shape (4, 8, 64); slice elsewhere, drop the columnwise "
            "plane with with_usage(), or call .dequantize() first",
            id="outer-axis-of-3",
        ),
        pytest.param(
            {},
            (64, 64),
            lambda q: q[::2],
            "nvfp4: a slice must have step 1, got 2 on axis 0; call .dequantize() first",
            id="step",
        ),
    ],
)
def test_refused_slice_names_axis_block_and_offsets(
    fields: dict[str, bool], shape: tuple[int, ...], take: Callable[[Tensor], Tensor], message: str
) -> None:
    q = NVFP4Quantizer(**fields).quantize(torch.ones(shape))
    with pytest.raises(ShapeError) as raised:
        take(q)
    assert str(raised.value) == message


def test_rows_of_a_row_plane_can_be_taken_one_by_one(
    level: Level, assert_same_planes: Same
) -> None:
    x = level((5, 3, 64))
    for fields in ({}, LINES, {"optimize_for_gemm": True}):
        quantizer = NVFP4Quantizer(columnwise=False, **fields)
        q = quantizer.quantize(x)
        assert_same_planes(q[2], quantizer.quantize(x[2]))
        assert_same_planes(q[:, -1], quantizer.quantize(x[:, -1]))
        assert_same_planes(q[4, 1], quantizer.quantize(x[4, 1]))
        for found, part in zip(q.unbind(), x.unbind(), strict=True):
            assert_same_planes(found, quantizer.quantize(part))


def test_experts_of_both_planes_can_be_taken_one_by_one(
    level: Level, assert_same_planes: Same
) -> None:
    x = level((3, 64, 96))
    for fields in ({}, LINES, {"optimize_for_gemm": True}, {"with_2d_quantization": True}):
        quantizer = NVFP4Quantizer(**fields)
        for found, part in zip(quantizer.quantize(x).unbind(), x.unbind(), strict=True):
            assert_same_planes(found, quantizer.quantize(part))


def test_slice_refuses_writes_that_would_be_lost() -> None:
    q = NVFP4Quantizer().quantize(torch.ones(64, 64))
    piece = q[:32]
    with pytest.raises(UsageError, match="a write would not reach the whole"):
        piece.copy_(torch.zeros(32, 64))
    piece.clone().copy_(torch.zeros(32, 64))
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
    view: Callable[[Tensor], Any], options: Options, run: Run, assert_same_planes: Same
) -> None:
    x = hostile((192, 96))
    for fields in options:
        quantizer = NVFP4Quantizer(**fields)
        q = run(quantizer, x)
        viewed = view(q)
        assert viewed.shape == view(x).shape
        assert_same_planes(viewed, run(quantizer, view(x)))
        viewed.copy_(torch.zeros(viewed.shape, dtype=x.dtype))  # a view: it reaches the whole
        assert not q.dequantize().any()


@pytest.mark.parametrize("shape", [(-1, 32), (96, 192), (3, 2, 3072), (18432,)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
def test_reshape_that_moves_whole_blocks_between_rows_is_exact(
    shape: tuple[int, ...], swizzled: bool, assert_same_planes: Same
) -> None:
    x = hostile((192, 96))
    quantizer = NVFP4Quantizer(columnwise=False, optimize_for_gemm=swizzled)
    reshaped = quantizer.quantize(x).reshape(shape)
    assert_same_planes(reshaped, quantizer.quantize(x.reshape(shape)))
    assert_same_bits(reshaped.dequantize(), quantizer.quantize(x).dequantize().reshape(shape))
    with pytest.raises(UsageError, match="a write would not reach the whole"):
        reshaped.copy_(torch.zeros(reshaped.shape))  # its scales moved, so they are copies


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        pytest.param({"columnwise": False}, (768, 24), id="k-ragged"),
        pytest.param({}, (576, 32), id="column-plane-held"),
        pytest.param({"rowwise": False}, (96, 192), id="column-plane-only"),
        pytest.param({"columnwise": False, "with_2d_quantization": True}, (96, 192), id="2d"),
        pytest.param({"columnwise": False, **LINES}, (96, 192), id="row-scaled"),
    ],
)
def test_view_that_would_cut_blocks_falls_back_and_says_so(
    fields: dict[str, bool], shape: tuple[int, int]
) -> None:
    q = NVFP4Quantizer(**fields).replace(rowwise=True).quantize(hostile((192, 96)))
    q = q.with_usage(rowwise=fields.get("rowwise", True))
    message = "nvfp4: aten.view.default has no quantized form and dequantizes its NVFP4Tensor"
    with pytest.raises(FallbackError, match=message):
        q.view(shape)
    with te_proto.fallback("allow"):
        plain = q.view(shape)
    assert type(plain) is torch.Tensor
    assert_same_bits(plain, q.dequantize().view(shape))


def test_fallback_warns_with_op_format_and_bytes() -> None:
    q = NVFP4Quantizer(columnwise=False).quantize(torch.ones(32, 64))
    message = (
        "nvfp4: aten.cos.default has no quantized form and dequantizes its NVFP4Tensor: 1540 bytes "
        "become 8192 of float32; call .dequantize() first, or te_proto.fallback('allow')"
    )
    with te_proto.fallback("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = torch.cos(q)
    assert [str(w.message) for w in caught] == [message]
    assert_same_bits(out, torch.cos(torch.ones(32, 64)))
