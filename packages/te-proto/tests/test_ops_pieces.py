# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from te_toy import QUANTIZERS, assert_kept, codes_of, quantized, values
from torch import Tensor

from te_proto import QuantizedStorage, fallback
from te_proto.errors import ShapeError, UsageError

aten = torch.ops.aten
Q, ROW, COLUMN = (QUANTIZERS[name] for name in ("both", "row", "column"))
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


# -- pieces -------------------------------------------------------------------------------------

PIECES = {
    "slice-rows": lambda t: t[4:8],
    "slice-negative": lambda t: t[-8:-4],
    "slice-open-start": lambda t: t[:8],
    "slice-open-end": lambda t: t[8:],
    "slice-beyond-end": lambda t: t[4:1000],
    "slice-empty": lambda t: t[8:8],
    "slice-backwards": lambda t: t[8:4],
    "slice-columns": lambda t: t[:, 4:8],
    "slice-columns-negative": lambda t: t[..., -4:],
    "slice-both": lambda t: t[4:12, 4:8],
    "slice-defaults": lambda t: aten.slice(t),
    "slice-keywords": lambda t: aten.slice(t, dim=-1, start=4),
    "slice-none": lambda t: aten.slice(t, 0, None, 8, 1),
    "narrow": lambda t: t.narrow(0, 4, 8),
    "narrow-negative-dim": lambda t: t.narrow(-1, 4, 4),
    "split": lambda t: t.split(8)[1],
    "split-last-is-smaller": lambda t: t.split(8)[-1],
    "split-columns": lambda t: t.split(4, dim=-1)[1],
    "split-sizes": lambda t: t.split([4, 8, 0])[1],
    "split-sizes-keyword": lambda t: t.split(split_size=[4, 8], dim=0)[0],
    "chunk": lambda t: t.chunk(3)[2],
    "chunk-columns": lambda t: t.chunk(2, dim=1)[0],
    "tensor_split": lambda t: torch.tensor_split(t, 3)[1],
}


@every_quantizer
@pytest.mark.parametrize("op", PIECES.values(), ids=PIECES)
def test_aligned_piece_stays_quantized_and_is_the_piece_of_the_values(
    quantizer: Any, op: Any
) -> None:
    q = quantized(12, 8, quantizer=quantizer)
    out, expected = op(q), op(q.dequantize())
    assert_kept(out, q, expected)
    assert codes_of(out) == codes_of(out.clone())


@every_quantizer
def test_pieces_together_are_the_whole(quantizer: Any) -> None:
    q = quantized(12, 8, quantizer=quantizer)
    for pieces, dim in ((q.split(4), 0), (q.chunk(2, -1), 1), (q.split([8, 4]), 0)):
        assert torch.equal(torch.cat([p.dequantize() for p in pieces], dim), q.dequantize())


@pytest.mark.parametrize(
    ("quantizer", "op", "message"),
    [
        pytest.param(
            Q,
            lambda q: q[3:8],
            "toy: a slice of axis 0 must begin and end on a columnwise block of 4, "
            "got [3:8] of shape (12, 8)",
            id="rows",
        ),
        pytest.param(
            ROW,
            lambda q: q[:, 2:6],
            "toy: a slice of axis 1 must begin and end on a rowwise block of 4, "
            "got [2:6] of shape (12, 8)",
            id="columns",
        ),
        pytest.param(
            COLUMN,
            lambda q: q.split(5),
            "toy: a slice of axis 0 must begin and end on a columnwise block of 4, "
            "got [0:5] of shape (12, 8)",
            id="split",
        ),
        pytest.param(
            Q,
            lambda q: q[0],
            "toy: a slice of axis 0 must begin and end on a columnwise block of 4, "
            "got [0:1] of shape (12, 8)",
            id="select",
        ),
        pytest.param(
            Q,
            lambda q: q[::2],
            "toy: a slice must have step 1, got 2 on axis 0; call .dequantize() first",
            id="step",
        ),
        pytest.param(
            Q,
            lambda q: q[0:12:3],
            "toy: a slice must have step 1, got 3 on axis 0; call .dequantize() first",
            id="step-with-whole-range",
        ),
        pytest.param(
            Q,
            lambda q: q.split([4, 4]),
            "split: split_sizes [4, 4] must add up to 12, the size of axis 0",
            id="split-sizes",
        ),
        pytest.param(
            Q,
            lambda q: q.split([16, -4]),
            "split: split_sizes [16, -4] must not be negative",
            id="split-sizes-negative",
        ),
        pytest.param(
            Q,
            lambda q: q.split(-4),
            "split: split_size must be positive, got -4",
            id="split-negative",
        ),
        pytest.param(
            Q, lambda q: q.split(0), "split: split_size must be positive, got 0", id="split-zero"
        ),
    ],
)
def test_piece_that_would_cut_a_block_is_refused(quantizer: Any, op: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        op(quantized(12, 8, quantizer=quantizer))


@pytest.mark.parametrize("quantizer", [ROW, ROW.replace(block=0)], ids=["blocks", "whole-rows"])
def test_row_is_selected_where_no_plane_has_blocks_of_rows(quantizer: Any) -> None:
    q = quantized(5, 8, quantizer=quantizer)
    for index in (0, 4, -1, -5):
        assert_kept(q[index], q, q.dequantize()[index])
    assert_kept(q.view(1, 5, 8).select(1, 2), q, q.dequantize().view(1, 5, 8).select(1, 2))
    for out, row in zip(q.unbind(), q.dequantize(), strict=True):
        assert_kept(out, q, row)
    assert [len(r) for r in q] == [8] * 5  # iteration


@pytest.mark.parametrize("index", [5, -6])
def test_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        quantized(5, 8, quantizer=ROW)[index]
    message = f"select: index {index} is out of range for axis 0 of size 5"
    with pytest.raises(IndexError, match=f"^{message}$"):
        quantized(5, 8, quantizer=ROW).select(0, index)


def test_selecting_a_column_falls_back() -> None:
    q = quantized(8, 8)
    with fallback("allow"):
        assert torch.equal(q[:, 3], q.dequantize()[:, 3])
        for out, column in zip(q.unbind(1), q.dequantize().t(), strict=True):
            assert torch.equal(out, column)


BEYOND = {
    "slice": lambda t: aten.slice(t, 2, 0, 4),
    "select": lambda t: t.select(-3, 0),
    "split": lambda t: t.split(4, 2),
    "split-sizes": lambda t: t.split([4, 4], -3),
    "unbind": lambda t: t.unbind(2),
    "cat": lambda t: torch.cat([t, t], 2),
    "unsqueeze": lambda t: t.unsqueeze(4),
    "unsqueeze-negative": lambda t: t.unsqueeze(-4),
    "squeeze": lambda t: t.squeeze(2),
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(0, 2),
    "narrow": lambda t: t.narrow(2, 0, 4),
}


@pytest.mark.parametrize("op", BEYOND.values(), ids=BEYOND)
def test_axis_out_of_range_is_an_index_error_as_for_a_plain_tensor(op: Any) -> None:
    q = quantized(8, 8)
    for t in (q.dequantize(), q):
        with pytest.raises(
            IndexError,
            match=r"Dimension out of range|: dim -?\d is out of range for a tensor of \d axes$",
        ):
            op(t)


@pytest.mark.parametrize("dims", [(0, 0), (0,), (0, 1, 2)])
def test_permutation_must_name_every_axis_once(dims: tuple[int, ...]) -> None:
    q = quantized(8, 8)
    for t in (q.dequantize(), q):
        with pytest.raises((RuntimeError, ShapeError), match="permute"):
            t.permute(dims)


def test_0d_tensor_has_one_axis_to_squeeze_and_none_to_slice() -> None:
    q = quantized(quantizer=ROW.replace(block=0))
    assert_kept(q.unsqueeze(0), q, q.dequantize().unsqueeze(0))
    assert_kept(q.squeeze(), q, q.dequantize())
    assert_kept(q.unsqueeze(0).squeeze(-1), q, q.dequantize())
    for op in (lambda t: aten.slice(t), lambda t: t.select(0, 0), lambda t: t.split(1)):
        for t in (q.dequantize(), q):
            with pytest.raises((IndexError, RuntimeError)):
                op(t)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda q: q[4:8], id="slice"),
        pytest.param(lambda q: q.split(4)[0], id="split"),
        pytest.param(lambda q: q.t(), id="transpose"),
        pytest.param(lambda q: q[4:8].detach(), id="alias-of-a-slice"),
        pytest.param(lambda q: q[4:12].view(2, 4, 8), id="view-of-a-slice"),
        pytest.param(lambda q: q[4:12][4:8], id="slice-of-a-slice"),
    ],
)
def test_write_into_a_piece_is_refused_because_it_would_not_reach_the_whole(op: Any) -> None:
    q = quantized(12, 8)
    piece = op(q)
    before = codes_of(q), codes_of(piece)
    message = (
        r"^toy: the tensor of shape \(.*\) is a slice or transpose whose buffers are copies, so"
    )
    for write in (
        lambda: piece.copy_(torch.zeros(())),
        lambda: piece.quantize_(torch.zeros(piece.shape)),
        lambda: Q.quantize_into(torch.zeros(piece.shape), piece),
    ):
        with pytest.raises(UsageError, match=message):
            write()
    with fallback("allow"), pytest.raises(UsageError, match=message):
        piece.add_(1.0)
    assert (codes_of(q), codes_of(piece)) == before
    piece.clone().copy_(torch.zeros(()))


def test_setting_a_slice_is_refused() -> None:
    q = quantized(12, 8)
    with fallback("allow"), pytest.raises(UsageError, match="so a write would not reach the whole"):
        q[4:8] = 0.0


# -- cat ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "dim"),
    [
        pytest.param(Q, 0, id="both"),
        pytest.param(Q, -1, id="both-last"),
        pytest.param(ROW, 0, id="row"),
        pytest.param(ROW, 1, id="row-last"),
        pytest.param(COLUMN, -2, id="column"),
        pytest.param(QUANTIZERS["gemm"], 1, id="gemm-last"),
        pytest.param(QUANTIZERS["whole-rows"], 0, id="whole-rows"),
    ],
)
def test_cat_of_whole_blocks_stays_quantized(quantizer: Any, dim: int) -> None:
    parts = [quantizer.quantize(values(8, 8, seed=s) * 10.0**s) for s in range(3)]
    out = torch.cat(parts, dim)
    assert_kept(out, parts[0], torch.cat([p.dequantize() for p in parts], dim))
    assert out.quantizer == quantizer


def test_cat_of_one_is_a_copy() -> None:
    q = quantized(8, 8)
    out = torch.cat([q])
    assert codes_of(out) == codes_of(q)
    assert out.rowwise_data.data_ptr() != q.rowwise_data.data_ptr()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda q: [q, values(4, 8)], id="plain-last"),
        pytest.param(lambda q: [values(4, 8), q], id="plain-first"),
        pytest.param(lambda q: [values(4, 8), values(4, 8), q], id="two-plain-first"),
        pytest.param(lambda q: [q, quantized(4, 8, quantizer=ROW)], id="other-usage"),
        pytest.param(lambda q: [q, q.to(torch.float16)], id="other-dtype"),
        pytest.param(lambda q: [q, torch.empty(0)], id="legacy-empty"),
    ],
)
def test_cat_of_unlike_tensors_falls_back(parts: Any) -> None:
    given = parts(quantized(8, 8))
    plain = [t.dequantize() if isinstance(t, QuantizedStorage) else t for t in given]
    with fallback("allow"):
        out = torch.cat(given)
    assert type(out) is Tensor
    assert torch.equal(out, torch.cat(plain))


def test_cat_where_scales_would_have_to_be_shared_falls_back() -> None:
    # whole-row scales along the rows: keeping the first tensor's would be silently wrong
    q = ROW.replace(block=0).quantize(values(8, 8))
    with fallback("allow"):
        out = torch.cat([q, q], 1)
    assert type(out) is Tensor


def test_cat_of_other_shapes_is_refused() -> None:
    message = "cat: shapes must agree on every axis but 0, got [(8, 8), (8, 4)]"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        torch.cat([quantized(8, 8), quantized(8, 4)])
