# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from te_proto.errors import LayoutError
from te_proto.testing import load_golden

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def described(array: np.ndarray, dtype: str) -> dict[str, object]:
    return {"shape": list(array.shape), "stored": str(array.dtype), "torch_dtype": dtype}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    arrays: dict[str, np.ndarray] = {
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
    np.savez(path, allow_pickle=False, **arrays)
    path.with_suffix(".json").write_text(json.dumps({"header": {}, "cases": cases}))
    return path


def test_tensors_come_in_their_own_dtype(golden: Path) -> None:
    case = load_golden(golden)["plain"]
    assert case.record["source"] == "by hand"
    assert case["x"].dtype == torch.bfloat16
    assert case["x"].tolist() == [[1.0, -2.0]]
    assert case["data"].dtype == torch.float8_e4m3fn
    assert case["data"].view(torch.uint8).tolist() == [[0x38, 0xFF]]
    assert case["scale_inv"].tolist() == [0.5]
    assert case["amax"].shape == ()
    assert case["amax"].item() == 2.0


def test_refused_cases_are_told_apart_with_their_reason(golden: Path) -> None:
    cases = load_golden(golden)
    assert {name: case.allowed for name, case in cases.items()} == {
        "plain": True,
        "REFONLY_nan": False,
        "tiny": False,
    }
    assert cases["plain"].refused is None
    assert "REFONLY_" in str(cases["REFONLY_nan"].refused)
    assert cases["tiny"].refused == "kernel uses FLT_MAX"


def test_missing_tensor_is_named(golden: Path) -> None:
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
def test_files_that_disagree_are_refused(
    golden: Path, change: Callable[[dict[str, Any]], Any], got: str
) -> None:
    arrays: dict[str, np.ndarray] = dict(np.load(golden))
    change(arrays)
    np.savez(golden, allow_pickle=False, **arrays)
    with pytest.raises(LayoutError, match=f"array tiny.x must be .*, {got}"):
        load_golden(golden)
