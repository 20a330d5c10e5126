# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of the kernels, without a GPU: registers, spills, widths, instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_proto.testing import AotReport, aot_report, crowded_by

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_block.kernels.dequantize import TILE as DEQUANTIZE_TILE
from te_fp8_block.kernels.dequantize import dequantize_kernel
from te_fp8_block.kernels.quantize import (
    COLUMNWISE_TILE,
    ROWWISE_TILE,
    TILE,
    quantize_kernel,
    warps_of,
)
from te_fp8_block.kernels.transpose import TILE as TRANSPOSE_TILE
from te_fp8_block.kernels.transpose import transpose_kernel

if TYPE_CHECKING:
    from pathlib import Path

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(report: AotReport, *, most: int) -> None:
    assert report.spills == 0
    assert report.stack == 0
    assert report.registers <= most
    assert max(report.load_widths) == 16
    assert max(report.store_widths) == 16
    # approximations, contraction and flushing are what would make a GPU differ from the reference
    for instruction in ("div.full", "ex2.approx", "fma.", ".ftz"):
        assert instruction not in report.ptx


def quantize_report(
    target: str,
    *,
    x: str = "bfloat16",
    planes: str = "both",
    dtype: str = "e4m3",
    two_d: bool = False,
    pow_2: bool = True,
    hardware: bool = True,
    noop: bool = False,
) -> AotReport:
    signature = {"x_ptr": TYPES[x], "M": "i32", "K": "i32", "stride_m": "i32", "epsilon": "fp32"}
    constexprs: dict[str, Any] = {"stride_k": 1}
    row, column = planes != "columnwise", planes != "rowwise"
    pointers = {
        "row_codes_ptr": ("*u8", row),
        "row_scales_ptr": ("*fp32", row),
        "col_codes_ptr": ("*u8", column),
        "col_scales_ptr": ("*fp32", column),
        "noop_ptr": ("*fp32", noop),
    }
    for name, (kind, present) in pointers.items():
        if present:
            signature[name] = kind
        else:
            constexprs[name] = None
    tile = TILE
    if not two_d and planes != "both":
        tile = ROWWISE_TILE if row else COLUMNWISE_TILE
    constexprs |= {
        "DTYPE": dtype,
        "TOP": 448.0 if dtype == "e4m3" else 57344.0,
        "LARGEST": torch.finfo(getattr(torch, x)).max,
        "POW_2": pow_2,
        "ROWWISE": row,
        "COLUMNWISE": column,
        "TWO_D": two_d,
        "HARDWARE": hardware,
        "BM": tile[0],
        "BK": tile[1],
    }
    return aot_report(
        quantize_kernel,
        signature,
        constexprs,
        target=target,
        align16=["M", "K", "stride_m"],
        num_warps=warps_of(tile, hardware=hardware),
        options={"enable_fp_fusion": False},
    )


QUANTIZE = [
    # registers: 512 threads of at most 128 fill an SM, as do 1024 of 64
    pytest.param({}, 128, id="both"),
    pytest.param({"x": "float32", "pow_2": False}, 128, id="both-float32"),
    pytest.param({"two_d": True, "x": "float16", "dtype": "e5m2"}, 80, id="2d-float16-e5m2"),
    pytest.param({"planes": "rowwise", "noop": True}, 64, id="rowwise-noop"),
    pytest.param({"planes": "columnwise"}, 80, id="columnwise"),
]


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("options", "most"), QUANTIZE)
def test_quantize(
    target: str, options: dict[str, Any], most: int, request: pytest.FixtureRequest
) -> None:
    if (target, options) == ("sm_100", {"planes": "columnwise"}):
        request.applymarker(crowded_by("3.8"))
    report = quantize_report(target, **options)
    check(report, most=most)
    assert report.cvt == (f"cvt.rn.satfinite.{options.get('dtype', 'e4m3')}x2.f32",)
    assert "div.rn.f32" in report.ptx


@pytest.mark.parametrize(
    ("target", "hardware"),
    [
        pytest.param("sm_80", False, marks=crowded_by("3.8", "3.9")),
        ("sm_89", True),
        ("sm_120", True),
    ],
)
def test_quantize_on_other_targets(target: str, hardware: bool) -> None:
    report = quantize_report(target, hardware=hardware)
    check(report, most=128)
    assert bool(report.cvt) == hardware


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("out", "dtype", "columnwise", "two_d"),
    [
        pytest.param("bfloat16", "e4m3", False, False, id="rowwise-1d"),
        pytest.param("float32", "e5m2", True, True, id="columnwise-2d"),
    ],
)
def test_dequantize(target: str, out: str, dtype: str, columnwise: bool, two_d: bool) -> None:
    report = aot_report(
        dequantize_kernel,
        {
            "codes_ptr": "*u8",
            "scales_ptr": "*fp32",
            "out_ptr": TYPES[out],
            "R": "i32",
            "C": "i32",
            "stride_r": "i32",
        },
        {
            "stride_c": 1,
            "DTYPE": dtype,
            "COLUMNWISE": columnwise,
            "TWO_D": two_d,
            "HARDWARE": target != "sm_80",
            "BR": DEQUANTIZE_TILE[0],
            "BC": DEQUANTIZE_TILE[1],
        },
        target=target,
        align16=["R", "C", "stride_r"],
        options={"enable_fp_fusion": False},
    )
    check(report, most=64)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_transpose(target: str) -> None:
    report = aot_report(
        transpose_kernel,
        {"codes_ptr": "*u8", "out_ptr": "*u8", "R": "i32", "C": "i32", "stride_r": "i32"},
        {"stride_c": 1, "BR": TRANSPOSE_TILE[0], "BC": TRANSPOSE_TILE[1]},
        target=target,
        align16=["R", "C", "stride_r"],
    )
    check(report, most=64)
