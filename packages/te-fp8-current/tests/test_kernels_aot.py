# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of the kernels, without a GPU: registers, spills, widths, instructions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from te_proto.testing import AotReport, aot_report, crowded_by

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_current.kernels import amax, dequantize, quantize, transpose

if TYPE_CHECKING:
    from pathlib import Path

MAX_REGISTERS = 64  # eight blocks of four warps an SM, out of 65536 registers
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
SIZES = {"M": "i32", "K": "i32", "stride_m": "i32"}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(report: AotReport) -> None:
    assert report.spills == 0
    assert report.stack == 0
    assert report.registers <= MAX_REGISTERS
    assert max(report.load_widths) == 16
    # approximations, contraction and flushing are what would make a GPU differ from the reference
    for instruction in ("div.full", "ex2.approx", "fma.", ".ftz"):
        assert instruction not in report.ptx


def compiled(
    kernel: Any,
    target: str,
    pointers: dict[str, str | None],
    constexprs: dict[str, Any],
    sizes: dict[str, str] = SIZES,
    **scalars: str,
) -> AotReport:
    absent = {name: None for name, kind in pointers.items() if kind is None}
    present = {name: kind for name, kind in pointers.items() if kind is not None}
    return aot_report(
        kernel,
        {**present, **sizes, **scalars},
        {**absent, **constexprs},
        target=target,
        align16=list(sizes),
        options={"enable_fp_fusion": False},
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("x", "noop"), [("float32", None), ("bfloat16", "*fp32"), ("float16", None)]
)
def test_amax(target: str, x: str, noop: str | None, request: pytest.FixtureRequest) -> None:
    if x == "float32" and target != "sm_80":
        request.applymarker(crowded_by("3.8"))
    report = compiled(
        amax.amax_kernel,
        target,
        {"x_ptr": TYPES[x], "amax_ptr": "*i32", "noop_ptr": noop},
        {"stride_k": 1, "BM": amax.TILE[0], "BK": amax.TILE[1]},
    )
    check(report)
    # one update of memory a program, of integers: any order gives the same maximum
    (update,) = re.findall(r"\b(?:atom|red)\.(\S+)", report.ptx)
    assert update == "global.gpu.relaxed.max.s32"


QUANTIZE = [
    pytest.param("float32", "e4m3", {}, id="float32"),
    pytest.param("bfloat16", "e4m3", {"transpose_ptr": None}, id="bfloat16-codes"),
    pytest.param("bfloat16", "e5m2", {"codes_ptr": None}, id="bfloat16-e5m2-transpose"),
    pytest.param("float16", "e5m2", {"noop_ptr": "*fp32", "pow_2": True}, id="float16-pow-2-noop"),
]


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("x", "dtype", "options"), QUANTIZE)
def test_quantize(target: str, x: str, dtype: str, options: dict[str, Any]) -> None:
    hardware = target != "sm_80"
    pointers = {
        "x_ptr": TYPES[x],
        "amax_ptr": "*fp32",
        "codes_ptr": "*u8",
        "transpose_ptr": "*u8",
        "scale_inv_ptr": "*fp32",
        "noop_ptr": None,
    }
    report = compiled(
        quantize.quantize_kernel,
        target,
        {name: options.get(name, kind) for name, kind in pointers.items()},
        {
            "stride_k": 1,
            "DTYPE": dtype,
            "POW_2": options.get("pow_2", False),
            "HARDWARE": hardware,
            "BM": quantize.TILE[0],
            "BK": quantize.TILE[1],
        },
        epsilon="fp32",
    )
    check(report)
    assert max(report.store_widths) == 16
    assert report.ptx.count("div.rn.f32") >= 2  # the scale and its inverse
    assert report.cvt == ((f"cvt.rn.satfinite.{dtype}x2.f32",) if hardware else ())


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("moved", [False, True], ids=["codes", "transpose"])
@pytest.mark.parametrize(("out", "dtype"), [("bfloat16", "e4m3"), ("float32", "e5m2")])
def test_dequantize(target: str, moved: bool, out: str, dtype: str) -> None:
    sizes = {"M": "i32", "K": "i32", "stride_k" if moved else "stride_m": "i32"}
    report = compiled(
        dequantize.dequantize_kernel,
        target,
        {"codes_ptr": "*u8", "scale_inv_ptr": "*fp32", "out_ptr": TYPES[out]},
        {
            "stride_m" if moved else "stride_k": 1,
            "DTYPE": dtype,
            "HARDWARE": target != "sm_80",
            "BM": dequantize.TILE[0],
            "BK": dequantize.TILE[1],
        },
        sizes,
    )
    check(report)
    assert max(report.store_widths) == 16


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_transpose(target: str) -> None:
    report = compiled(
        transpose.transpose_kernel,
        target,
        {"codes_ptr": "*u8", "out_ptr": "*u8"},
        {"stride_k": 1, "BM": transpose.TILE[0], "BK": transpose.TILE[1]},
    )
    check(report)
    assert report.store_widths == {16: 4}
    assert report.load_widths == {16: 4}
