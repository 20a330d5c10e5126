# SPDX-License-Identifier: Apache-2.0
"""Views and transposition: exact, or through the visible fallback.

The expectation is always the same: what quantizing the view of ``x`` gives, byte for byte.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_proto.errors import FallbackError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """An op that is claimed exact must not dequantize on the way."""
    with te_proto.fallback("error"):
        yield


@pytest.fixture
def quantizers(options: Options) -> list[Float8BlockQuantizer]:
    return [Float8BlockQuantizer(**fields) for fields in options]


def values(shape: tuple[int, ...]) -> Tensor:
    return hostile(shape, torch.float32, block=(1, 128))


# -- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.view(64, 3, 130), id="rows-split"),
        pytest.param(lambda t: t.view(2, 2, 48, 130), id="rows-split-twice"),
        pytest.param(lambda t: t.view(2, 96, 130).view(-1, 130), id="rows-merged"),
        pytest.param(lambda t: t.reshape(6, 32, 130), id="reshape"),
        pytest.param(lambda t: t.unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda t: t.unsqueeze(1), id="unsqueeze-middle"),
        pytest.param(lambda t: t.unsqueeze(0).squeeze(0), id="squeeze"),
        pytest.param(lambda t: t.flatten(0, 0), id="flatten"),
        pytest.param(lambda t: t.view(t.shape), id="same"),
    ],
)
def test_view_that_keeps_the_matrix_shares_the_memory(
    view: Callable[[Tensor], Any],
    quantizers: list[Float8BlockQuantizer],
    assert_same_planes: Same,
) -> None:
    x = values((192, 130))
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        viewed = view(q)
        assert viewed.shape == view(x).shape
        assert_same_planes(viewed, quantizer.quantize(view(x)))
        viewed.copy_(torch.zeros(viewed.shape))  # a view: the write reaches the whole
        assert not q.dequantize().any()


def test_single_element_is_viewed_as_any_shape_of_one(
    quantizers: list[Float8BlockQuantizer], assert_same_planes: Same
) -> None:
    x = torch.tensor([[-3.0]])
    for quantizer in quantizers:
        for shape in ((), (1,), (1, 1, 1)):
            viewed = quantizer.quantize(x).view(shape)
            assert_same_planes(viewed, quantizer.quantize(x.view(shape)))


@pytest.mark.parametrize("shape", [(-1, 128), (96, 512), (3, 2, 8192), (49152,)], ids=str)
def test_reshape_that_moves_whole_blocks_between_rows_is_exact(
    shape: tuple[int, ...], assert_same_planes: Same
) -> None:
    x = values((192, 256))
    quantizer = Float8BlockQuantizer(columnwise=False, block_scaling_dim=1)
    reshaped = quantizer.quantize(x).reshape(shape)
    assert_same_planes(reshaped, quantizer.quantize(x.reshape(shape)))
    assert_same_bits(reshaped.dequantize(), quantizer.quantize(x).dequantize().reshape(shape))
    with pytest.raises(UsageError, match="a write would not reach the whole"):
        reshaped.copy_(torch.zeros(reshaped.shape))  # its scales moved, so they are copies


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        pytest.param({"columnwise": False, "block_scaling_dim": 1}, (1024, 48), id="k-ragged"),
        pytest.param({"block_scaling_dim": 1}, (384, 128), id="column-plane-held"),
        pytest.param({"rowwise": False, "block_scaling_dim": 1}, (384, 128), id="column-plane"),
        pytest.param({"columnwise": False}, (384, 128), id="2d"),
    ],
)
def test_view_that_would_cut_blocks_falls_back_and_says_so(
    fields: dict[str, Any], shape: tuple[int, int]
) -> None:
    q = Float8BlockQuantizer(**fields).quantize(values((192, 256)))
    message = (
        "fp8_block: aten.view.default has no quantized form and dequantizes its "
        "Float8BlockwiseTensor"
    )
    with pytest.raises(FallbackError, match=message):
        q.view(shape)
    with te_proto.fallback("allow"):
        plain = q.view(shape)
    assert type(plain) is torch.Tensor
    assert_same_bits(plain, q.dequantize().view(shape))


def test_view_of_an_empty_tensor_has_the_scales_of_its_shape(
    quantizers: list[Float8BlockQuantizer], assert_same_planes: Same
) -> None:
    for quantizer in quantizers:
        q = quantizer.quantize(torch.empty(2, 0, 130))
        assert_same_planes(q.view(0, 130), quantizer.quantize(torch.empty(0, 130)))
    quantizer = Float8BlockQuantizer(columnwise=False, block_scaling_dim=1)
    q = quantizer.quantize(torch.empty(5, 0))
    assert_same_planes(q.view(9, 0), quantizer.quantize(torch.empty(9, 0)))


def test_fallback_warns_with_op_format_and_bytes() -> None:
    q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(32, 64))
    message = (
        "fp8_block: aten.cos.default has no quantized form and dequantizes its "
        "Float8BlockwiseTensor: 2064 bytes become 8192 of float32; call .dequantize() first, or "
        "te_proto.fallback('allow')"
    )
    with te_proto.fallback("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = torch.cos(q)
    assert [str(w.message) for w in caught] == [message]
    assert_same_bits(out, torch.cos(torch.ones(32, 64)))


# -- transposition --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(160, 288), (1, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "transpose",
    [
        pytest.param(lambda t: t.t(), id="t"),
        pytest.param(lambda t: t.T, id="T"),
        pytest.param(lambda t: t.transpose(-1, 0), id="transpose"),
        pytest.param(lambda t: t.permute(1, 0), id="permute"),
    ],
)
def test_transpose_swaps_the_planes_as_they_lie(
    shape: tuple[int, int],
    transpose: Callable[[Any], Any],
    quantizers: list[Float8BlockQuantizer],
    assert_same_planes: Same,
) -> None:
    x = values(shape)
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        swapped = quantizer.with_usage(rowwise=quantizer.columnwise, columnwise=quantizer.rowwise)
        turned = transpose(q)
        assert turned.quantizer == swapped
        assert turned.stride() == (shape[0], 1)  # dense: what its prototype says
        assert_same_planes(turned, swapped.quantize(x.t()))
        assert_same_planes(transpose(turned), q)
        if quantizer.rowwise:
            assert turned.columnwise_data is q.rowwise_data
        if quantizer.columnwise:
            assert turned.rowwise_scale_inv is q.columnwise_scale_inv


def test_write_to_a_transpose_reaches_the_whole(
    quantizers: list[Float8BlockQuantizer], assert_same_planes: Same
) -> None:
    x = values((130, 300))
    for quantizer in quantizers:
        q = quantizer.quantize(torch.ones(130, 300))
        q.t().copy_(x.t())
        assert_same_planes(q, quantizer.quantize(x))


def test_single_plane_is_read_transposed_and_not_as_it_lies() -> None:
    x = torch.arange(32 * 64.0).reshape(32, 64).div(128).floor()  # row pairs hold 0 to 15
    for usage in ({"columnwise": False}, {"rowwise": False}):
        for dim in (1, 2):
            q = Float8BlockQuantizer(block_scaling_dim=dim, **usage).quantize(x)
            assert torch.equal(q.dequantize(), x)
            assert torch.equal(q.t().dequantize(), x.t())
            assert q.t().shape == (64, 32)


def test_transpose_of_more_axes_falls_back_and_says_so() -> None:
    q = Float8BlockQuantizer().quantize(values((2, 32, 64)))
    with pytest.raises(FallbackError, match=r"aten\.transpose\.int has no quantized form"):
        q.transpose(1, 2)
    with te_proto.fallback("allow"):
        assert_same_bits(q.transpose(1, 2), q.dequantize().transpose(1, 2))
