# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from te_toy import ToyQuantizer, ToyTensor, codes_of, proto, values
from torch import Tensor

from te_proto import QuantizedStorage, fallback, to_tensor_proto
from te_proto._ops import handlers
from te_proto.errors import DeviceError, DtypeError, ShapeError, TeError, UsageError

aten = torch.ops.aten
Q = ToyQuantizer()
ROW, COLUMN = Q.with_usage(columnwise=False), Q.with_usage(rowwise=False)
QUANTIZERS = {
    "both": Q,
    "row": ROW,
    "column": COLUMN,
    "whole-rows": ROW.replace(block=0),
    "gemm": Q.replace(optimize_for_gemm=True),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def quantized(*shape: int, quantizer: Any = Q, **kwargs: Any) -> Any:
    return quantizer.quantize(values(*shape, **kwargs))


def pointers(q: QuantizedStorage) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in q.inner_tensors().items()}


def assert_kept(out: Any, source: Any, expected: Tensor) -> None:
    """``out`` is quantized, like ``source``, and each of its planes stands for ``expected``."""
    assert type(out) is type(source)
    assert out.dtype == source.dtype
    assert out.shape == expected.shape
    assert out.stride() == torch.empty(expected.shape).stride()
    assert torch.equal(out.dequantize(), expected)
    for usage in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        if all(getattr(out.quantizer, n) >= on for n, on in usage.items()):
            assert_plane(out.with_usage(**usage), expected)


def assert_plane(plane: Any, expected: Tensor) -> None:
    # both planes of a toy stand for about the same values, so a plane left stale would show
    assert plane.dequantize().shape == expected.shape
    if expected.numel():
        limit = 3 * expected.abs().max() / 127
        assert (plane.dequantize() - expected).abs().max() <= limit


# -- the table is whole -------------------------------------------------------------------------

COVERED = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.clone.default,
    aten._pin_memory.default,
    aten.is_pinned.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view.dtype,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.cat.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.record_stream.default,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
}


def test_table_holds_the_ops_that_this_file_tests() -> None:
    assert set(handlers()) == COVERED


# -- the same tensor again ----------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda q: q.detach(), id="detach"),
        pytest.param(aten.alias.default, id="alias"),
        pytest.param(aten.lift_fresh.default, id="lift_fresh"),
        pytest.param(lambda q: q.expand_as(q), id="expand_as-itself"),
        pytest.param(lambda q: q.expand(-1, -1), id="expand-1"),
        pytest.param(lambda q: q.as_strided(q.shape, q.stride()), id="as_strided"),
        pytest.param(lambda q: q.view(q.shape), id="view"),
        pytest.param(lambda q: q[:], id="whole-slice"),
        pytest.param(lambda q: q[-100:100], id="slice-beyond-ends"),
        pytest.param(lambda q: q.narrow(1, 0, 8), id="narrow-whole"),
        pytest.param(lambda q: q.transpose(0, 0), id="transpose-one-axis"),
        pytest.param(lambda q: q.permute(0, -1), id="permute-identity"),
        pytest.param(lambda q: q.contiguous(), id="contiguous"),
        pytest.param(lambda q: q.data, id="data"),
        pytest.param(lambda q: q.to("cpu"), id="to-nothing"),
    ],
)
def test_op_that_changes_nothing_shares_the_buffers(quantizer: Any, op: Any) -> None:
    q = quantized(8, 8, quantizer=quantizer)
    out = op(q)
    assert pointers(out) == pointers(q)
    assert to_tensor_proto(out) == to_tensor_proto(q)
    out.copy_(values(8, 8, seed=1))  # a write reaches the tensor it was taken from
    assert codes_of(q) == codes_of(quantized(8, 8, quantizer=quantizer, seed=1))


@every_quantizer
def test_clone_has_buffers_of_its_own_scales_included(quantizer: Any) -> None:
    q = quantized(8, 8, quantizer=quantizer)
    out = q.clone()
    assert to_tensor_proto(out) == to_tensor_proto(q)
    assert codes_of(out) == codes_of(q)
    assert not set(pointers(out).values()) & set(pointers(q).values())


# -- to -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda q: q.to("meta"), id="positional"),
        pytest.param(lambda q: q.to(device="meta"), id="keyword"),
        pytest.param(lambda q: q.to(torch.device("meta"), non_blocking=True), id="non_blocking"),
        pytest.param(lambda q: q.to(torch.empty(0, device="meta")), id="other"),
    ],
)
def test_to_device_moves_every_inner_tensor(move: Any) -> None:
    out = move(quantized(8, 8))
    assert type(out) is ToyTensor
    assert {str(t.device) for t in (out, *out.inner_tensors().values())} == {"meta"}
    assert out.quantizer == Q


def test_to_with_copy_copies() -> None:
    q = quantized(8, 8)
    out = q.to("cpu", copy=True)
    assert codes_of(out) == codes_of(q)
    assert not set(pointers(out).values()) & set(pointers(q).values())
    assert q.cpu() is q


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_to_dtype_changes_only_the_nominal_dtype(dtype: torch.dtype) -> None:
    q = quantized(8, 8)
    for out in (
        q.to(dtype),
        q.to(dtype=dtype),
        q.to("cpu", dtype),
        q.to(torch.empty(0, dtype=dtype)),
    ):
        assert type(out) is ToyTensor
        assert out.dtype == out.dequantize().dtype == dtype
        assert out.quantizer == q.quantizer
        assert codes_of(out) == codes_of(q)


def test_to_a_dtype_that_no_quantized_tensor_has_falls_back() -> None:
    q = quantized(8, 8)
    with fallback("allow"):
        out = q.to(torch.float64)
    assert type(out) is Tensor
    assert torch.equal(out, q.dequantize().double())


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_float_half_and_bfloat16_dequantize(method: str, dtype: torch.dtype) -> None:
    q = quantized(8, 8)
    out = getattr(q, method)()
    assert type(out) is Tensor
    assert out.dtype == dtype
    assert torch.equal(out, q.dequantize(dtype))


# -- copy_ --------------------------------------------------------------------------------------


@every_quantizer
def test_copy_between_equal_layouts_copies_the_bytes(quantizer: Any) -> None:
    dst, src = (quantized(8, 8, quantizer=quantizer, seed=s) for s in (1, 2))
    at = pointers(dst)
    assert dst.copy_(src) is dst
    assert pointers(dst) == at
    assert codes_of(dst) == codes_of(src)
    assert not set(at.values()) & set(pointers(src).values())


def test_copy_from_another_nominal_dtype_copies_the_bytes() -> None:
    dst, src = quantized(8, 8, seed=1), quantized(8, 8, seed=2).to(torch.float16)
    dst.copy_(src)
    assert codes_of(dst) == codes_of(src)
    assert dst.dtype == torch.float32


def test_copy_takes_the_planes_it_holds_from_a_tensor_that_holds_more() -> None:
    dst, src = quantized(8, 8, quantizer=ROW, seed=1), quantized(8, 8, seed=2)
    dst.copy_(src)
    assert codes_of(dst) == {
        n: t.tolist() for n, t in src.inner_tensors().items() if n[:3] == "row"
    }
    assert dst.quantizer == ROW


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: quantized(8, 8, quantizer=ROW, seed=2), id="fewer-planes"),
        pytest.param(
            lambda: quantized(8, 8, quantizer=Q.replace(block=0), seed=2), id="other-block"
        ),
        pytest.param(
            lambda: quantized(8, 8, quantizer=Q.replace(optimize_for_gemm=True), seed=2), id="gemm"
        ),
        pytest.param(lambda: values(8, 8, seed=2), id="plain"),
        pytest.param(lambda: values(8, 8, seed=2).double(), id="float64"),
        pytest.param(lambda: values(8, 8, seed=2).bfloat16(), id="bfloat16"),
        pytest.param(lambda: values(8, seed=2), id="broadcast"),
        pytest.param(lambda: values(8, 8, seed=2).t(), id="transposed"),
    ],
)
def test_copy_of_anything_else_requantizes_every_plane_in_place(source: Any) -> None:
    dst, src = quantized(8, 8, seed=1), source()
    at = pointers(dst)
    dst.copy_(src)
    plain = src.dequantize() if isinstance(src, QuantizedStorage) else src
    assert pointers(dst) == at
    assert codes_of(dst) == codes_of(Q.quantize(plain.float().expand(8, 8)))
    assert (dst.dtype, dst.quantizer) == (torch.float32, Q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_copy_into_a_plain_tensor_dequantizes(dtype: torch.dtype) -> None:
    q = quantized(8, 8)
    dst = torch.empty(8, 8, dtype=dtype)
    assert dst.copy_(q) is dst
    assert type(dst) is Tensor
    assert torch.equal(dst, q.dequantize().to(dtype))


def test_copy_of_another_shape_is_refused() -> None:
    dst = quantized(8, 8)
    before = codes_of(dst)
    with pytest.raises(RuntimeError, match="expand"):
        dst.copy_(values(4, 8))
    assert codes_of(dst) == before


def test_copy_into_a_missing_plane_is_no_silent_loss() -> None:
    dst = quantized(8, 8, seed=1)
    dst.update_usage(columnwise=False)
    dst.copy_(quantized(8, 8, quantizer=COLUMN, seed=2))
    assert codes_of(dst) == codes_of(ROW.quantize(quantized(8, 8, quantizer=COLUMN, seed=2)))


# -- new tensors --------------------------------------------------------------------------------


@every_quantizer
def test_empty_like_and_new_empty_are_quantized(quantizer: Any) -> None:
    q = quantized(8, 8, quantizer=quantizer)
    assert to_tensor_proto(torch.empty_like(q)) == to_tensor_proto(q)
    half = torch.empty_like(q, dtype=torch.float16, device="meta")
    assert to_tensor_proto(half) == proto((8, 8), quantizer, dtype=torch.float16, device="meta")
    assert to_tensor_proto(q.new_empty((4, 12))) == proto((4, 12), quantizer)
    assert to_tensor_proto(q.new_empty(12, 4, device="meta")) == proto(
        (12, 4), quantizer, device="meta"
    )


def test_empty_like_has_the_planes_that_are_held_now() -> None:
    q = quantized(8, 8)
    q.update_usage(rowwise=False)
    assert list(torch.empty_like(q).inner_tensors()) == ["columnwise_data", "columnwise_scale_inv"]


@pytest.mark.usefixtures("poisoned")
@every_quantizer
def test_new_zeros_is_quantized_zero(quantizer: Any) -> None:
    out = quantized(8, 8, quantizer=quantizer).new_zeros((4, 12))
    assert codes_of(out) == codes_of(quantizer.quantize(torch.zeros(4, 12)))
    assert to_tensor_proto(out) == proto((4, 12), quantizer)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda q: q.new_zeros((5, 3)), torch.zeros(5, 3), id="shape"),
        pytest.param(
            lambda q: q.new_zeros((8, 8), dtype=torch.int64), torch.zeros(8, 8).long(), id="dtype"
        ),
    ],
)
def test_new_tensor_that_the_format_cannot_hold_is_plain(make: Any, expected: Tensor) -> None:
    with fallback("allow"):
        out = make(quantized(8, 8))
    assert type(out) is Tensor
    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        pytest.param(torch.zeros_like, 0.0, id="zeros_like"),
        pytest.param(torch.ones_like, 1.0, id="ones_like"),
        pytest.param(lambda q, **kw: torch.full_like(q, 3.0, **kw), 3.0, id="full_like"),
        pytest.param(torch.rand_like, None, id="rand_like"),
        pytest.param(torch.randn_like, None, id="randn_like"),
    ],
)
def test_filled_tensor_like_a_quantized_one_is_plain(make: Any, value: float | None) -> None:
    q = quantized(8, 12, dtype=torch.bfloat16)
    out = make(q)
    assert type(out) is Tensor
    assert (out.shape, out.dtype, out.stride()) == (q.shape, torch.bfloat16, (12, 1))
    assert make(q, dtype=torch.float32).dtype == torch.float32
    assert make(q, device="meta").device.type == "meta"
    if value is None:
        assert out.unique().numel() > 20
    else:
        assert out.unique().tolist() == [value]


# -- views --------------------------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda t: t.view(2, 4, 8), id="view"),
        pytest.param(lambda t: t.view(-1, 2, 8), id="view-1"),
        pytest.param(lambda t: aten._unsafe_view(t, [4, 2, 8]), id="_unsafe_view"),
        pytest.param(lambda t: t.reshape(4, 2, 8), id="reshape"),
        pytest.param(lambda t: t.unflatten(0, (4, 2)), id="unflatten"),
        pytest.param(lambda t: t.view(2, 4, 8).flatten(0, 1), id="flatten"),
        pytest.param(lambda t: t.unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda t: t.unsqueeze(-2), id="unsqueeze-negative"),
        pytest.param(lambda t: t.unsqueeze(0).squeeze(), id="squeeze"),
        pytest.param(lambda t: t.unsqueeze(0).squeeze(0), id="squeeze-dim"),
        pytest.param(lambda t: t.unsqueeze(1).squeeze(-2), id="squeeze-negative"),
        pytest.param(lambda t: t.unsqueeze(0).unsqueeze(0).squeeze((0, 1)), id="squeeze-dims"),
        pytest.param(lambda t: t.unsqueeze(0).squeeze(1), id="squeeze-a-larger-axis"),
    ],
)
def test_view_that_keeps_the_last_axis_stays_quantized_and_shares_memory(
    quantizer: Any, op: Any
) -> None:
    q = quantized(8, 8, quantizer=quantizer)
    out = op(q)
    assert_kept(out, q, op(q.dequantize()))
    assert pointers(out) == pointers(q)
    out.copy_(torch.zeros(()))
    assert torch.equal(q.dequantize(), torch.zeros(8, 8))


def test_view_in_inference_mode_stays_quantized() -> None:
    # reshape is an op of its own there
    with torch.inference_mode():
        q = quantized(8, 8)
        assert_kept(q.reshape(2, 4, 8), q, q.dequantize().reshape(2, 4, 8))


def test_view_across_whole_blocks_stays_quantized() -> None:
    q = quantized(8, 8, quantizer=ROW)
    assert_kept(q.view(4, 16), q, q.dequantize().view(4, 16))
    assert_kept(q.reshape(-1), q, q.dequantize().reshape(-1))


@pytest.mark.parametrize(
    ("quantizer", "shape"), [(ROW, (32, 2)), (Q, (4, 16)), (ROW.replace(block=0), (4, 16))]
)
def test_view_that_would_cut_a_block_falls_back(quantizer: Any, shape: tuple[int, int]) -> None:
    q = quantized(8, 8, quantizer=quantizer)
    with pytest.raises(TeError, match=r"^toy: aten.view.default has no quantized form"):
        q.view(shape)
    with fallback("allow"):
        assert torch.equal(q.view(shape), q.dequantize().view(shape))


def test_view_of_another_size_is_refused() -> None:
    q = quantized(8, 8)
    message = "view: shape (3, -1) has not the 64 elements of the tensor"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        q.view(3, -1)


def test_bits_cannot_be_viewed_as_another_dtype() -> None:
    message = (
        "toy: the bits of a quantized tensor cannot be viewed as torch.int32; use an inner tensor "
        "(rowwise_data, rowwise_scale_inv)"
    )
    with pytest.raises(DtypeError, match=f"^{re.escape(message)}$"):
        quantized(8, 8, quantizer=ROW).view(torch.int32)


def test_expand_to_another_shape_falls_back() -> None:
    q = quantized(4, 8)
    with fallback("allow"):
        assert torch.equal(q.expand(3, 4, 8), q.dequantize().expand(3, 4, 8))


@pytest.mark.parametrize("arguments", [((4, 8), (8, 1)), ((8, 8), (1, 8)), ((8, 8), (8, 1), 8)])
def test_as_strided_to_another_layout_is_refused(arguments: Any) -> None:
    message = r"^toy: as_strided must keep shape \(8, 8\) and strides \(8, 1\), got "
    with pytest.raises(ShapeError, match=message):
        quantized(8, 8).as_strided(*arguments)


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
    [(Q, 0), (Q, -1), (ROW, 0), (ROW, 1), (COLUMN, -2), (QUANTIZERS["gemm"], 1)]
    + [(ROW.replace(block=0), 0)],
    ids=["both", "both-last", "row", "row-last", "column", "gemm-last", "whole-rows"],
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


# -- transpose ----------------------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda t: t.t(), id="t"),
        pytest.param(lambda t: t.T, id="T"),
        pytest.param(lambda t: t.mT, id="mT"),
        pytest.param(lambda t: t.transpose(0, 1), id="transpose"),
        pytest.param(lambda t: t.transpose(-1, 0), id="transpose-negative"),
        pytest.param(lambda t: t.permute(1, 0), id="permute"),
        pytest.param(lambda t: t.permute(-1, -2), id="permute-negative"),
    ],
)
def test_transpose_swaps_the_planes_and_is_exact_and_dense(quantizer: Any, op: Any) -> None:
    q = quantized(12, 8, quantizer=quantizer)
    out = op(q)
    assert type(out) is ToyTensor
    assert out.stride() == (12, 1)
    usage = {"rowwise": quantizer.columnwise, "columnwise": quantizer.rowwise}
    assert out.quantizer == quantizer.with_usage(**usage)
    assert codes_of(op(out)) == codes_of(q)  # and back
    # the columnwise plane of the transpose is the image of the rowwise one
    if quantizer.rowwise:
        plane = out.with_usage(rowwise=False).dequantize()
        assert torch.equal(plane, q.with_usage(columnwise=False).dequantize().t())
    if quantizer.columnwise:
        plane = out.with_usage(columnwise=False).dequantize()
        assert torch.equal(plane, q.with_usage(rowwise=False).dequantize().t())


def test_transpose_of_more_axes_falls_back() -> None:
    q = quantized(2, 4, 8)
    with fallback("allow"):
        assert torch.equal(q.transpose(0, 1), q.dequantize().transpose(0, 1))
        assert torch.equal(q.permute(2, 0, 1), q.dequantize().permute(2, 0, 1))


# -- memory -------------------------------------------------------------------------------------


def test_pinning_reaches_the_inner_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    q = quantized(8, 8)
    assert q.is_pinned() is False
    # pinning needs an accelerator; what is ours is that each inner tensor is asked
    table, asked = handlers(), []

    class Pinnable:
        def __init__(self, name: str) -> None:
            self.name = name

        def pin_memory(self) -> Tensor:
            asked.append(self.name)
            return getattr(q, self.name)

        def is_pinned(self) -> bool:
            return self.name != "columnwise_scale_inv"

    inner = {n: Pinnable(n) for n in q.inner_tensors()}
    monkeypatch.setattr(ToyTensor, "inner_tensors", lambda self: inner)
    table[aten._pin_memory.default](aten._pin_memory.default, (q,), {})
    assert asked == list(inner)
    assert table[aten.is_pinned.default](aten.is_pinned.default, (q,), {}) is False  # one is not


def test_record_stream_reaches_every_inner_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    q, recorded = quantized(8, 8), []

    class Streamed:
        def record_stream(self, stream: str) -> None:
            recorded.append(stream)

    monkeypatch.setattr(ToyTensor, "inner_tensors", lambda self: {n: Streamed() for n in "abcd"})
    handlers()[aten.record_stream.default](aten.record_stream.default, (q, "a stream"), {})
    assert recorded == ["a stream"] * 4


@pytest.mark.parametrize("source", [torch.zeros(4), torch.zeros(4).untyped_storage()])
def test_set_is_refused(source: Any) -> None:
    message = "set_: a quantized tensor has no storage of its own; assign .data, or copy_ into it"
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        quantized(8, 8).set_(source)


def test_untyped_storage_is_empty_and_nbytes_is_what_is_held() -> None:
    q = quantized(8, 8)
    assert q.untyped_storage().nbytes() == 0
    assert q.untyped_storage().device == q.device
    assert q.nbytes == 2 * 64 + 2 * 16 * 4
