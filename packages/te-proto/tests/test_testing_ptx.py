# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from te_proto.testing import _exact as exact
from te_proto.testing import _ptx

pytest.importorskip("triton")

import triton
import triton.language as tl

# four pairs of e2m1, the even element in the low half of its byte
PACK = """
{
.reg .b8 b0, b1, b2, b3;
cvt.rn.satfinite.e2m1x2.f32 b0, $5, $1;
cvt.rn.satfinite.e2m1x2.f32 b1, $6, $2;
cvt.rn.satfinite.e2m1x2.f32 b2, $7, $3;
cvt.rn.satfinite.e2m1x2.f32 b3, $8, $4;
mov.b32 $0, {b0, b1, b2, b3};
}
"""
CONSTRAINTS = "=r,r,r,r,r,r,r,r,r"
LOW = [0.0, 1.0, -2.0, 6.0]
HIGH = [0.5, -1.5, 3.0, float("nan")]
BYTES = [0x10, 0xB2, 0x5C, 0x77]


@triton.jit
def asm_kernel(low_ptr, high_ptr, out_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    i = tl.arange(0, 4)
    low, high = tl.load(low_ptr + i), tl.load(high_ptr + i)
    out = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [low, high], tl.uint8, is_pure=True, pack=4)
    tl.store(out_ptr + i, out)


def run(asm: str, constraints: str = CONSTRAINTS) -> list[int]:
    out = torch.zeros(4, dtype=torch.uint8)
    asm_kernel[(1,)](torch.tensor(LOW), torch.tensor(HIGH), out, ASM=asm, CONSTRAINTS=constraints)
    return out.tolist()


def test_inline_ptx_runs_in_a_kernel(cpu_triton: None) -> None:
    assert run(PACK) == BYTES


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("b0, $5, $1", "b0, $1, $5", id="operands-swapped"),
        pytest.param("b1, $6, $2", "b1, $6, $3", id="wrong-operand"),
        pytest.param("{b0, b1, b2, b3}", "{b3, b2, b1, b0}", id="bytes-reversed"),
    ],
)
def test_mutation_changes_the_bytes(cpu_triton: None, old: str, new: str) -> None:
    assert PACK.count(old) == 1
    assert run(PACK.replace(old, new)) != BYTES


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(".reg .b8", ".reg .b16", "b0 is 16 bits wide where 8 are needed", id="width"),
        pytest.param("b0, b1, b2, b3;", "b0, b1, b2;", "'b3' is neither", id="undeclared"),
        pytest.param("b3, $8, $4", "b2, $8, $4", "b3 is read before", id="unwritten"),
        pytest.param("b3, $8, $4", "b3, $9, $4", r"'\$9' is neither", id="number"),
        pytest.param("b3, $8, $4", "b3, $8", "takes 3 operands, got 2", id="count"),
        pytest.param("cvt.rn.sat", "cvt.rs.sat", "is not emulated", id="unknown"),
    ],
)
def test_what_ptxas_would_refuse_raises(cpu_triton: None, old: str, new: str, message: str) -> None:
    with pytest.raises(_ptx.PtxError, match=message):
        run(PACK.replace(old, new, 1))


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        pytest.param(CONSTRAINTS[:-2], "needs 1 output and 8 input registers", id="one-missing"),
        pytest.param("=h" + CONSTRAINTS[2:], "[$]0 is 16 bits wide where 32", id="narrow-output"),
        pytest.param("=r,h" + CONSTRAINTS[4:], "means 16 bits, need 32", id="narrow-input"),
        pytest.param("=q" + CONSTRAINTS[2:], "constraint '=q' is not one of", id="unknown-letter"),
    ],
)
def test_constraints_must_fit(cpu_triton: None, constraints: str, message: str) -> None:
    with pytest.raises(_ptx.PtxError, match=message):
        run(PACK, constraints)


def one(asm: str, constraints: str, *inputs: np.ndarray, out: str, pack: int = 1) -> list[int]:
    dtype = np.dtype(out)
    (got,) = _ptx.elementwise(asm, constraints, inputs, [dtype], pack)
    return [int(v) for v in got.view(f"u{dtype.itemsize}")]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_first_source_goes_to_the_high_half() -> None:
    asm = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    assert one(asm, "=h,r,r", f32(1.0), f32(-2.0), out="u2") == [0x38C0]


@pytest.mark.parametrize(
    ("mode", "expected"), [("rp", [0, 1, 127, 128, 254, 255]), ("rz", [0, 0, 127, 127, 254, 255])]
)
def test_ue8m0_rounds_as_told(mode: str, expected: Any) -> None:
    value = f32(2.0**-127, 1.5 * 2.0**-127, 1.0, -1.25, np.inf, np.nan)
    asm = f"cvt.{mode}.satfinite.ue8m0x2.f32 $0, 0.0, $1;"
    assert one(asm, "=h,r", value, out="u2") == expected


def test_e2m1_ties_go_to_even_and_saturate() -> None:
    value = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0, -0.0)
    expected = [0, 2, 2, 4, 4, 6, 6, 7, 7, 8]
    assert exact.encode(value, exact.E2M1).tolist() == expected


@pytest.mark.parametrize(
    ("asm", "values", "expected"),
    [
        ("prmt.b32 $0, $1, $2, 0x0145;", (0x03020100, 0x07060504), 0x00010405),
        ("shl.b32 $0, $1, 33;", (1, 0), 0),
        ("shr.u32 $0, $1, 4;", (0xF0, 0), 0xF),
        (
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; mov.b32 $0, {hi, lo}; }",
            (0x12345678, 0),
            0x56781234,
        ),
        ("{ .reg .b64 w; mov.b64 w, {$1, $2}; mov.b64 {_a, $0}, w; }", (1, 2), None),
        (
            "{ .reg .b64 w; .reg .b32 t<2>; mov.b64 w, {$1, $2}; "
            "mov.b64 {t0, t1}, w; sub.u32 $0, t0, t1; }",
            (1, 2),
            0xFFFFFFFF,
        ),
        ("fma.rn.f32 $0, $1, $1, $2;", (0x3F800800, 0xBF801000), 0x33800000),
        ("max.NaN.f32 $0, $1, 0f3F800000;", (0x7FC00001, 0), 0x7FFFFFFF),
        ("mul.f32 $0, $1, 2.0;  // doubled", (0x3F800000, 0), 0x40000000),
    ],
)
def test_instruction(asm: str, values: tuple[int, int], expected: Any) -> None:
    a, b = (np.array([v], np.uint32) for v in values)
    if expected is None:
        with pytest.raises(_ptx.PtxError, match="_a"):
            one(asm, "=r,r,r", a, b, out="u4")
    else:
        assert one(asm, "=r,r,r", a, b, out="u4") == [expected]


def test_small_elements_share_a_register() -> None:
    x = np.arange(8, dtype=np.uint8)
    assert one("mov.b32 $0, $1;", "=r,r", x, out="u1", pack=4) == list(range(8))
    swap = "prmt.b32 $0, $1, $1, 0x0123;"
    assert one(swap, "=r,r", x, out="u1", pack=4) == [3, 2, 1, 0, 7, 6, 5, 4]


@pytest.mark.parametrize(
    ("narrow", "widen"),
    [
        ("cvt.rn.satfinite.e4m3x2.f16x2", "cvt.rn.f16x2.e4m3x2"),
        ("cvt.rn.satfinite.e5m2x2.f16x2", "cvt.rn.f16x2.e5m2x2"),
    ],
)
def test_packed_conversions_undo_each_other(narrow: str, widen: str) -> None:
    codes = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    asm = f"{{ .reg .b32 t; {widen} t, $1; {narrow} $0, t; }}"
    got = np.array(one(asm, "=h,h", codes, out="u2"))
    largest = 0x7E if "e4m3" in narrow else 0x7B
    finite = ((codes & 0x7F) <= largest) & ((codes >> 8 & 0x7F) <= largest)
    assert finite.sum() > 50000
    assert (got == codes)[finite].all()
