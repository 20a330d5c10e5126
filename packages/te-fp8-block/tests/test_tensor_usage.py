# SPDX-License-Identifier: Apache-2.0
"""Planes dropped and made: the bytes of quantizing with that usage, or a named error."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_proto.errors import UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

PLANES = {
    "rowwise": ["rowwise_data", "rowwise_scale_inv"],
    "columnwise": ["columnwise_data", "columnwise_scale_inv"],
}
SHAPES = [(), (1,), (311,), (130, 300), (2, 5, 130), (0, 130), (130, 0), (640, 3)]
in_place = pytest.mark.parametrize("in_place", [False, True], ids=["with_usage", "update_usage"])
internal = pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


def ask(q: Any, in_place: bool, **usage: bool) -> Any:
    if in_place:
        assert q.update_usage(**usage) is None
        return q
    return q.with_usage(**usage)


@pytest.mark.parametrize("dropped", PLANES)
@pytest.mark.parametrize("dim", [1, 2])
@internal
@in_place
def test_dropping_a_plane_leaves_the_other(
    dropped: str, dim: int, internal: bool, in_place: bool
) -> None:
    kept = next(plane for plane in PLANES if plane != dropped)
    x = hostile((64, 300))
    quantizer = Float8BlockQuantizer(internal=internal, block_scaling_dim=dim)
    q = quantizer.quantize(x)
    before = {name: getattr(q, name).data_ptr() for name in PLANES[kept]}
    q = ask(q, in_place, **{dropped: False})
    assert {n: t.data_ptr() for n, t in q.inner_tensors().items()} == before
    assert q.quantizer == quantizer.with_usage(**{dropped: False})
    assert q.shape == (64, 300)
    expected = quantizer.with_usage(**{dropped: False}).quantize(x)
    assert_same_bits(q.dequantize(), expected.dequantize())


def test_with_usage_leaves_the_tensor_as_it_was(known: Known) -> None:
    for usage in ({"rowwise": False}, {"columnwise": True}):
        q = Float8BlockQuantizer(columnwise="rowwise" in usage).quantize(torch.ones(32, 64))
        before = known(q)
        q.with_usage(**usage)
        assert known(q) == before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@internal
@in_place
def test_columnwise_plane_of_a_2d_tensor_is_made_from_the_rowwise_one(
    shape: tuple[int, ...], internal: bool, in_place: bool, assert_same_planes: Same, known: Known
) -> None:
    for dtype, pow_2 in itertools.product(("e4m3", "e5m2"), (True, False)):
        both = Float8BlockQuantizer(internal=internal, dtype=dtype, force_pow_2_scales=pow_2)
        x = hostile(shape, block=(1, 128), nonfinite=True)
        q = ask(both.with_usage(columnwise=False).quantize(x), in_place, columnwise=True)
        assert known(q) == known(both.quantize(x))
        assert_same_planes(q, both.quantize(x))


@pytest.mark.usefixtures("poisoned")
def test_scale_padding_of_a_made_plane_is_zero(assert_same_planes: Same) -> None:
    q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(130, 300))
    q.update_usage(columnwise=True)
    assert q.columnwise_scale_inv.tolist() == [[2.0**-8, 2.0**-8, 0.0, 0.0]] * 3


def test_made_plane_shares_no_memory_even_where_it_is_the_same_bytes() -> None:
    for shape in ((1, 128), (128, 1), (1,), ()):
        q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(shape))
        q.update_usage(columnwise=True)
        assert len({t.data_ptr() for t in q.inner_tensors().values()}) == 4


def refused(q: Any, in_place: bool, usage: dict[str, bool], message: str, known: Known) -> None:
    before = known(q)
    with pytest.raises(UsageError) as raised:
        ask(q, in_place, **usage)
    assert str(raised.value) == message
    assert known(q) == before


@in_place
def test_columnwise_plane_of_1x128_blocks_cannot_be_made(in_place: bool, known: Known) -> None:
    quantizer = Float8BlockQuantizer(block_scaling_dim=1, columnwise=False)
    message = (
        "fp8_block: the tensor does not hold columnwise_data, columnwise_scale_inv and they cannot "
        "be derived from rowwise_data, rowwise_scale_inv; quantize the high-precision tensor with "
        "that usage"
    )
    q = quantizer.quantize(torch.ones(32, 64))
    refused(q, in_place, {"columnwise": True}, message, known)


@pytest.mark.parametrize("dim", [1, 2])
@in_place
def test_rowwise_plane_cannot_be_made(in_place: bool, dim: int, known: Known) -> None:
    quantizer = Float8BlockQuantizer(block_scaling_dim=dim, rowwise=False)
    message = (
        "fp8_block: the tensor does not hold rowwise_data, rowwise_scale_inv and they cannot be "
        "derived from columnwise_data, columnwise_scale_inv; quantize the high-precision tensor "
        "with that usage"
    )
    q = quantizer.quantize(torch.ones(32, 64))
    refused(q, in_place, {"rowwise": True}, message, known)


@in_place
def test_columnwise_plane_alone_is_not_made(in_place: bool, known: Known) -> None:
    message = (
        "fp8_block: the columnwise plane is made from the rowwise one only to stand beside it, got "
        "rowwise=False, columnwise=True; ask for both, then drop the rowwise plane"
    )
    q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(32, 64))
    refused(q, in_place, {"rowwise": False, "columnwise": True}, message, known)
    kept = q.with_usage(columnwise=True).with_usage(rowwise=False)
    assert kept.dequantize().unique().tolist() == [1.0]


@pytest.mark.parametrize("dim", [1, 2])
@in_place
def test_a_plane_must_be_left(in_place: bool, dim: int, known: Known) -> None:
    message = (
        "fp8_block: a tensor must keep the rowwise or the columnwise plane, got neither; delete "
        "the tensor instead"
    )
    q = Float8BlockQuantizer(block_scaling_dim=dim).quantize(torch.ones(32, 64))
    refused(q, in_place, {"rowwise": False, "columnwise": False}, message, known)
    q.update_usage(rowwise=False)
    refused(q, in_place, {"columnwise": False}, message, known)


def test_prototype_of_neither_plane_has_no_buffer() -> None:
    quantizer = Float8BlockQuantizer(rowwise=False, columnwise=False)
    q = quantizer.make_empty((3, 5), device="cpu")
    assert (q.shape, q.nbytes, list(q.inner_tensors())) == ((3, 5), 0, [])
    with pytest.raises(UsageError) as raised:
        q.dequantize()
    assert str(raised.value) == (
        "fp8_block: the tensor holds no plane, so there is nothing to dequantize"
    )


def test_gradient_passes_through_a_change_of_usage() -> None:
    x = torch.ones(32, 64, requires_grad=True)
    q = Float8BlockQuantizer(columnwise=False).quantize(x).with_usage(columnwise=True)
    (q.dequantize() * 3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [3.0]
