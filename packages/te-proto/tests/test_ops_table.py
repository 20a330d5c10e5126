# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from te_toy import QUANTIZERS, ToyTensor, codes_of, pointers, proto, quantized, values
from torch import Tensor

from te_proto import QuantizedStorage, fallback, to_tensor_proto
from te_proto._ops import handlers
from te_proto.errors import DeviceError

aten = torch.ops.aten
Q, ROW, COLUMN = (QUANTIZERS[name] for name in ("both", "row", "column"))
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


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
