# SPDX-License-Identifier: Apache-2.0
"""Which buffers a shape has, against the peer's own layout rows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fp8_block.layout import blocks, buffer_shapes, matrix_shape, scale_shape, transposed
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor
from te_proto import TensorProto

GOLDEN = json.loads((Path(__file__).parent / "golden" / "layout.json").read_text("utf-8"))
CLASSES = {
    "Float8BlockwiseQTensor": Float8BlockwiseTensor,
    "Float8BlockwiseQTensorStorage": Float8BlockwiseStorage,
}
ELEMENTS = {7: "e4m3", 8: "e5m2"}  # the peer's enum of element formats


def row_id(row: dict[str, Any]) -> str:
    planes = [plane for plane in ("rowwise", "columnwise") if row[plane]]
    size = "x".join(map(str, row["shape"])) or "scalar"
    return f"{row['block_scaling_dim']}d-{'+'.join(planes) or 'neither'}-{size}"


ROWS = {row_id(row): row for row in GOLDEN["inner_tensor_specs"]}


def proto(shape: tuple[int, ...], **options: Any) -> TensorProto:
    quantizer = Float8BlockQuantizer(**options)
    return TensorProto(shape=shape, dtype=torch.bfloat16, quantizer=quantizer)


def test_every_row_of_the_peer_is_tested_once() -> None:
    assert len(ROWS) == len(GOLDEN["inner_tensor_specs"]) == 80
    assert (len(GOLDEN["value_identity"]), len(GOLDEN["create_metadata"])) == (2, 8)
    assert GOLDEN["inner_tensors"].keys() == CLASSES.keys()
    # it refuses no shape, and so do we
    assert all(isinstance(row["specs"], list) for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_buffers_are_those_of_the_peer(name: str) -> None:
    row = ROWS[name]
    for optimize_for_gemm in (False, True):
        specs = proto(
            tuple(row["shape"]),
            rowwise=row["rowwise"],
            columnwise=row["columnwise"],
            block_scaling_dim=row["block_scaling_dim"],
            optimize_for_gemm=optimize_for_gemm,
        ).inner_specs()
        found = [[f"_{name}", list(spec.shape), spec.dtype] for name, spec in specs.items()]
        assert found == [[n, shape, getattr(torch, dtype)] for n, shape, dtype in row["specs"]]


@pytest.mark.parametrize("name", CLASSES)
def test_inner_tensors_have_the_names_and_order_of_the_peer(name: str) -> None:
    assert list(CLASSES[name].inner_names) == [kwarg for _, kwarg in GOLDEN["inner_tensors"][name]]


@pytest.mark.parametrize("row", GOLDEN["value_identity"], ids=lambda row: row["label"])
def test_fields_of_the_quantizer_are_the_identity_of_the_peer(row: dict[str, Any]) -> None:
    items = {name.removesuffix("_usage"): value for name, value in row["key_items"]}
    items["dtype"] = ELEMENTS[items["dtype"]]
    quantizer = Float8BlockQuantizer(**items)
    assert list(quantizer.state().items()) == list(items.items())
    assert Float8BlockQuantizer.__qualname__ == row["key_class"]
    source, classes = quantizer.__fx_repr__()
    rebuilt = eval(source, dict(classes))
    assert (rebuilt == quantizer) is row["rebuilt_equal"]
    assert (hash(rebuilt) == hash(quantizer)) is row["rebuilt_hash_equal"]


def test_defaults_are_those_of_the_peer() -> None:
    row = next(row for row in GOLDEN["value_identity"] if row["label"] == "fp8-block default")
    items = {name.removesuffix("_usage"): value for name, value in row["key_items"]}
    assert Float8BlockQuantizer().state() == items | {"dtype": ELEMENTS[items["dtype"]]}


def metadata_id(row: dict[str, Any]) -> str:
    gemm = "-for-gemm" if row["optimize_for_gemm"] else ""
    return f"{row['label'][-2:]}-{'internal' if row['internal'] else 'tensor'}{gemm}"


@pytest.mark.parametrize("row", GOLDEN["create_metadata"], ids=metadata_id)
def test_metadata_are_those_of_the_peer(row: dict[str, Any]) -> None:
    kwargs = row["nontensor_kwargs"]
    quantizer = Float8BlockQuantizer(
        internal=row["internal"],
        optimize_for_gemm=row["optimize_for_gemm"],
        block_scaling_dim=int(row["label"][-2]),
    )
    context = quantizer.create_metadata(torch.bfloat16)
    assert context.cls is CLASSES[row["cls"]]
    assert issubclass(context.cls, torch.Tensor) is row["is_tensor"]
    assert str(context.dtype) == kwargs["fake_dtype"]
    assert context.quantizer == quantizer
    assert quantizer.dtype == ELEMENTS[kwargs["fp8_dtype"]]
    assert quantizer.is_2d() is kwargs["is_2D_scaled"]


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "one_d", "two_d"),
    [
        pytest.param(1, 1, (1, 4), (1, 4), id="one-element"),
        pytest.param(128, 128, (1, 128), (1, 4), id="one-block"),
        pytest.param(129, 129, (2, 132), (2, 4), id="one-more"),
        pytest.param(130, 640, (5, 132), (2, 8), id="five-blocks"),
        pytest.param(0, 300, (3, 0), (0, 4), id="no-rows"),
        pytest.param(300, 0, (0, 300), (3, 0), id="no-columns"),
    ],
)
def test_last_axis_of_the_scales_is_padded_to_4(
    rows: int, columns: int, one_d: tuple[int, int], two_d: tuple[int, int]
) -> None:
    assert scale_shape(rows, columns, two_d=False) == one_d
    assert scale_shape(rows, columns, two_d=True) == two_d


def test_matrix_and_transpose_of_any_rank() -> None:
    assert [blocks(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
    assert [matrix_shape(s) for s in ((), (7,), (2, 3, 4, 5))] == [(1, 1), (1, 7), (24, 5)]
    assert [transposed(s) for s in ((), (7,), (2, 3, 5))] == [(), (7,), (5, 2, 3)]


def test_buffers_come_in_canonical_order_whatever_is_asked_for() -> None:
    assert list(buffer_shapes((3, 5), two_d=True, columnwise=True, rowwise=True)) == [
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
    ]


@pytest.mark.parametrize(
    ("dim", "nbytes"),
    [
        pytest.param(
            1,
            {
                "rowwise_data": 70_001 * 70_003,
                "rowwise_scale_inv": 547 * 70_004 * 4,
                "columnwise_data": 70_003 * 70_001,
                "columnwise_scale_inv": 547 * 70_004 * 4,
            },
            id="1d",
        ),
        pytest.param(
            2,
            {
                "rowwise_data": 70_001 * 70_003,
                "rowwise_scale_inv": 547 * 548 * 4,
                "columnwise_data": 70_003 * 70_001,
                "columnwise_scale_inv": 547 * 548 * 4,
            },
            id="2d",
        ),
    ],
)
def test_sizes_beyond_31_bits_are_exact(dim: int, nbytes: dict[str, int]) -> None:
    huge = proto((70_001, 70_003), block_scaling_dim=dim)
    assert huge.buffer_nbytes() == nbytes
    assert huge.nbytes == sum(nbytes.values()) > 2**33
    assert huge.replace(device="meta").create_tensor().nbytes == huge.nbytes


def test_any_shape_will_do() -> None:
    for shape in ((), (0,), (1,), (127,), (3, 129), (0, 5), (5, 0), (2, 0, 3), (2, 3, 5, 7)):
        for dim in (1, 2):
            quantizer = Float8BlockQuantizer(block_scaling_dim=dim)
            assert quantizer.alignment() == (1, 1)
            quantizer.check_shape(shape)
            q = quantizer.quantize(torch.full(shape, 3.0))
            assert q.shape == shape
            assert q.numel() == math.prod(shape)
            assert q.dequantize().unique().tolist() == ([3.0] if q.numel() else [])


def test_layout_is_free_of_torch() -> None:
    code = "import sys, te_fp8_block.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
