# SPDX-License-Identifier: Apache-2.0
"""Planes dropped, tensors copied and moved: same bytes, same class, no stale plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.tensor import Float8BlockwiseTensor
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

PLANES = {
    "rowwise": ["rowwise_data", "rowwise_scale_inv"],
    "columnwise": ["columnwise_data", "columnwise_scale_inv"],
}


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


def pointers(tensor: QuantizedStorage) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.inner_tensors().values()]


def test_column_plane_alone_knows_its_shape(options: Options) -> None:
    for fields in options:
        for shape in ((64, 96), (2, 32, 64), ()):
            q = Float8BlockQuantizer(**fields).quantize(torch.ones(shape))
            assert q.shape == shape
            assert q.dequantize().shape == shape


def test_inner_tensors_of_another_order_or_shape_are_refused() -> None:
    q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(32, 64))
    inner = dict(reversed(q.inner_tensors().items()))
    with pytest.raises(
        LayoutError, match=r"needs the inner tensors \['rowwise_data', 'rowwise_sca"
    ):
        Float8BlockwiseTensor(inner, q.quantizer, q.shape, q.dtype)
    for scale in (torch.ones(2, 4), torch.ones(4), torch.ones(4, dtype=torch.float64)):
        inner = q.inner_tensors() | {"rowwise_scale_inv": scale}
        with pytest.raises(LayoutError) as raised:
            Float8BlockwiseTensor(inner, q.quantizer, q.shape, q.dtype)
        assert str(raised.value).startswith(
            "fp8_block: rowwise_scale_inv of a tensor of shape (32, 64) must be a contiguous "
            "torch.float32 of shape (1, 4), got "
        )


# -- copy_ ----------------------------------------------------------------------------------------


def test_copy_of_the_same_layout_is_byte_for_byte(
    options: Options, assert_same_planes: Same
) -> None:
    for fields in options:
        quantizer = Float8BlockQuantizer(**fields)
        source, target = (
            quantizer.quantize(hostile((64, 96))),
            quantizer.quantize(torch.ones(64, 96)),
        )
        before = pointers(target)
        assert target.copy_(source) is target
        assert pointers(target) == before
        assert_same_planes(target, source)


@pytest.mark.parametrize("dropped", PLANES)
def test_copy_takes_the_planes_it_needs_byte_for_byte(
    dropped: str, assert_same_planes: Same
) -> None:
    x = hostile((64, 96))
    target = Float8BlockQuantizer(**{dropped: False}).quantize(torch.ones(64, 96))
    target.copy_(Float8BlockQuantizer().quantize(x))
    assert_same_planes(target, Float8BlockQuantizer(**{dropped: False}).quantize(x))


def test_copy_of_another_layout_requantizes_every_plane(
    options: Options, assert_same_planes: Same
) -> None:
    sources = [Float8BlockQuantizer(**fields).quantize(hostile((64, 96))) for fields in options]
    for fields in options:
        quantizer = Float8BlockQuantizer(**fields)
        for source in sources:
            usage = {"rowwise": quantizer.rowwise, "columnwise": quantizer.columnwise}
            held = source.quantizer
            if held.replace(**usage) == quantizer and all(
                getattr(held, plane) for plane, on in usage.items() if on
            ):
                continue  # the same layout, tested above
            target = quantizer.quantize(torch.ones(64, 96, dtype=torch.bfloat16))
            before = pointers(target)
            target.copy_(source)
            assert pointers(target) == before
            assert target.quantizer == quantizer
            assert_same_planes(target, quantizer.quantize(source.dequantize()))


def test_copy_between_plain_and_quantized(assert_same_planes: Same) -> None:
    x = hostile((64, 96), torch.float32)
    target = Float8BlockQuantizer().quantize(torch.ones(64, 96, dtype=torch.bfloat16))
    target.copy_(x)
    assert target.dtype == torch.bfloat16
    assert_same_planes(target, Float8BlockQuantizer().quantize(x.bfloat16()))
    plain = torch.empty(64, 96)
    plain.copy_(target)
    assert_same_bits(plain, target.dequantize(torch.float32))


# -- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda t: t.to("meta"), id="to"),
        pytest.param(lambda t: t.to(device="meta"), id="to-keyword"),
        pytest.param(lambda t: t.to(torch.device("meta"), non_blocking=True), id="non-blocking"),
        pytest.param(lambda t: t.to(torch.empty(0, device="meta")), id="to-other"),
        pytest.param(lambda t: torch.nn.ParameterList([t]).to("meta")[0], id="module"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"rowwise": False}], ids=["both", "columnwise"])
def test_move_takes_every_inner_tensor(
    move: Callable[[Tensor], Any], fields: dict[str, bool], known: Known
) -> None:
    quantizer = Float8BlockQuantizer(**fields)
    moved = move(quantizer.quantize(torch.ones(64, 96)))
    expected = quantizer.make_empty((64, 96), device="meta", requires_grad=moved.requires_grad)
    assert known(moved) == known(expected)


def test_storage_moves_too(known: Known) -> None:
    quantizer = Float8BlockQuantizer(internal=True)
    moved = quantizer.quantize(torch.ones(64, 96)).to("meta")
    assert known(moved) == known(quantizer.make_empty((64, 96), device="meta"))


def test_move_to_where_it_is_copies_only_when_asked(assert_same_planes: Same) -> None:
    q = Float8BlockQuantizer().quantize(hostile((64, 96)))
    assert q.to("cpu") is q
    assert q.cpu() is q
    copied = q.to("cpu", copy=True)
    assert not set(pointers(copied)) & set(pointers(q))
    assert_same_planes(copied, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_change_of_dtype_changes_the_nominal_dtype_only(
    dtype: torch.dtype, assert_same_planes: Same
) -> None:
    q = Float8BlockQuantizer().quantize(hostile((64, 96), torch.bfloat16))
    changed = q.to(dtype)
    assert type(changed) is Float8BlockwiseTensor
    assert changed.dtype == changed.dequantize().dtype == dtype
    assert_same_planes(changed, q)
    assert_same_bits(changed.dequantize(), q.dequantize(dtype))
    assert_same_bits(torch.nn.ParameterList([q]).to(dtype)[0].dequantize(), q.dequantize(dtype))


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(torch.Tensor.detach, id="detach"),
        pytest.param(torch.Tensor.clone, id="clone"),
        pytest.param(torch.Tensor.contiguous, id="contiguous"),
        pytest.param(lambda t: t.expand(64, 96), id="expand"),
        pytest.param(lambda t: t.as_strided((64, 96), (96, 1)), id="as_strided"),
    ],
)
def test_nothing_is_lost_on_the_way(
    same: Callable[[Tensor], Any], options: Options, known: Known, assert_same_planes: Same
) -> None:
    for fields in options:
        q = Float8BlockQuantizer(**fields).quantize(hostile((64, 96), torch.float16))
        out = same(q)
        assert known(out) == known(q)
        assert out.is_contiguous()
        assert_same_planes(out, q)
        assert out.dequantize().dtype == torch.float16


def test_clone_shares_no_memory() -> None:
    q = Float8BlockQuantizer().quantize(torch.ones(64, 96))
    assert not set(pointers(q.clone())) & set(pointers(q))


def test_storage_bytes_are_not_those_of_the_logical_tensor() -> None:
    q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(64, 96))
    assert q.untyped_storage().nbytes() == 0  # 24576 would be counted, and are not held
    assert q.nbytes == 64 * 96 + 4 * 4


@pytest.mark.parametrize("shape", [(32, 96), (0, 32), (2, 32, 64)], ids=str)
def test_new_zeros_has_the_padded_scales(shape: tuple[int, ...], assert_same_planes: Same) -> None:
    q = Float8BlockQuantizer(block_scaling_dim=1).quantize(torch.ones(64, 96))
    zeros = q.new_zeros(shape, dtype=torch.float16)
    assert zeros.dtype == torch.float16
    assert_same_planes(zeros, q.quantizer.quantize(torch.zeros(shape)))
