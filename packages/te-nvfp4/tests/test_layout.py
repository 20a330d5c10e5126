# SPDX-License-Identifier: Apache-2.0
"""Which buffers a shape has and which shapes a plane holds, against the peer's own layout rows."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_nvfp4.layout import buffer_shapes, scale_shape
from te_nvfp4.quantizer import NVFP4Quantizer
from te_nvfp4.tensor import NVFP4Storage, NVFP4Tensor
from te_proto import TensorProto
from te_proto.errors import ShapeError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "layout.json").read_text("utf-8"))
CLASSES = {"NVFP4Tensor": NVFP4Tensor, "NVFP4TensorStorage": NVFP4Storage}
USAGES = ((True, True), (True, False), (False, True), (False, False))
TWO_D = {"with_2d_quantization": True}
LINES = {"row_scaled_nvfp4": True}


def row_id(row: dict[str, Any]) -> str:
    planes = [plane for plane in ("rowwise", "columnwise") if row[plane]]
    size = "x".join(map(str, row["shape"])) or "scalar"
    lines = "lines-" if row["row_scaled_nvfp4"] else ""
    return f"{lines}{'+'.join(planes) or 'neither'}-{size}"


ROWS = {row_id(row): row for row in GOLDEN["inner_tensor_specs"]}

SCALAR = "nvfp4: x must have at least one axis, got a 0-d tensor; reshape it to (1, K)"
RAGGED_K = (
    "nvfp4: the last axis of x must be a multiple of {}, got {} in shape {}; pad it to {} first"
)
RAGGED_M = (
    "nvfp4: the rows of x, all axes but the last together, must be a multiple of {}, got {} in "
    "shape {}; pad them to {} first, or turn the columnwise usage off"
)

# The rows that are no expectation of ours, each with what we say instead. The peer's Python helper
# does not check: it divides ragged sizes with the remainder lost, and so describes buffers without
# the last blocks, which its allocator then refuses; a 0-d shape ends in an IndexError, or in a
# tensor of no plane. The kernels of row-scaled columnwise planes need multiples of 32.
REFUSED = {
    **{
        f"{lines}{planes}-scalar": SCALAR
        for lines in ("", "lines-")
        for planes in ("rowwise+columnwise", "rowwise", "columnwise", "neither")
    },
    "rowwise+columnwise-64": RAGGED_M.format(16, 1, (64,), 16),
    "columnwise-64": RAGGED_M.format(16, 1, (64,), 16),
    "rowwise+columnwise-17x33": RAGGED_K.format(16, 33, (17, 33), 48),
    "rowwise-17x33": RAGGED_K.format(16, 33, (17, 33), 48),
    "columnwise-17x33": RAGGED_M.format(16, 17, (17, 33), 32),
    "lines-rowwise-17x33": RAGGED_K.format(16, 33, (17, 33), 48),
    "lines-rowwise+columnwise-64": RAGGED_M.format(32, 1, (64,), 32),
    "lines-columnwise-64": RAGGED_M.format(32, 1, (64,), 32),
    "lines-rowwise+columnwise-16x16": RAGGED_K.format(32, 16, (16, 16), 32),
    "lines-columnwise-16x16": RAGGED_K.format(32, 16, (16, 16), 32),
    "lines-rowwise+columnwise-48x64": RAGGED_M.format(32, 48, (48, 64), 64),
    "lines-columnwise-48x64": RAGGED_M.format(32, 48, (48, 64), 64),
    "lines-rowwise+columnwise-17x33": RAGGED_K.format(32, 33, (17, 33), 64),
    "lines-columnwise-17x33": RAGGED_K.format(32, 33, (17, 33), 64),
}


def proto(shape: tuple[int, ...], **options: Any) -> TensorProto:
    return TensorProto(shape=shape, dtype=torch.bfloat16, quantizer=NVFP4Quantizer(**options))


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("rowwise", "columnwise", "row_scaled_nvfp4")}


def test_every_row_of_the_peer_is_tested_once() -> None:
    assert len(ROWS) == len(GOLDEN["inner_tensor_specs"]) == 80
    assert (len(GOLDEN["value_identity"]), len(GOLDEN["create_metadata"])) == (4, 4)
    assert GOLDEN["inner_tensors"].keys() == CLASSES.keys()
    assert REFUSED.keys() < ROWS.keys()


def from_cpp(row: dict[str, Any]) -> list[list[Any]]:
    """Return the row as the peer's allocator has it: its Python helper differs in two buffers."""
    m, k = math.prod(row["shape"][:-1]), row["shape"][-1]
    fixed = {"_columnwise_data": [k, m // 2]}
    if row["row_scaled_nvfp4"]:
        fixed["_amax_columnwise"] = [k]
    return [[name, fixed.get(name, shape), dtype] for name, shape, dtype in row["specs"]]


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_buffers_are_those_of_the_peer(name: str, swizzled: bool) -> None:
    row = ROWS[name]
    specs = proto(tuple(row["shape"]), optimize_for_gemm=swizzled, **options_of(row)).inner_specs()
    found = [[f"_{name}", list(spec.shape), spec.dtype] for name, spec in specs.items()]
    assert found == [[name, shape, getattr(torch, dtype)] for name, shape, dtype in from_cpp(row)]


@pytest.mark.parametrize("name", REFUSED)
def test_shape_that_the_peer_lets_through_is_refused(name: str) -> None:
    refused = proto(tuple(ROWS[name]["shape"]), **options_of(ROWS[name]))
    with pytest.raises(ShapeError) as raised:
        refused.inner_specs()
    assert str(raised.value) == REFUSED[name]


@pytest.mark.parametrize("name", CLASSES)
def test_inner_tensors_have_the_names_and_order_of_the_peer(name: str) -> None:
    assert list(CLASSES[name].inner_names) == [kwarg for _, kwarg in GOLDEN["inner_tensors"][name]]


@pytest.mark.parametrize("row", GOLDEN["value_identity"], ids=lambda row: row["label"])
def test_fields_of_the_quantizer_are_the_identity_of_the_peer(row: dict[str, Any]) -> None:
    items = {name.removesuffix("_usage"): value for name, value in row["key_items"]}
    mask = items.pop("rht_matrix_random_sign_mask_t")
    assert items.pop("dtype") == 10  # the peer's number of E2M1
    q = NVFP4Quantizer(**items, with_random_sign_mask=mask != 0)
    state = q.state()
    # ours are the constructor's: the flag of the signs instead of their mask, and the error domain
    assert state.pop("with_random_sign_mask") is (mask != 0)
    assert state.pop("nvfp4_4over6_err_use_fast_math") is False
    assert state.pop("dtype") == "e2m1"
    assert list(state.items()) == list(items.items())
    assert q.rht_matrix_random_sign_mask_t == mask
    assert NVFP4Quantizer.__qualname__ == row["key_class"]
    source, classes = q.__fx_repr__()
    rebuilt = eval(source, dict(classes))
    assert (rebuilt == q) is row["rebuilt_equal"]
    assert (hash(rebuilt) == hash(q)) is row["rebuilt_hash_equal"]


def metadata_id(row: dict[str, Any]) -> str:
    order = "swizzled" if row["optimize_for_gemm"] else "compact"
    return f"{order}-{'internal' if row['internal'] else 'tensor'}"


@pytest.mark.parametrize("row", GOLDEN["create_metadata"], ids=metadata_id)
def test_metadata_are_those_of_the_peer(row: dict[str, Any]) -> None:
    q = NVFP4Quantizer(internal=row["internal"], optimize_for_gemm=row["optimize_for_gemm"])
    context, kwargs = q.create_metadata(torch.bfloat16), row["nontensor_kwargs"]
    assert context.cls is CLASSES[row["cls"]]
    assert issubclass(context.cls, torch.Tensor) is row["is_tensor"]
    assert str(context.dtype) == kwargs["fake_dtype"]
    found = context.quantizer
    assert isinstance(found, NVFP4Quantizer)
    assert (found.dtype, kwargs["fp4_dtype"]) == ("e2m1", 10)
    assert found.optimize_for_gemm is kwargs["with_gemm_swizzled_scales"]
    for option in ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"):
        assert getattr(found, option) == kwargs[option]


# -- which shapes a plane can hold ----------------------------------------------------------------


def shapes() -> list[tuple[int, ...]]:
    """Every [M, K] around the first multiples of 16, and N-d shapes whose rows multiply to one."""
    sizes = (0, 1, 2, 15, 16, 17, 31, 32, 48, 127, 128)
    matrices = list(itertools.product(sizes, sizes))
    lines = [(k,) for k in sizes]
    cubes = list(itertools.product((0, 1, 2, 3), (8, 16, 24), (15, 16, 32)))
    return [*matrices, *lines, *cubes, (2, 2, 4, 16), (2, 2, 2, 2, 2, 32), (0, 0, 16)]


@pytest.mark.parametrize("feature", [{}, TWO_D, LINES], ids=["1d", "2d", "lines"])
@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
def test_check_shape_alignment_and_rule_agree(
    rowwise: bool, columnwise: bool, feature: dict[str, bool]
) -> None:
    q = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise, **feature)
    rows, columns = q.alignment()
    held, two_d = rowwise or columnwise, feature == TWO_D
    both = 32 if feature == LINES and columnwise else 16 if two_d and held else 1
    seen = set()
    for shape in shapes():
        m, k = math.prod(shape[:-1]), shape[-1]
        fits = not (
            (k % 16 and rowwise) or (m % 16 and columnwise) or k % both != 0 or m % both != 0
        )
        assert (m % rows == 0 and k % columns == 0) is fits, shape
        if fits:
            q.check_shape(shape)
        else:
            with pytest.raises(ShapeError):
                q.check_shape(shape)
        seen.add(fits)
    assert seen == ({True, False} if held else {True})


@pytest.mark.parametrize(
    ("options", "alignment"),
    [
        pytest.param({}, (16, 16), id="both"),
        pytest.param({"columnwise": False}, (1, 16), id="rowwise"),
        pytest.param({"rowwise": False}, (16, 1), id="columnwise"),
        pytest.param({"rowwise": False, "columnwise": False}, (1, 1), id="neither"),
        pytest.param(TWO_D | {"columnwise": False}, (16, 16), id="rowwise-2d"),
        pytest.param(TWO_D | {"rowwise": False}, (16, 16), id="columnwise-2d"),
        pytest.param(LINES, (32, 32), id="both-lines"),
        pytest.param(LINES | {"columnwise": False}, (1, 16), id="rowwise-lines"),
    ],
)
def test_alignment(options: dict[str, bool], alignment: tuple[int, int]) -> None:
    assert NVFP4Quantizer(**options).alignment() == alignment


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        pytest.param(
            (4, 100), {"columnwise": False}, RAGGED_K.format(16, 100, (4, 100), 112), id="k"
        ),
        pytest.param((3, 4, 64), {}, RAGGED_M.format(16, 12, (3, 4, 64), 16), id="m"),
        pytest.param(
            (33, 64),
            TWO_D | {"columnwise": False},
            RAGGED_M.format(16, 33, (33, 64), 48).removesuffix(
                ", or turn the columnwise usage off"
            ),
            id="2d-m-has-no-other-way-out",
        ),
        pytest.param((48, 64), LINES, RAGGED_M.format(32, 48, (48, 64), 64), id="lines"),
    ],
)
def test_ragged_shape_is_refused_by_quantize_too(
    shape: tuple[int, ...], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(ShapeError) as raised:
        NVFP4Quantizer(**options).quantize(torch.zeros(shape, dtype=torch.bfloat16))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((5, 64), {"columnwise": False}, id="rowwise-of-5-rows"),
        pytest.param((64, 5), {"rowwise": False}, id="columnwise-of-5-columns"),
        pytest.param((96,), {"columnwise": False}, id="rowwise-of-a-line"),
        pytest.param((5, 64), LINES | {"columnwise": False}, id="lines-of-5-rows"),
    ],
)
def test_plane_binds_only_its_own_axis(shape: tuple[int, ...], options: dict[str, bool]) -> None:
    x = torch.linspace(-2, 2, math.prod(shape)).reshape(shape)
    q = NVFP4Quantizer(**options).quantize(x)
    # half the step of a sixth of the block's maximum, and the rounding of its scale
    assert ((q.dequantize() - x).abs() <= 2 * 1.07 / 6).all()


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "scales"),
    [
        pytest.param(16, 16, (128, 4), id="less-than-a-tile"),
        pytest.param(128, 64, (128, 4), id="one-tile"),
        pytest.param(160, 288, (256, 20), id="ragged-tiles"),
        pytest.param(0, 64, (0, 4), id="no-lines"),
        pytest.param(64, 0, (128, 0), id="empty-lines"),
    ],
)
def test_scales_are_padded_to_whole_tiles(outer: int, inner: int, scales: tuple[int, int]) -> None:
    assert scale_shape(outer, inner) == scales


def test_layout_needs_no_torch() -> None:
    code = "import sys, te_nvfp4.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_buffers_come_in_canonical_order_whatever_is_asked_for() -> None:
    found = buffer_shapes((32, 48), row_scaled=True, columnwise=True, rowwise=True)
    assert found == {
        "rowwise_data": (32, 24),
        "rowwise_scale_inv": (128, 4),
        "columnwise_data": (48, 16),
        "columnwise_scale_inv": (128, 4),
        "amax_rowwise": (32,),
        "amax_columnwise": (48,),
    }
    assert list(found)[-2:] == ["amax_rowwise", "amax_columnwise"]


def test_sizes_beyond_31_bits_are_exact() -> None:
    huge = proto((2**20, 2**12 + 32), **LINES)
    expected = {
        "rowwise_data": 2_164_260_864,
        "rowwise_scale_inv": 272_629_760,  # 2**20 rows of 258 blocks, padded to 260
        "columnwise_data": 2_164_260_864,
        "columnwise_scale_inv": 276_824_064,  # 4128 columns, padded to 4224, of 65536 blocks
        "amax_rowwise": 4_194_304,
        "amax_columnwise": 16_512,
    }
    assert huge.buffer_nbytes() == expected
    assert huge.nbytes == sum(expected.values())
    assert huge.replace(device="meta").create_tensor().nbytes == huge.nbytes
