# SPDX-License-Identifier: Apache-2.0
"""Tensors copied, moved, pickled, loaded: same bytes, same class, in memory that stays."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_fp8_current import Float8Storage, Float8Tensor
from te_proto.errors import LayoutError
from te_proto.storage import prepare_for_saving, restore_from_saved
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

BOTH = Quantizer(separate_transpose=True)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


def pointers(tensor: QuantizedStorage) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.inner_tensors().values()]


# -- copy_ ----------------------------------------------------------------------------------------


def test_copy_of_the_same_layout_is_byte_for_byte(
    options: Options, assert_same_planes: Same
) -> None:
    for fields in options:
        quantizer = Quantizer(**fields)
        source, target = quantizer.quantize(hostile((6, 10))), quantizer.quantize(torch.ones(6, 10))
        before = pointers(target)
        assert target.copy_(source) is target
        assert pointers(target) == before
        assert_same_planes(target, source)


def test_copy_of_another_layout_requantizes_every_buffer(
    options: Options, assert_same_planes: Same
) -> None:
    sources = [Quantizer(**fields).quantize(hostile((6, 10))) for fields in options]
    for fields in options:
        quantizer = Quantizer(**fields)
        for source in sources:
            target = quantizer.quantize(torch.ones(6, 10))
            before = pointers(target)
            target.copy_(source)
            assert pointers(target) == before
            assert target.quantizer == quantizer
            held = source.quantizer
            usage = {"rowwise": quantizer.rowwise, "columnwise": quantizer.columnwise}
            if held.with_usage(**usage) == quantizer and all(
                name in source.inner_tensors() for name in target.inner_tensors()
            ):
                expected = source.with_usage(**usage)  # the bytes it needs are there
            else:
                expected = quantizer.quantize(source.dequantize())
            assert_same_planes(target, expected)


def test_copy_between_plain_and_quantized(assert_same_planes: Same) -> None:
    x = hostile((6, 10), torch.float32)
    target = BOTH.quantize(torch.ones(6, 10, dtype=torch.bfloat16))
    target.copy_(x)
    assert target.dtype == torch.bfloat16
    assert_same_planes(target, BOTH.quantize(x.bfloat16()))
    plain = torch.empty(6, 10)
    plain.copy_(target)
    assert_same_bits(plain, target.dequantize(torch.float32))


def test_in_place_op_requantizes_in_place(assert_same_planes: Same) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    target = BOTH.quantize(x)
    before, plain = pointers(target), target.dequantize()
    with te_proto.fallback("allow"):
        target.mul_(3.0)
    assert pointers(target) == before
    assert_same_planes(target, BOTH.quantize(plain * 3.0))


# -- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda t: t.to("meta"), id="to"),
        pytest.param(lambda t: t.to(torch.device("meta"), non_blocking=True), id="non-blocking"),
        pytest.param(lambda t: torch.nn.ParameterList([t]).to("meta")[0], id="module"),
    ],
)
def test_move_takes_every_inner_tensor(
    move: Callable[[Tensor], Any], options: Options, known: Known
) -> None:
    for fields in options:
        quantizer = Quantizer(**fields)
        moved = move(quantizer.quantize(torch.ones(6, 10)))
        expected = quantizer.make_empty((6, 10), device="meta", requires_grad=moved.requires_grad)
        assert known(moved) == known(expected)


def test_move_to_where_it_is_copies_only_when_asked(assert_same_planes: Same) -> None:
    q = BOTH.quantize(hostile((6, 10)))
    assert q.to("cpu") is q
    copied = q.to("cpu", copy=True)
    assert not set(pointers(copied)) & set(pointers(q))
    assert_same_planes(copied, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_change_of_dtype_changes_the_nominal_dtype_only(
    dtype: torch.dtype, assert_same_planes: Same
) -> None:
    q = BOTH.quantize(hostile((6, 10), torch.bfloat16))
    changed = q.to(dtype)
    assert type(changed) is Float8Tensor
    assert changed.dtype == changed.dequantize().dtype == dtype
    assert_same_planes(changed, q)
    assert_same_bits(changed.dequantize(), q.dequantize(dtype))


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(torch.Tensor.detach, id="detach"),
        pytest.param(torch.Tensor.clone, id="clone"),
        pytest.param(torch.Tensor.contiguous, id="contiguous"),
        pytest.param(lambda t: t.expand(6, 10), id="expand"),
        pytest.param(lambda t: t.as_strided((6, 10), (10, 1)), id="as_strided"),
    ],
)
def test_nothing_is_lost_on_the_way(
    same: Callable[[Tensor], Any], options: Options, known: Known, assert_same_planes: Same
) -> None:
    for fields in options:
        q = Quantizer(**fields).quantize(hostile((6, 10), torch.float16))
        out = same(q)
        assert known(out) == known(q)
        assert_same_planes(out, q)


def test_clone_shares_no_memory() -> None:
    q = BOTH.quantize(torch.ones(6, 10))
    assert not set(pointers(q.clone())) & set(pointers(q))


def test_new_zeros_of_any_shape(assert_same_planes: Same) -> None:
    q = BOTH.quantize(torch.full((6, 10), 7.0))
    for shape in ((3, 5), (0, 4), (), (2, 3, 4)):
        zeros = q.new_zeros(shape, dtype=torch.float16)
        assert zeros.dtype == torch.float16
        assert_same_planes(zeros, BOTH.quantize(torch.zeros(shape)))


@pytest.mark.parametrize("name", ["fp8_data", "data_transpose", "fp8_scale_inv"])
def test_inner_tensors_of_another_layout_are_refused(name: str) -> None:
    q = BOTH.quantize(torch.ones(6, 10))
    inner = q.inner_tensors()
    for wrong in (inner[name][:1].expand(2, *inner[name].shape[1:]), inner[name].to(torch.int16)):
        with pytest.raises(LayoutError, match=f"^fp8_current: {name} of a tensor of shape"):
            Float8Tensor({**inner, name: wrong}, q.quantizer, q.shape, q.dtype)
    with pytest.raises(LayoutError, match=r"needs the inner tensors \['fp8_data', 'data_tran"):
        Float8Tensor(dict(reversed(inner.items())), q.quantizer, q.shape, q.dtype)


# -- saving ---------------------------------------------------------------------------------------


def make_leaf(fields: dict[str, Any]) -> Float8Tensor:
    leaf: Float8Tensor = Quantizer(**fields).quantize(hostile((6, 10)))
    return leaf.requires_grad_()  # type: ignore[return-value]


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda t: pickle.loads(pickle.dumps(t)), id="pickle"),
    ],
)
def test_copy_of_a_leaf_is_a_leaf_of_the_same_bytes(
    again: Callable[[Any], Any], options: Options, known: Known, assert_same_planes: Same
) -> None:
    for fields in options:
        leaf = make_leaf(fields)
        copied = again(leaf)
        assert known(copied) == known(leaf)
        assert copied.is_leaf
        assert not set(pointers(copied)) & set(pointers(leaf))
        assert_same_planes(copied, leaf)
        storage = Quantizer(**fields, internal=True).quantize(hostile((6, 10)))
        assert type(again(storage)) is Float8Storage
        assert known(again(storage)) == known(storage)
        assert_same_planes(again(storage), storage)


def test_storages_are_saved_as_their_inner_tensors(
    options: Options, known: Known, assert_same_planes: Same
) -> None:
    for fields in options:
        q, plain = Quantizer(**fields, internal=True).quantize(hostile((2, 3, 5))), torch.ones(2)
        flat, objects = prepare_for_saving(plain, q, None)
        assert [id(t) for t in flat] == [id(plain), *map(id, q.inner_tensors().values()), id(None)]
        first, again, last = restore_from_saved(objects, flat)
        assert (first is plain, last) == (True, None)
        assert known(again) == known(q)
        assert_same_planes(again, q)


def test_checkpoint_loads_where_only_the_core_was_imported(
    tmp_path: Path, options: Options, assert_same_planes: Same
) -> None:
    file, back = tmp_path / "model.pt", tmp_path / "back.pt"
    saved = {str(i): make_leaf(fields) for i, fields in enumerate(options)}
    torch.save(saved, file)
    code = (
        "import sys, torch; from te_proto import TensorProto\n"
        "assert 'te_fp8_current' not in sys.modules\n"
        f"state = torch.load({str(file)!r}, weights_only=True)\n"
        "print(sorted({type(t).__name__ for t in state.values()}), len(state))\n"
        f"torch.save(state, {str(back)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=dict(os.environ),
    )
    found = (done.returncode, done.stdout.strip(), done.stderr)
    assert found == (0, f"['Float8Tensor'] {len(options)}", "")
    for name, tensor in torch.load(back, weights_only=True).items():
        assert tensor.requires_grad
        assert tensor.quantizer == saved[name].quantizer
        assert_same_planes(tensor, saved[name])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda x: x, id="plain"),
        pytest.param(lambda x: x.bfloat16(), id="bfloat16"),
        pytest.param(BOTH.quantize, id="quantized"),
        pytest.param(Quantizer().quantize, id="one-buffer"),
    ],
)
def test_load_state_dict_keeps_the_memory_and_writes_every_buffer(
    source: Callable[[Tensor], Any], assert_same_planes: Same
) -> None:
    layer = torch.nn.Linear(10, 6, bias=False)
    layer.weight = torch.nn.Parameter(BOTH.quantize(torch.full((6, 10), 7.0)))
    before, value = pointers(layer.weight), source(hostile((6, 10), torch.float32))
    layer.load_state_dict({"weight": value})
    assert pointers(layer.weight) == before
    if getattr(value, "quantizer", None) == BOTH:
        assert_same_planes(layer.weight, value)
    else:
        plain = value.dequantize() if isinstance(value, Float8Tensor) else value
        assert_same_planes(layer.weight, BOTH.quantize(plain))
