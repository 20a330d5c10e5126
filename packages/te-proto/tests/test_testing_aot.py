# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_proto.errors import TeError
from te_proto.testing import aot_report

pytest.importorskip("triton")

import triton
import triton.language as tl

if TYPE_CHECKING:
    from pathlib import Path


@triton.jit
def to_fp8(x):
    return x.to(tl.float32).to(tl.float8e4nv)


@triton.jit
def cast_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + i)
    tl.store(out_ptr + row * BLOCK + i, to_fp8(x))


@triton.jit
def divide_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x * x + 1.0 / x)


SIGNATURE = {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "stride": "i32"}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("align16", "widest"), [(("stride",), 16), ((), 2)])
def test_report_shows_what_alignment_buys(align16: tuple[str, ...], widest: int) -> None:
    r = aot_report(cast_kernel, SIGNATURE, {"BLOCK": 1024}, "sm_90", align16=align16)
    assert (r.kernel, r.target) == ("cast_kernel", "sm_90a")
    assert r.widest_load == widest
    assert r.load_widths == ({16: 1} if widest == 16 else {2: 8})
    assert r.widest_store == 8
    assert r.spills == r.stack == 0
    assert 8 <= r.registers <= 64
    assert any("e4m3x2.f32" in form for form in r.cvt)
    assert ".visible .entry cast_kernel" in r.ptx


def test_options_reach_the_compiler() -> None:
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
    fused = aot_report(divide_kernel, signature, {"BLOCK": 128}, "sm_80")
    apart = aot_report(
        divide_kernel, signature, {"BLOCK": 128}, "sm_80", options={"enable_fp_fusion": False}
    )
    assert "fma.rn.f32" in fused.ptx
    assert "fma.rn.f32" not in apart.ptx
    # what a CPU cannot show: a plain division is approximate
    assert "div.full.f32" in apart.ptx


@pytest.mark.parametrize(
    ("signature", "constexprs", "target", "message"),
    [
        (SIGNATURE, {}, "sm_90", "parameter BLOCK is in neither of signature and constexprs"),
        (SIGNATURE, {"BLOCK": 8, "stride": 1}, "sm_90", "parameter stride is in both"),
        (SIGNATURE, {"BLOCK": 8, "block": 1}, "sm_90", "no parameter 'block'"),
        (SIGNATURE, {"BLOCK": 8}, "gfx942", "target must be sm_ and a number"),
    ],
)
def test_wrong_argument_is_refused(
    signature: dict[str, str], constexprs: dict[str, Any], target: str, message: str
) -> None:
    with pytest.raises(TeError, match=message):
        aot_report(cast_kernel, signature, constexprs, target)


def test_plain_function_is_refused() -> None:
    with pytest.raises(TeError, match="must be a JITFunction, got function"):
        aot_report(lambda: None, {}, {})


def test_interpreter_and_compiler_share_one_process(cpu_triton: None) -> None:
    x = torch.linspace(-500, 500, 32).to(torch.bfloat16).view(2, 16)
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    reports = []
    for _ in range(2):
        out = torch.empty(2, 16, dtype=torch.float8_e4m3fn)
        cast_kernel[(2,)](x, out, 16, BLOCK=16)
        assert torch.equal(out.view(torch.uint8), expected)
        reports.append(aot_report(cast_kernel, SIGNATURE, {"BLOCK": 256}))
    assert reports[0] == reports[1]
