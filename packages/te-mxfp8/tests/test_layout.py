# SPDX-License-Identifier: Apache-2.0
"""Which buffers a shape has and which shapes a plane holds, against the peer's own layout rows."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from te_mxfp8.layout import buffer_shapes, matrix_shape, round_up, scale_shape
from te_mxfp8.quantizer import MXFP8Quantizer
from te_mxfp8.tensor import MXFP8Storage, MXFP8Tensor
from te_proto import TensorProto
from te_proto.errors import ShapeError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "layout.json").read_text("utf-8"))
CLASSES = {"MXFP8Tensor": MXFP8Tensor, "MXFP8TensorStorage": MXFP8Storage}
USAGES = ((True, True), (True, False), (False, True), (False, False))
TWO_D = {"with_2d_quantization": True}
ELEMENTS = {7: "e4m3", 8: "e5m2"}  # the peer's enum of element formats


def row_id(row: dict[str, Any]) -> str:
    planes = [plane for plane in ("rowwise", "columnwise") if row[plane]]
    size = "x".join(map(str, row["shape"])) or "scalar"
    return f"{'+'.join(planes) or 'neither'}-{size}"


ROWS = {row_id(row): row for row in GOLDEN["inner_tensor_specs"]}

RAGGED_K = (
    "mxfp8: the last axis of x must be a multiple of 32, got 65 in shape (33, 65); "
    "pad it to 96 first"
)
RAGGED_M = (
    "mxfp8: the rows of x, all axes but the last together, must be a multiple of 32, got {} in "
    "shape {}; pad them to {} first, or turn the columnwise usage off"
)
SCALAR = "mxfp8: x must have at least one axis, got a 0-d tensor; reshape it to (1, K)"

# The rows that are no expectation of ours, each with what we say instead. The peer's Python helper
# does not check: it divides ragged sizes with the remainder lost, and so describes a buffer without
# the last scales, which its allocator then refuses; a 0-d shape ends in an IndexError, or in a
# tensor of no plane.
REFUSED = {
    "rowwise+columnwise-scalar": SCALAR,
    "rowwise-scalar": SCALAR,
    "columnwise-scalar": SCALAR,
    "neither-scalar": SCALAR,
    "rowwise+columnwise-64": RAGGED_M.format(1, (64,), 32),
    "columnwise-64": RAGGED_M.format(1, (64,), 32),
    "rowwise+columnwise-33x65": RAGGED_K,
    "rowwise-33x65": RAGGED_K,
    "columnwise-33x65": RAGGED_M.format(33, (33, 65), 64),
}


def proto(shape: tuple[int, ...], **options: Any) -> TensorProto:
    return TensorProto(shape=shape, dtype=torch.bfloat16, quantizer=MXFP8Quantizer(**options))


def test_every_row_of_the_peer_is_tested_once() -> None:
    assert len(ROWS) == len(GOLDEN["inner_tensor_specs"]) == 40
    assert (len(GOLDEN["value_identity"]), len(GOLDEN["create_metadata"])) == (2, 4)
    assert GOLDEN["inner_tensors"].keys() == CLASSES.keys()
    assert REFUSED.keys() < ROWS.keys()


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_buffers_are_those_of_the_peer(name: str, swizzled: bool) -> None:
    row = ROWS[name]
    specs = proto(
        tuple(row["shape"]),
        rowwise=row["rowwise"],
        columnwise=row["columnwise"],
        optimize_for_gemm=swizzled,
    ).inner_specs()
    found = [[f"_{name}", list(spec.shape), spec.dtype] for name, spec in specs.items()]
    assert found == [[name, shape, getattr(torch, dtype)] for name, shape, dtype in row["specs"]]


@pytest.mark.parametrize("name", REFUSED)
def test_shape_that_the_peer_lets_through_is_refused(name: str) -> None:
    row = ROWS[name]
    refused = proto(tuple(row["shape"]), rowwise=row["rowwise"], columnwise=row["columnwise"])
    with pytest.raises(ShapeError) as raised:
        refused.inner_specs()
    assert str(raised.value) == REFUSED[name]


@pytest.mark.parametrize("name", CLASSES)
def test_inner_tensors_have_the_names_and_order_of_the_peer(name: str) -> None:
    assert list(CLASSES[name].inner_names) == [kwarg for _, kwarg in GOLDEN["inner_tensors"][name]]


@pytest.mark.parametrize("row", GOLDEN["value_identity"], ids=lambda row: row["label"])
def test_fields_of_the_quantizer_are_the_identity_of_the_peer(row: dict[str, Any]) -> None:
    items = {name.removesuffix("_usage"): value for name, value in row["key_items"]}
    items["dtype"] = ELEMENTS[items["dtype"]]
    quantizer = MXFP8Quantizer(
        dtype=items["dtype"], with_2d_quantization=items["with_2d_quantization"]
    )
    assert list(quantizer.state().items()) == list(items.items())
    assert MXFP8Quantizer.__qualname__ == row["key_class"]
    source, classes = quantizer.__fx_repr__()
    rebuilt = eval(source, dict(classes))
    assert (rebuilt == quantizer) is row["rebuilt_equal"]
    assert (hash(rebuilt) == hash(quantizer)) is row["rebuilt_hash_equal"]


def metadata_id(row: dict[str, Any]) -> str:
    order = "swizzled" if row["optimize_for_gemm"] else "compact"
    return f"{order}-{'internal' if row['internal'] else 'tensor'}"


@pytest.mark.parametrize("row", GOLDEN["create_metadata"], ids=metadata_id)
def test_metadata_are_those_of_the_peer(row: dict[str, Any]) -> None:
    quantizer = MXFP8Quantizer(internal=row["internal"], optimize_for_gemm=row["optimize_for_gemm"])
    context = quantizer.create_metadata(torch.bfloat16)
    kwargs = row["nontensor_kwargs"]
    assert context.cls is CLASSES[row["cls"]]
    assert issubclass(context.cls, torch.Tensor) is row["is_tensor"]
    assert str(context.dtype) == kwargs["fake_dtype"]
    assert context.quantizer.dtype == ELEMENTS[kwargs["fp8_dtype"]]  # type: ignore[attr-defined]
    assert context.quantizer.optimize_for_gemm is kwargs["with_gemm_swizzled_scales"]


# -- which shapes a plane can hold ----------------------------------------------------------------


def shapes() -> list[tuple[int, ...]]:
    """Every [M, K] around the first multiples of 32, and N-d shapes whose rows multiply to one."""
    sizes = (0, 1, 2, 31, 32, 33, 63, 64, 96, 127, 128, 129)
    matrices = list(itertools.product(sizes, sizes))
    lines = [(k,) for k in sizes]
    cubes = list(itertools.product((0, 1, 2, 3), (16, 32, 48), (31, 32, 64)))
    return [*matrices, *lines, *cubes, (2, 4, 4, 32), (2, 2, 2, 2, 2, 64), (0, 0, 32)]


@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
def test_check_shape_alignment_and_rule_agree(rowwise: bool, columnwise: bool, two_d: bool) -> None:
    quantizer = MXFP8Quantizer(rowwise=rowwise, columnwise=columnwise, with_2d_quantization=two_d)
    rows, columns = quantizer.alignment()
    seen = set()
    for shape in shapes():
        m, k = math.prod(shape[:-1]), shape[-1]
        held = rowwise or columnwise
        fits = not (
            (k % 32 and (rowwise or (two_d and held)))
            or (m % 32 and (columnwise or (two_d and held)))
        )
        assert (m % rows == 0 and k % columns == 0) is fits, shape
        if fits:
            quantizer.check_shape(shape)
        else:
            with pytest.raises(ShapeError):
                quantizer.check_shape(shape)
        seen.add(fits)
    assert seen == ({True, False} if held else {True})


@pytest.mark.parametrize(
    ("options", "alignment"),
    [
        pytest.param({}, (32, 32), id="both"),
        pytest.param({"columnwise": False}, (1, 32), id="rowwise"),
        pytest.param({"rowwise": False}, (32, 1), id="columnwise"),
        pytest.param({"rowwise": False, "columnwise": False}, (1, 1), id="neither"),
        pytest.param(TWO_D | {"columnwise": False}, (32, 32), id="rowwise-2d"),
        pytest.param(TWO_D | {"rowwise": False}, (32, 32), id="columnwise-2d"),
    ],
)
def test_alignment(options: dict[str, bool], alignment: tuple[int, int]) -> None:
    assert MXFP8Quantizer(**options).alignment() == alignment


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        pytest.param(
            (4, 100),
            {"columnwise": False},
            "mxfp8: the last axis of x must be a multiple of 32, got 100 in shape (4, 100); "
            "pad it to 128 first",
            id="rowwise-k",
        ),
        pytest.param((3, 4, 64), {}, RAGGED_M.format(12, (3, 4, 64), 32), id="both-m"),
        pytest.param(
            (33, 64),
            TWO_D | {"columnwise": False},
            RAGGED_M.format(33, (33, 64), 64).removesuffix(", or turn the columnwise usage off"),
            id="2d-m-has-no-other-way-out",
        ),
        pytest.param(
            (32, 33),
            TWO_D | {"rowwise": False},
            "mxfp8: the last axis of x must be a multiple of 32, got 33 in shape (32, 33); "
            "pad it to 64 first",
            id="2d-k-of-the-column-plane",
        ),
    ],
)
def test_ragged_shape_is_refused_by_quantize_too(
    shape: tuple[int, ...], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(ShapeError) as raised:
        MXFP8Quantizer(**options).quantize(torch.zeros(shape))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((5, 64), {"columnwise": False}, id="rowwise-of-5-rows"),
        pytest.param((64, 5), {"rowwise": False}, id="columnwise-of-5-columns"),
        pytest.param((96,), {"columnwise": False}, id="rowwise-of-a-line"),
    ],
)
def test_plane_binds_only_its_own_axis(shape: tuple[int, ...], options: dict[str, bool]) -> None:
    x = torch.linspace(-2, 2, math.prod(shape)).reshape(shape)
    q = MXFP8Quantizer(**options).quantize(x)
    # E4M3 under a scale of at most twice the best one: 3 bits of mantissa, half an ulp
    torch.testing.assert_close(q.dequantize(), x, rtol=2**-4, atol=2**-9)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "k", "rowwise", "columnwise"),
    [
        pytest.param(32, 32, (128, 4), (4, 128), id="less-than-a-tile"),
        pytest.param(128, 128, (128, 4), (4, 128), id="one-tile"),
        pytest.param(160, 288, (256, 12), (8, 384), id="ragged-tiles"),
        pytest.param(0, 64, (0, 4), (0, 128), id="no-rows"),
        pytest.param(64, 0, (128, 0), (4, 0), id="no-columns"),
    ],
)
def test_scales_are_padded_to_whole_tiles(
    m: int, k: int, rowwise: tuple[int, int], columnwise: tuple[int, int]
) -> None:
    assert scale_shape(m, k, columnwise=False) == rowwise
    assert scale_shape(m, k, columnwise=True) == columnwise


def test_round_up_and_matrix_shape() -> None:
    assert [round_up(n, 128) for n in (0, 1, 127, 128, 129)] == [0, 128, 128, 128, 256]
    assert matrix_shape((64,)) == (1, 64)
    assert matrix_shape((2, 3, 4, 5)) == (24, 5)
    assert matrix_shape((0, 0, 32)) == (0, 32)


def test_buffers_come_in_canonical_order_whatever_is_asked_for() -> None:
    assert list(buffer_shapes((32, 32), columnwise=True, rowwise=True)) == [
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
    ]


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        pytest.param(
            (2**20, 2**12 + 32),
            {
                "rowwise_data": 4_328_521_728,
                "rowwise_scale_inv": 138_412_032,  # 2**20 rows of 129 blocks, padded to 132
                "columnwise_data": 4_328_521_728,
                "columnwise_scale_inv": 138_412_032,  # 32768 blocks of 4128 columns, padded to 4224
            },
            id="2**20x4128",
        ),
        pytest.param(
            (70_016, 70_016),
            {
                "rowwise_data": 4_902_240_256,
                "rowwise_scale_inv": 153_195_008,
                "columnwise_data": 4_902_240_256,
                "columnwise_scale_inv": 153_195_008,
            },
            id="70016x70016",
        ),
    ],
)
def test_sizes_beyond_31_bits_are_exact(shape: tuple[int, int], nbytes: dict[str, int]) -> None:
    huge = proto(shape)
    assert huge.buffer_nbytes() == nbytes
    assert huge.nbytes == sum(nbytes.values())
    assert huge.replace(device="meta").create_tensor().nbytes == huge.nbytes
