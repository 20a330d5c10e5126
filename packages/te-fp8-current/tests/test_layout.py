# SPDX-License-Identifier: Apache-2.0
"""Which buffers a shape has, against the peer's own layout rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from te_fp8_current import (
    Float8CurrentScalingQuantizer,
    Float8Storage,
    Float8Tensor,
    needs_separate_transpose,
)
from te_fp8_current.layout import buffer_shapes, matrix_shape, transpose_shape
from te_proto import TensorProto

GOLDEN = json.loads((Path(__file__).parent / "golden" / "layout.json").read_text("utf-8"))
CLASSES = {"Float8Tensor": Float8Tensor, "Float8TensorStorage": Float8Storage}
ELEMENTS = {7: "e4m3", 8: "e5m2"}  # the peer's enum of element formats
# ours of the peer's attributes; every torch.Tensor has another `data`
ATTRIBUTES = {
    "_data": "fp8_data",
    "_transpose": "data_transpose",
    "_scale_inv": "fp8_scale_inv",
}


def row_id(row: dict[str, Any]) -> str:
    planes = [plane for plane in ("rowwise", "columnwise") if row[plane]]
    size = "x".join(map(str, row["shape"])) or "scalar"
    return f"sm_{''.join(map(str, row['capability']))}-{'+'.join(planes) or 'neither'}-{size}"


ROWS = {row_id(row): row for row in GOLDEN["inner_tensor_specs"]}
# the peer's Python helper asks for the last axis of a 0-d tensor; its C++ allocator, which makes
# the tensor, gives a transpose of shape ()
SCALAR = [name for name, row in ROWS.items() if row["specs"] == "IndexError"]


def proto(shape: tuple[int, ...], **options: Any) -> TensorProto:
    quantizer = Float8CurrentScalingQuantizer(**options)
    return TensorProto(shape=shape, dtype=torch.bfloat16, quantizer=quantizer)


def described(row: dict[str, Any]) -> list[list[Any]]:
    specs = proto(
        tuple(row["shape"]),
        rowwise=row["rowwise"],
        columnwise=row["columnwise"],
        separate_transpose=not row["non_tn"],
    ).inner_specs()
    return [[name, list(spec.shape), spec.dtype] for name, spec in specs.items()]


def test_every_row_of_the_peer_is_tested_once() -> None:
    assert len(ROWS) == len(GOLDEN["inner_tensor_specs"]) == 224
    assert (len(GOLDEN["value_identity"]), len(GOLDEN["create_metadata"])) == (2, 4)
    assert GOLDEN["inner_tensors"].keys() == CLASSES.keys()
    planes = ("rowwise+columnwise", "columnwise")
    names = [f"sm_{cc}-{plane}-scalar" for cc in (89, 90, 120, 121) for plane in planes]
    assert names == SCALAR


@pytest.mark.parametrize("name", [name for name in ROWS if name not in SCALAR])
def test_buffers_are_those_of_the_peer(name: str) -> None:
    row = ROWS[name]
    assert described(row) == [
        [ATTRIBUTES[name], shape, getattr(torch, dtype)] for name, shape, dtype in row["specs"]
    ]


@pytest.mark.parametrize("name", SCALAR)
def test_transpose_of_a_scalar_is_a_scalar(name: str) -> None:
    row = ROWS[name]
    codes = ["fp8_data", "data_transpose"] if row["rowwise"] else ["data_transpose"]
    assert described(row) == [
        *([name, [], torch.uint8] for name in codes),
        ["fp8_scale_inv", [1], torch.float32],
    ]


@pytest.mark.parametrize(
    ("capability", "non_tn"),
    sorted({(tuple(row["capability"]), row["non_tn"]) for row in ROWS.values()}),
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_device_capability_says_whether_transposes_are_separate(
    capability: tuple[int, int], non_tn: bool
) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert needs_separate_transpose("cuda") is not non_tn
        assert needs_separate_transpose(torch.device("cuda", 1)) is not non_tn


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_buffer_serves_devices_without_a_capability(device: str) -> None:
    assert needs_separate_transpose(device) is False


@pytest.mark.parametrize("name", CLASSES)
def test_inner_tensors_have_the_order_of_the_peer_and_its_names_but_one(name: str) -> None:
    theirs = GOLDEN["inner_tensors"][name]
    assert list(CLASSES[name].inner_names) == [ATTRIBUTES[attribute] for attribute, _ in theirs]
    assert [kwarg for _, kwarg in theirs] == ["data", "data_transpose", "fp8_scale_inv"]
    assert list(CLASSES[name].inner_names)[1:] == [kwarg for _, kwarg in theirs][1:]


@pytest.mark.parametrize("row", GOLDEN["value_identity"], ids=lambda row: row["label"])
def test_fields_of_the_quantizer_are_the_identity_of_the_peer_and_one(row: dict[str, Any]) -> None:
    items = {name.removesuffix("_usage"): value for name, value in row["key_items"]}
    items["dtype"] = ELEMENTS[items["dtype"]]
    quantizer = Float8CurrentScalingQuantizer(**items)
    # the peer asks the device each time instead
    assert list(quantizer.state().items()) == [*items.items(), ("separate_transpose", False)]
    assert Float8CurrentScalingQuantizer.__qualname__ == row["key_class"]
    source, classes = quantizer.__fx_repr__()
    rebuilt = eval(source, dict(classes))
    assert (rebuilt == quantizer) is row["rebuilt_equal"]
    assert (hash(rebuilt) == hash(quantizer)) is row["rebuilt_hash_equal"]


@pytest.mark.parametrize("row", GOLDEN["create_metadata"], ids=str)
def test_metadata_are_those_of_the_peer(row: dict[str, Any]) -> None:
    quantizer = Float8CurrentScalingQuantizer(
        internal=row["internal"], optimize_for_gemm=row["optimize_for_gemm"]
    )
    context = quantizer.create_metadata(torch.bfloat16)
    kwargs = row["nontensor_kwargs"]
    assert context.cls is CLASSES[row["cls"]]
    assert issubclass(context.cls, torch.Tensor) is row["is_tensor"]
    assert str(context.dtype) == kwargs["fake_dtype"]
    assert context.quantizer == quantizer
    assert context.quantizer.dtype == ELEMENTS[kwargs["fp8_dtype"]]  # type: ignore[attr-defined]


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "matrix", "transpose"),
    [
        pytest.param((), (1, 1), (), id="scalar"),
        pytest.param((7,), (1, 7), (7,), id="line"),
        pytest.param((3, 5), (3, 5), (5, 3), id="matrix"),
        pytest.param((2, 3, 5), (6, 5), (5, 2, 3), id="three-axes"),
        pytest.param((2, 0, 5), (0, 5), (5, 2, 0), id="empty"),
    ],
)
def test_matrix_and_transpose(
    shape: tuple[int, ...], matrix: tuple[int, int], transpose: tuple[int, ...]
) -> None:
    assert matrix_shape(shape) == matrix
    assert transpose_shape(shape) == transpose


def test_optimize_for_gemm_changes_no_buffer() -> None:
    for separate in (False, True):
        both = [
            proto((4, 6), separate_transpose=separate, optimize_for_gemm=flag).inner_specs()
            for flag in (False, True)
        ]
        assert both[0] == both[1]


def test_buffers_come_in_canonical_order_whatever_is_asked_for() -> None:
    shapes = buffer_shapes((2, 3), separate_transpose=True, columnwise=True, rowwise=True)
    assert list(shapes) == ["fp8_data", "data_transpose", "fp8_scale_inv"]


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4, 5), (0, 7), (7, 0)], ids=str)
def test_every_shape_fits(shape: tuple[int, ...]) -> None:
    for separate in (False, True):
        quantizer = Float8CurrentScalingQuantizer(separate_transpose=separate)
        assert quantizer.alignment() == (1, 1)
        assert quantizer.quantize(torch.ones(shape)).shape == shape


@pytest.mark.parametrize(
    ("separate", "nbytes"),
    [
        (False, {"fp8_data": 4_328_521_728, "fp8_scale_inv": 4}),
        (
            True,
            {
                "fp8_data": 4_328_521_728,
                "data_transpose": 4_328_521_728,
                "fp8_scale_inv": 4,
            },
        ),
    ],
    ids=["one-buffer", "separate"],
)
def test_sizes_beyond_31_bits_are_exact(separate: bool, nbytes: dict[str, int]) -> None:
    huge = proto((2**20, 2**12 + 32), separate_transpose=separate)
    assert huge.buffer_nbytes() == nbytes
    assert huge.nbytes == sum(nbytes.values())
    assert huge.replace(device="meta").create_tensor().nbytes == huge.nbytes
