# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from te_toy import QUANTIZERS, ToyTensor, assert_kept, codes_of, pointers, quantized

from te_proto import fallback
from te_proto.errors import DtypeError, ShapeError, TeError

aten = torch.ops.aten
Q, ROW = (QUANTIZERS[name] for name in ("both", "row"))
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


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
