# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of the kernels, without a GPU: registers, spills, widths, instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from te_nvfp4 import NVFP4Quantizer
from te_proto.testing import AotReport, aot_report, crowded_by

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_nvfp4.kernels.amax import TILE as AMAX_TILE
from te_nvfp4.kernels.amax import amax_kernel
from te_nvfp4.kernels.dequantize import TILE as DEQUANTIZE_TILE
from te_nvfp4.kernels.dequantize import dequantize_kernel
from te_nvfp4.kernels.quantize import TILE, quantize_kernel

if TYPE_CHECKING:
    from pathlib import Path

MAX_REGISTERS = 128  # four blocks of four warps an SM, out of 65536 registers
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
E4M3, E2M1 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e2m1x2.f32"
RHT = {"with_rht": True, "with_post_rht_amax": True}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(report: AotReport, registers: int = MAX_REGISTERS) -> None:
    assert report.spills == 0
    assert report.stack == 0
    assert report.registers <= registers
    # approximations, contraction and flushing are what would make a GPU differ from the reference
    for instruction in ("div.full", "ex2.approx", "fma.rn.f32", ".ftz"):
        assert instruction not in report.ptx


def signature(pointers: dict[str, str | None], *rest: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types of what is there, and None for the pointers that are not."""
    types = {name: kind for name, kind in pointers.items() if kind is not None}
    types |= dict.fromkeys(rest, "i32")
    return types, {name: None for name, kind in pointers.items() if kind is None}


def quantize_report(
    target: str, options: dict[str, Any], x: str = "bfloat16", noop: bool = False
) -> AotReport:
    q = NVFP4Quantizer(**options)
    row, column = (q.rowwise or None), (q.columnwise or None)
    types, constexprs = signature(
        {
            "x_ptr": TYPES[x],
            "row_amax_ptr": row and "*fp32",
            "col_amax_ptr": column and "*fp32",
            "row_codes_ptr": row and "*u8",
            "row_scales_ptr": row and "*u8",
            "row_amax_out_ptr": row and "*fp32",
            "col_codes_ptr": column and "*u8",
            "col_scales_ptr": column and "*u8",
            "col_amax_out_ptr": column and "*fp32",
            "rng_ptr": "*i64" if q.stochastic_rounding else None,
            "noop_ptr": "*fp32" if noop else None,
        },
        "M",
        "K",
        "stride_m",
    )
    constexprs |= {
        "stride_k": 1,
        "ROWWISE": q.rowwise,
        "COLUMNWISE": q.columnwise,
        "RHT": q.with_rht,
        "SIGN_MASK": q.rht_matrix_random_sign_mask_t,
        "SIX_E": 6.0 * q.nvfp4_e4m3_max,
        "PER_LINE": q.row_scaled_nvfp4,
        "TWO_D": q.with_2d_quantization,
        "FOUR_OVER_SIX": q.nvfp4_use_4over6,
        "SQUARED": q.nvfp4_4over6_err_mode == "MSE",
        "FAST": q.nvfp4_4over6_err_use_fast_math,
        "SWIZZLED": q.optimize_for_gemm,
        "FLOAT8": target != "sm_80",
        "FLOAT4": target in ("sm_100", "sm_120"),
        "BM": TILE[0],
        "BK": TILE[1],
    }
    return aot_report(
        quantize_kernel,
        types,
        constexprs,
        target=target,
        align16=["M", "K", "stride_m"],
        num_warps=8,
        options={"enable_fp_fusion": False},
    )


QUANTIZE = {
    "both": {},
    "rowwise": {"columnwise": False},
    "columnwise-swizzled": {"rowwise": False, "optimize_for_gemm": True},
    "2d-swizzled": {"with_2d_quantization": True, "optimize_for_gemm": True},
    "rht": RHT,
    "gradient": {**RHT, "stochastic_rounding": True},
    "row-scaled": {"row_scaled_nvfp4": True},
    "4over6": {"nvfp4_use_4over6": True, "columnwise": False},
    "4over6-2d": {"nvfp4_use_4over6": True, "with_2d_quantization": True},
}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", QUANTIZE)
def test_quantize(target: str, name: str, request: pytest.FixtureRequest) -> None:
    if name == "4over6-2d" or (name, target) == ("row-scaled", "sm_90"):
        request.applymarker(crowded_by("3.6"))
    options = QUANTIZE[name]
    report = quantize_report(target, options, noop=name == "both")
    check(report, 168 if name == "4over6-2d" else MAX_REGISTERS)
    assert max(report.load_widths) == 16
    assert max(report.store_widths) == 8  # a row of a tile is packed into an eighth of a warp
    # a choice and a stochastic rounding have no conversion of their own
    converts = target == "sm_100" and not name.startswith(("4over6", "gradient"))
    assert report.cvt == ((E2M1, E4M3) if converts else (E4M3,))


@pytest.mark.parametrize("x", TYPES)
def test_quantize_reads_every_input(x: str) -> None:
    check(quantize_report("sm_90", {}, x))


@pytest.mark.parametrize(("target", "conversions"), [("sm_80", ()), ("sm_120", (E2M1, E4M3))])
def test_quantize_on_other_targets(target: str, conversions: tuple[str, ...]) -> None:
    report = quantize_report(target, RHT)
    check(report)
    assert report.cvt == conversions


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("per_line", [False, True], ids=["one", "per-line"])
@pytest.mark.parametrize("rht", [False, True], ids=["plain", "rht"])
def test_amax(target: str, per_line: bool, rht: bool) -> None:
    report = aot_report(
        amax_kernel,
        {"x_ptr": "*bf16", "rows_ptr": "*i32", "cols_ptr": "*i32"}
        | dict.fromkeys(("M", "K", "stride_m"), "i32"),
        {
            "noop_ptr": None,
            "stride_k": 1,
            "ROWWISE": True,
            "COLUMNWISE": True,
            "PER_LINE": per_line,
            "RHT": rht,
            "SIGN_MASK": 0xD7E8,
            "BM": AMAX_TILE[0],
            "BK": AMAX_TILE[1],
        },
        target=target,
        align16=["M", "K", "stride_m"],
        options={"enable_fp_fusion": False},
    )
    check(report)
    assert max(report.load_widths) == 16


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("out", "columnwise", "rht", "swizzled"),
    [
        pytest.param("bfloat16", False, False, False, id="rowwise"),
        pytest.param("float32", True, True, True, id="columnwise-rht-swizzled"),
    ],
)
def test_dequantize(target: str, out: str, columnwise: bool, rht: bool, swizzled: bool) -> None:
    report = aot_report(
        dequantize_kernel,
        {"codes_ptr": "*u8", "scales_ptr": "*u8", "amax_ptr": "*fp32", "out_ptr": TYPES[out]}
        | {"M": "i32", "K": "i32"},
        {
            "COLUMNWISE": columnwise,
            "RHT": rht,
            "SIGN_MASK": 0xD7E8,
            "RECIPROCAL": 1.0 / 2688.0,
            "PER_LINE": False,
            "SWIZZLED": swizzled,
            "FLOAT8": target != "sm_80",
            "BM": DEQUANTIZE_TILE[0],
            "BK": DEQUANTIZE_TILE[1],
        },
        target=target,
        align16=["M", "K"],
        options={"enable_fp_fusion": False},
    )
    check(report)
    assert max(report.store_widths) == 16
