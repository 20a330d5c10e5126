# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from te_proto.errors import LayoutError
from te_proto.testing import load_golden


def described(array: np.ndarray, dtype: str) -> dict[str, object]:
    return {"shape": list(array.shape), "stored": str(array.dtype), "torch_dtype": dtype}


@pytest.fixture
def golden(tmp_path):
    arrays = {
        "plain.x": np.array([[0x3F80, 0xC000]], np.uint16),
        "plain.data": np.array([[0x38, 0xFF]], np.uint8),
        "plain.scale_inv": np.array([0x3F000000], np.uint32),
        "plain.amax": np.array(0x40000000, np.uint32),
        "REFONLY_nan.x": np.array([0x7FC00000], np.uint32),
        "tiny.x": np.array([1], np.uint32),
    }
    cases = [
        {
            "case": "plain",
            "source": "by hand",
            "arrays": {
                "x": described(arrays["plain.x"], "bfloat16"),
                "data": described(arrays["plain.data"], "float8_e4m3fn"),
                "scale_inv": described(arrays["plain.scale_inv"], "float32"),
                "amax": described(arrays["plain.amax"], "float32"),
                "columnwise_data": None,
            },
        },
        {"case": "REFONLY_nan", "arrays": {"x": described(arrays["REFONLY_nan.x"], "float32")}},
        {
            "case": "tiny",
            "kernel_differs": "kernel uses FLT_MAX",
            "arrays": {"x": described(arrays["tiny.x"], "float32")},
        },
    ]
    path = tmp_path / "made.npz"
    np.savez(path, **arrays)
    path.with_suffix(".json").write_text(json.dumps({"header": {}, "cases": cases}))
    return path


def test_tensors_come_in_their_own_dtype(golden) -> None:
    case = load_golden(golden)["plain"]
    assert case.record["source"] == "by hand"
    assert case["x"].dtype == torch.bfloat16
    assert case["x"].tolist() == [[1.0, -2.0]]
    assert case["data"].dtype == torch.float8_e4m3fn
    assert case["data"].view(torch.uint8).tolist() == [[0x38, 0xFF]]
    assert case["scale_inv"].tolist() == [0.5]
    assert case["amax"].shape == ()
    assert case["amax"].item() == 2.0


def test_refused_cases_are_told_apart_with_their_reason(golden) -> None:
    cases = load_golden(golden)
    assert {name: case.allowed for name, case in cases.items()} == {
        "plain": True,
        "REFONLY_nan": False,
        "tiny": False,
    }
    assert cases["plain"].refused is None
    assert "REFONLY_" in cases["REFONLY_nan"].refused
    assert cases["tiny"].refused == "kernel uses FLT_MAX"


def test_missing_tensor_is_named(golden) -> None:
    case = load_golden(golden)["plain"]
    assert case.tensors["columnwise_data"] is None
    with pytest.raises(KeyError, match="has no tensor 'columnwise_data'; it has"):
        case["columnwise_data"]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda arrays: arrays.pop("tiny.x"), "got None"),
        (lambda arrays: arrays.update({"tiny.x": np.zeros(2, np.uint32)}), "got .*uint32.*2"),
        (lambda arrays: arrays.update({"tiny.x": np.zeros(1, np.uint16)}), "got .*uint16"),
    ],
)
def test_files_that_disagree_are_refused(golden, change, got) -> None:
    arrays = dict(np.load(golden))
    change(arrays)
    np.savez(golden, **arrays)
    with pytest.raises(LayoutError, match=f"array tiny.x must be .*, {got}"):
        load_golden(golden)
