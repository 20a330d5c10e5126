# SPDX-License-Identifier: Apache-2.0
"""Planes dropped and derived, tensors copied, moved and saved: same bytes, no stale plane."""

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
from te_nvfp4.quantizer import NVFP4Quantizer
from te_nvfp4.tensor import NVFP4Storage, NVFP4Tensor
from te_proto.errors import LayoutError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Run = Callable[..., Any]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

PLANES = {
    "rowwise": ["rowwise_data", "rowwise_scale_inv", "amax_rowwise"],
    "columnwise": ["columnwise_data", "columnwise_scale_inv", "amax_columnwise"],
}
TWO_D = {"with_2d_quantization": True}


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


def pointers(tensor: QuantizedStorage) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.inner_tensors().values()]


# -- planes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", PLANES)
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("in_place", [False, True], ids=["with_usage", "update_usage"])
def test_dropping_a_plane_leaves_the_other(dropped: str, internal: bool, in_place: bool) -> None:
    kept = next(plane for plane in PLANES if plane != dropped)
    x = hostile((64, 96))
    for fields in ({}, {"row_scaled_nvfp4": True}, {**TWO_D, "nvfp4_use_4over6": True}):
        if fields.get("row_scaled_nvfp4") and dropped == "rowwise":
            x = x.bfloat16()
        q = NVFP4Quantizer(internal=internal, **fields).quantize(x)
        before = {name: getattr(q, name).data_ptr() for name in PLANES[kept]}
        if in_place:
            q.update_usage(**{dropped: False})
        else:
            q = q.with_usage(**{dropped: False})
        assert {n: t.data_ptr() for n, t in q.inner_tensors().items()} == before
        assert q.quantizer == NVFP4Quantizer(internal=internal, **fields, **{dropped: False})
        assert q.shape == (64, 96)
        assert q.dequantize().shape == (64, 96)


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 64)], ids=str)
def test_dropping_both_planes_leaves_the_shape(shape: tuple[int, ...], internal: bool) -> None:
    q = NVFP4Quantizer(internal=internal).quantize(torch.ones(shape))
    for empty in (q.with_usage(rowwise=False, columnwise=False), q):
        if empty is q:
            q.update_usage(rowwise=False)
            q.update_usage(columnwise=False)
        assert (empty.shape, empty.dtype, empty.nbytes) == (shape, torch.float32, 0)
        assert te_proto.to_tensor_proto(empty).shape == shape
        with pytest.raises(UsageError) as raised:
            empty.dequantize()
        assert str(raised.value) == (
            "nvfp4: the tensor holds no plane, so there is nothing to dequantize"
        )


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 64), (4, 8, 48)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("in_place", [False, True], ids=["with_usage", "update_usage"])
def test_2d_column_plane_is_derived_from_the_rows(
    shape: tuple[int, ...], swizzled: bool, in_place: bool, assert_same_planes: Same
) -> None:
    x = hostile(shape)
    both = NVFP4Quantizer(optimize_for_gemm=swizzled, **TWO_D)
    q = both.with_usage(columnwise=False).quantize(x)
    row = q.rowwise_data
    if in_place:
        q.update_usage(columnwise=True)
    else:
        q = q.with_usage(columnwise=True)
    assert q.rowwise_data is row
    assert q.quantizer == both
    assert_same_planes(q, both.quantize(x))
    assert len(set(pointers(q))) == 6


@pytest.mark.parametrize(
    ("held", "asked", "fields"),
    [
        pytest.param("rowwise", {"columnwise": True}, {}, id="1d"),
        pytest.param("columnwise", {"rowwise": True}, TWO_D, id="rows-of-2d"),
        pytest.param("rowwise", {"columnwise": True, "rowwise": False}, TWO_D, id="columns-alone"),
        pytest.param(
            "rowwise",
            {"columnwise": True},
            {**TWO_D, "with_rht": True, "with_post_rht_amax": True},
            id="2d-transformed",
        ),
    ],
)
def test_missing_plane_that_cannot_be_derived_is_named(
    held: str, asked: dict[str, bool], fields: dict[str, bool], known: Known
) -> None:
    missing = "columnwise" if held == "rowwise" else "rowwise"
    q = NVFP4Quantizer(**fields, **{missing: False}).quantize(BF16)
    before = known(q)
    for change in (q.with_usage, q.update_usage):
        with pytest.raises(UsageError) as raised:
            change(**asked)
        assert str(raised.value) == (
            f"nvfp4: the tensor does not hold {', '.join(PLANES[missing])} and they cannot be "
            f"derived from {', '.join(PLANES[held])}; quantize the high-precision tensor with "
            "that usage"
        )
    assert known(q) == before


BF16 = torch.ones(32, 64, dtype=torch.bfloat16)


def test_column_plane_alone_knows_its_shape(options: Options, run: Run) -> None:
    for fields in options:
        if not fields["columnwise"]:
            continue
        for shape in ((64, 96), (2, 32, 64)):
            q = run(NVFP4Quantizer(**fields), torch.ones(shape, dtype=torch.bfloat16))
            q = q.with_usage(rowwise=False)
            assert q.shape == shape
            assert q.dequantize().shape == shape


def test_inner_tensors_of_another_order_are_refused() -> None:
    q = NVFP4Quantizer(columnwise=False).quantize(BF16)
    inner = dict(reversed(q.inner_tensors().items()))
    with pytest.raises(LayoutError, match=r"needs the inner tensors \['rowwise_data', 'rowwise_"):
        NVFP4Tensor(inner, q.quantizer, q.shape, q.dtype)


# -- copy_ ----------------------------------------------------------------------------------------


def test_copy_of_the_same_layout_is_byte_for_byte(
    options: Options, run: Run, assert_same_planes: Same
) -> None:
    for fields in options:
        quantizer = NVFP4Quantizer(**fields)
        source = run(quantizer, hostile((64, 96)))
        target = run(quantizer, torch.ones(64, 96, dtype=torch.bfloat16))
        before = pointers(target)
        assert target.copy_(source) is target
        assert pointers(target) == before
        assert_same_planes(target, source)


def test_copy_of_another_layout_requantizes_every_plane(
    options: Options, run: Run, assert_same_planes: Same
) -> None:
    sources = [run(NVFP4Quantizer(**f), hostile((64, 96))) for f in options[::5]]
    for fields in options:
        at_rest = NVFP4Quantizer(**fields).at_rest()
        for source in sources:
            usage = {"rowwise": at_rest.rowwise, "columnwise": at_rest.columnwise}
            held = source.quantizer
            if held.replace(**usage) == at_rest and all(
                getattr(held, plane) for plane, on in usage.items() if on
            ):
                continue  # the same layout, tested above
            target = run(NVFP4Quantizer(**fields), torch.ones(64, 96, dtype=torch.bfloat16))
            before = pointers(target)
            target.copy_(source)
            assert pointers(target) == before
            assert target.quantizer == at_rest
            assert_same_planes(target, at_rest.quantize(source.dequantize()))


def test_copy_between_plain_and_quantized(assert_same_planes: Same) -> None:
    x = hostile((64, 96), torch.float32)
    target = NVFP4Quantizer().quantize(torch.ones(64, 96, dtype=torch.bfloat16))
    target.copy_(x)
    assert target.dtype == torch.bfloat16
    assert_same_planes(target, NVFP4Quantizer().quantize(x.bfloat16()))
    plain = torch.empty(64, 96)
    plain.copy_(target)
    assert_same_bits(plain, target.dequantize(torch.float32))


# -- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda t: t.to("meta"), id="to"),
        pytest.param(lambda t: t.to(torch.device("meta"), non_blocking=True), id="non-blocking"),
        pytest.param(lambda t: torch.nn.ParameterList([t]).to("meta")[0], id="module"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"rowwise": False}, TWO_D], ids=["both", "columns", "2d"])
def test_move_takes_every_inner_tensor(
    move: Callable[[Tensor], Any], fields: dict[str, bool], known: Known
) -> None:
    quantizer = NVFP4Quantizer(**fields)
    moved = move(quantizer.quantize(torch.ones(64, 96)))
    expected = quantizer.make_empty((64, 96), device="meta", requires_grad=moved.requires_grad)
    assert known(moved) == known(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_change_of_dtype_changes_the_nominal_dtype_only(
    dtype: torch.dtype, assert_same_planes: Same
) -> None:
    q = NVFP4Quantizer().quantize(hostile((64, 96), torch.bfloat16))
    changed = q.to(dtype)
    assert type(changed) is NVFP4Tensor
    assert changed.dtype == changed.dequantize().dtype == dtype
    assert_same_planes(changed, q)
    assert_same_bits(changed.dequantize(), q.dequantize(dtype))


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(torch.Tensor.detach, id="detach"),
        pytest.param(torch.Tensor.clone, id="clone"),
        pytest.param(torch.Tensor.contiguous, id="contiguous"),
        pytest.param(lambda t: t.expand(64, 96), id="expand"),
        pytest.param(lambda t: t.as_strided((64, 96), (96, 1)), id="as_strided"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda t: pickle.loads(pickle.dumps(t)), id="pickle"),
    ],
)
def test_nothing_is_lost_on_the_way(
    same: Callable[[Tensor], Any],
    options: Options,
    run: Run,
    known: Known,
    assert_same_planes: Same,
) -> None:
    for fields in options:
        q = run(NVFP4Quantizer(**fields), hostile((64, 96)))
        out = same(q)
        assert known(out) == known(q)
        assert out.is_contiguous()
        assert_same_planes(out, q)


@pytest.mark.parametrize("same", [torch.clone, copy.deepcopy], ids=["clone", "deepcopy"])
def test_copies_share_no_memory(same: Callable[[Any], Any]) -> None:
    q = NVFP4Quantizer().quantize(torch.ones(64, 96))
    assert not set(pointers(same(q))) & set(pointers(q))


def test_storage_survives_deepcopy_and_pickle(known: Known, assert_same_planes: Same) -> None:
    q = NVFP4Quantizer(internal=True, rowwise=False).quantize(hostile((64, 96)))
    for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert type(copied) is NVFP4Storage
        assert known(copied) == known(q)
        assert_same_planes(copied, q)


@pytest.mark.parametrize("shape", [(32, 96), (0, 32), (2, 32, 64)], ids=str)
def test_new_zeros_has_the_padded_scales(shape: tuple[int, ...], assert_same_planes: Same) -> None:
    q = NVFP4Quantizer(optimize_for_gemm=True).quantize(torch.ones(64, 96))
    zeros = q.new_zeros(shape, dtype=torch.float16)
    assert zeros.dtype == torch.float16
    assert_same_planes(zeros, q.quantizer.quantize(torch.zeros(shape)))


# -- checkpoints ----------------------------------------------------------------------------------


def run_code(code: str, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **env},
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_checkpoint_loads_where_only_the_core_was_imported(
    tmp_path: Path, options: Options, run: Run, assert_same_planes: Same
) -> None:
    file, back = tmp_path / "model.pt", tmp_path / "back.pt"
    saved = {str(i): run(NVFP4Quantizer(**f), hostile((64, 96))) for i, f in enumerate(options)}
    torch.save(saved, file)
    code = (
        "import sys, torch; from te_proto import TensorProto\n"
        "assert 'te_nvfp4' not in sys.modules\n"
        f"state = torch.load({str(file)!r}, weights_only=True)\n"
        "print(sorted({type(t).__name__ for t in state.values()}), len(state))\n"
        f"torch.save(state, {str(back)!r})"
    )
    assert run_code(code) == (0, f"['NVFP4Tensor'] {len(options)}", "")
    for name, tensor in torch.load(back, weights_only=True).items():
        assert tensor.quantizer == saved[name].quantizer
        assert_same_planes(tensor, saved[name])


def test_checkpoint_without_its_plugin_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(NVFP4Quantizer().quantize(torch.ones(32, 32)), file)
    code = (
        "import torch; from te_proto import TensorProto\n"
        f"torch.load({str(file)!r}, weights_only=True)"
    )
    status, _, err = run_code(code, TE_PROTO_FORMATS="none_of_them")
    assert status == 1
    assert (  # torch wraps the message in its own advice
        "no installed format provides the class 'te_nvfp4.tensor:NVFP4Tensor'; "
        "install it with: pip install te-nvfp4"
    ) in err


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda x: x, id="plain"),
        pytest.param(NVFP4Quantizer(**TWO_D).quantize, id="quantized"),
        pytest.param(NVFP4Quantizer(columnwise=False).quantize, id="less-planes"),
    ],
)
def test_load_state_dict_keeps_the_memory_and_writes_every_plane(
    source: Callable[[Tensor], Any], assert_same_planes: Same
) -> None:
    quantizer = NVFP4Quantizer(**TWO_D)
    layer = torch.nn.Linear(96, 64, bias=False)
    layer.weight = torch.nn.Parameter(quantizer.quantize(torch.full((64, 96), 7.0)))
    before, value = pointers(layer.weight), source(hostile((64, 96), torch.float32))
    layer.load_state_dict({"weight": value})
    assert pointers(layer.weight) == before
    if getattr(value, "quantizer", None) == quantizer:
        assert_same_planes(layer.weight, value)
    else:
        plain = value.dequantize() if isinstance(value, NVFP4Tensor) else value
        assert_same_planes(layer.weight, quantizer.quantize(plain))
