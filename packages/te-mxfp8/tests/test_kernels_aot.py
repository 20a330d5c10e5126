# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of the kernels, without a GPU: registers, spills, widths, instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from te_proto.testing import AotReport, aot_report

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_mxfp8.kernels.dequantize import TILE as DEQUANTIZE_TILE
from te_mxfp8.kernels.dequantize import dequantize_kernel
from te_mxfp8.kernels.quantize import TILE, quantize_kernel

if TYPE_CHECKING:
    from pathlib import Path

MAX_REGISTERS = 96  # five blocks of four warps an SM, out of 65536 registers
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(report: AotReport) -> None:
    assert report.spills == 0
    assert report.stack == 0
    assert report.registers <= MAX_REGISTERS
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
    swizzled: bool = False,
    hardware: bool = True,
    noop: bool = False,
) -> AotReport:
    signature = {"x_ptr": TYPES[x], "M": "i32", "K": "i32", "stride_m": "i32"}
    constexprs: dict[str, Any] = {"stride_k": 1}
    row, column = planes != "columnwise", planes != "rowwise"
    pointers = {
        "row_codes_ptr": ("*u8", row),
        "row_scales_ptr": ("*u8", row),
        "col_codes_ptr": ("*u8", column),
        "col_scales_ptr": ("*u8", column),
        "noop_ptr": ("*fp32", noop),
    }
    for name, (kind, present) in pointers.items():
        if present:
            signature[name] = kind
        else:
            constexprs[name] = None
    constexprs |= {
        "DTYPE": dtype,
        "ROWWISE": row,
        "COLUMNWISE": column,
        "TWO_D": two_d,
        "SWIZZLED": swizzled,
        "HARDWARE": hardware,
        "BM": TILE[0],
        "BK": TILE[1],
    }
    return aot_report(
        quantize_kernel,
        signature,
        constexprs,
        target=target,
        align16=["M", "K", "stride_m"],
        options={"enable_fp_fusion": False},
    )


QUANTIZE = [
    pytest.param({}, id="both"),
    pytest.param({"x": "float32"}, id="float32"),
    pytest.param({"x": "float16", "dtype": "e5m2", "swizzled": True}, id="float16-e5m2-swizzled"),
    pytest.param({"two_d": True, "swizzled": True}, id="2d-swizzled"),
    pytest.param({"planes": "rowwise", "noop": True}, id="rowwise-noop"),
    pytest.param({"planes": "columnwise", "swizzled": True}, id="columnwise-swizzled"),
]


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("options", QUANTIZE)
def test_quantize(target: str, options: dict[str, Any]) -> None:
    report = quantize_report(target, **options)
    check(report)
    conversion = f"cvt.rn.satfinite.{options.get('dtype', 'e4m3')}x2.f32"
    assert report.cvt == (conversion,)


@pytest.mark.parametrize(
    ("target", "hardware"), [("sm_80", False), ("sm_89", True), ("sm_120", True)]
)
def test_quantize_on_other_targets(target: str, hardware: bool) -> None:
    report = quantize_report(target, hardware=hardware)
    check(report)
    assert bool(report.cvt) == hardware


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("out", "dtype", "columnwise", "swizzled"),
    [
        pytest.param("bfloat16", "e4m3", False, False, id="rowwise"),
        pytest.param("float32", "e5m2", True, True, id="columnwise-swizzled"),
    ],
)
def test_dequantize(target: str, out: str, dtype: str, columnwise: bool, swizzled: bool) -> None:
    report = aot_report(
        dequantize_kernel,
        {
            "codes_ptr": "*u8",
            "scales_ptr": "*u8",
            "out_ptr": TYPES[out],
            "M": "i32",
            "K": "i32",
            "stride_m": "i32",
        },
        {
            "stride_k": 1,
            "DTYPE": dtype,
            "COLUMNWISE": columnwise,
            "SWIZZLED": swizzled,
            "HARDWARE": target != "sm_80",
            "BM": DEQUANTIZE_TILE[0],
            "BK": DEQUANTIZE_TILE[1],
        },
        target=target,
        align16=["M", "K", "stride_m"],
        options={"enable_fp_fusion": False},
    )
    check(report)
