# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.usefixtures("cpu_triton")

NAN, INF = math.nan, math.inf
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, TO: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x.to(TO), mask=i < n)


@triton.jit
def toward_zero_kernel(x_ptr, out_ptr, TO: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(TO, fp_downcast_rounding="rtz"))


@triton.jit
def combine(a, b, OP: tl.constexpr):
    if OP == "add":
        out = a + b
    elif OP == "mul":
        out = a * b
    elif OP == "less":
        out = (a < b).to(tl.float32)
    elif OP == "maximum":
        out = tl.maximum(a, b)
    elif OP == "maximum_nan":
        out = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        out = tl.minimum(a, b)
    return out


@triton.jit
def binary_kernel(a_ptr, b_ptr, out_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, combine(tl.load(a_ptr + i), tl.load(b_ptr + i), OP))


@triton.jit
def scale_kernel(x_ptr, out_ptr, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, (tl.load(x_ptr + i) * scale).to(tl.float32))


@triton.jit
def half_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * 0.5)


@triton.jit
def fma_kernel(a_ptr, b_ptr, c_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.fma(tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(c_ptr + i)))


@triton.jit
def clamp_kernel(x_ptr, out_ptr, lo, hi, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.clamp(tl.load(x_ptr + i), lo, hi))


@triton.jit
def reduce_kernel(x_ptr, sum_ptr, max_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(sum_ptr, tl.sum(x, axis=0))
    tl.store(max_ptr, tl.max(x, axis=0))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))


@triton.jit
def umulhi_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.umulhi(tl.load(a_ptr + i), tl.load(b_ptr + i)))


def bits(t: torch.Tensor) -> list[int]:
    width = t.element_size()
    return [v & ((1 << 8 * width) - 1) for v in t.view(INTEGER[width]).flatten().tolist()]


def triton_type(dtype: torch.dtype) -> object:
    names = {
        torch.float8_e4m3fn: "float8e4nv",
        torch.float8_e5m2: "float8e5",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
        torch.float32: "float32",
        torch.int8: "int8",
        torch.int32: "int32",
        torch.uint8: "uint8",
    }
    return getattr(tl, names[dtype])


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    block = triton.next_power_of_2(x.numel())
    copy_kernel[(1,)](x, out, x.numel(), TO=triton_type(dtype), BLOCK=block)
    return out


def every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random_fp32() -> torch.Tensor:
    g = torch.Generator().manual_seed(20)
    return (
        torch.randint(-(2**31), 2**31, (1 << 18,), generator=g).to(torch.int32).view(torch.float32)
    )


@pytest.mark.parametrize("dtype", [*LARGEST, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("source", [every_bf16, random_fp32])
def test_cast_equals_torch_bit_for_bit(
    source: Callable[[], torch.Tensor], dtype: torch.dtype
) -> None:
    x = source()
    # torch before 2.12 does not saturate in e4m3, and never does in e5m2: clamp first
    largest = LARGEST.get(dtype, INF)
    expected = x.float().clamp(-largest, largest).to(dtype)
    out = convert(x, dtype)
    nan = x.isnan()
    word = INTEGER[out.element_size()]
    assert torch.equal(out.view(word)[~nan], expected.view(word)[~nan])
    # to itself is no conversion, and bf16 widens by a shift: both keep the payload
    if dtype not in (x.dtype, torch.float32):
        canonical = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}[out.element_size()]
        assert nan.any()
        assert set(bits(out[nan])) == {canonical}


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_every_fp8_code_widens_as_in_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    out = convert(codes, torch.float32)
    assert torch.equal(out.nan_to_num(nan=1e30), codes.float().nan_to_num(nan=1e30))
    assert out.isnan().sum() == (2 if dtype == torch.float8_e4m3fn else 6)


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        pytest.param(1.0625, 0x38, id="tie-to-even-below"),
        pytest.param(1.1875, 0x3A, id="tie-to-even-above"),
        pytest.param(126.58, 0x70, id="carry-out-of-the-mantissa"),
        pytest.param(2.0**-10, 0x00, id="tie-of-zero-and-smallest"),
        pytest.param(3 * 2.0**-10, 0x02, id="tie-of-subnormals"),
        pytest.param(-(2.0**-9), 0x81, id="smallest-subnormal"),
        pytest.param(-0.0, 0x80, id="negative-zero"),
        pytest.param(480.0, 0x7E, id="saturates"),
        pytest.param(-INF, 0xFE, id="infinity-saturates"),
        pytest.param(NAN, 0x7F, id="nan"),
    ],
)
def test_e4m3_edge(value: float, byte: int) -> None:
    assert bits(convert(torch.tensor([value]), torch.float8_e4m3fn)) == [byte]


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        pytest.param(1.125, 0x3C, id="tie-to-even-below"),
        pytest.param(1.375, 0x3E, id="tie-to-even-above"),
        pytest.param(1.9, 0x40, id="carry-out-of-the-mantissa"),
        pytest.param(2.0**-17, 0x00, id="tie-of-zero-and-smallest"),
        pytest.param(61440.0, 0x7B, id="saturates"),
        pytest.param(-INF, 0xFB, id="infinity-saturates"),
        pytest.param(NAN, 0x7F, id="nan"),
    ],
)
def test_e5m2_edge(value: float, byte: int) -> None:
    assert bits(convert(torch.tensor([value]), torch.float8_e5m2)) == [byte]


def test_bf16_rounds_to_nearest_even_and_truncates_when_told() -> None:
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -INF])
    assert bits(convert(x, torch.bfloat16)) == [0x3F80, 0x3F82, 0x7F80, 0xFF80]
    out = torch.empty(4, dtype=torch.bfloat16)
    toward_zero_kernel[(1,)](x, out, TO=tl.bfloat16, BLOCK=4)
    assert bits(out) == [0x3F80, 0x3F81, 0x7F7F, 0xFF80]


def test_bf16_subnormals_widen() -> None:
    x = torch.tensor([0x0001, 0x007F], dtype=torch.int16).view(torch.bfloat16)
    assert convert(x, torch.float32).tolist() == [2.0**-133, 127 * 2.0**-133]


def test_integer_becomes_bf16_by_value() -> None:
    assert convert(torch.tensor([3, -257], dtype=torch.int32), torch.bfloat16).tolist() == [3, -256]


def test_float_to_integer_saturates_and_nan_gives_zero() -> None:
    x = torch.tensor([1.9, -1.9, 3e9, -3e9, NAN, INF])
    assert convert(x, torch.int32).tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    # through a 16-bit register, so 300 wraps and 70000 saturates first
    assert convert(torch.tensor([300.0, 70000.0]), torch.int8).tolist() == [44, -1]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # 3.0234375 is a tie, and goes to the even 3.03125
        pytest.param("add", [0.99609375, 3.03125], id="add"),
        # 2.0313720703125 lies just above 2.03125
        pytest.param("mul", [-0.00390625, 2.03125], id="mul"),
        pytest.param("less", [1.0, 0.0], id="less"),
        pytest.param("minimum", [-0.00390625, 1.0078125], id="minimum"),
    ],
)
def test_bf16_arithmetic_rounds_once(op: str, expected: list[float]) -> None:
    a = torch.tensor([-0.00390625, 2.015625], dtype=torch.bfloat16)
    b = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    out = torch.empty(2, dtype=torch.bfloat16)
    binary_kernel[(1,)](a, b, out, OP=op, BLOCK=2)
    assert out.tolist() == expected


def test_bf16_times_a_literal_stays_bf16_and_times_an_argument_becomes_fp32() -> None:
    x = torch.tensor([1.0078125, 3.0], dtype=torch.bfloat16)
    out = torch.empty(2, dtype=torch.bfloat16)
    half_kernel[(1,)](x, out, BLOCK=2)
    assert out.tolist() == [0.50390625, 1.5]
    wide = torch.empty(2)
    scale_kernel[(1,)](x, wide, 1.001, BLOCK=2)
    assert torch.equal(wide, x.float() * torch.tensor(1.001))


def test_bf16_sum_max_and_dot_are_of_the_values() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, generator=g).to(torch.bfloat16)
    total, top = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16)
    reduce_kernel[(1,)](x, total, top, BLOCK=64)
    assert top.item() == x.max().item()
    assert total.item() == pytest.approx(x.double().sum().item(), rel=2**-8)
    a, b = torch.randn(2, 16, 16, generator=g).to(torch.bfloat16)
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize(
    ("op", "a", "b", "word"),
    [
        pytest.param("maximum", NAN, 1.0, 0x3F800000, id="nan-loses-max"),
        pytest.param("minimum", 1.0, NAN, 0x3F800000, id="nan-loses-min"),
        pytest.param("maximum", NAN, NAN, 0x7FFFFFFF, id="all-nan"),
        pytest.param("maximum_nan", NAN, 1.0, 0x7FFFFFFF, id="nan-propagates"),
        pytest.param("maximum", -0.0, 0.0, 0x00000000, id="max-of-zeros"),
        pytest.param("minimum", 0.0, -0.0, 0x80000000, id="min-of-zeros"),
        pytest.param("add", INF, -INF, 0x7FFFFFFF, id="canonical-nan"),
    ],
)
def test_nan_and_zero_follow_ptx(op: str, a: float, b: float, word: int) -> None:
    out = torch.empty(1)
    binary_kernel[(1,)](torch.tensor([a]), torch.tensor([b]), out, OP=op, BLOCK=1)
    assert bits(out) == [word]


def test_clamp_makes_nan_finite() -> None:
    out = torch.empty(4)
    clamp_kernel[(1,)](torch.tensor([NAN, 9.0, -9.0, 1.0]), out, -2.0, 2.0, BLOCK=4)
    assert out.tolist() == [2.0, 2.0, -2.0, 1.0]
    clamp_kernel[(1,)](torch.tensor([NAN, 9.0, -9.0, 1.0]), out, -1.0, 2.0, BLOCK=4)
    assert out.tolist() == [-1.0, 2.0, -1.0, 1.0]


def test_fma_rounds_once() -> None:
    a = torch.tensor([1 + 2.0**-12, 1 + 2.0**-23])
    c = torch.tensor([-(1 + 2.0**-11), -(1 + 2.0**-22)])
    out = torch.empty(2)
    fma_kernel[(1,)](a, a, c, out, BLOCK=2)
    assert out.tolist() == [2.0**-24, 2.0**-46]


def test_fma_is_not_rounded_twice_through_float64() -> None:
    # exact: 1 + 2**-24 + 2**-60; float64 drops the last term and float32 then sees a tie
    a, b = torch.tensor([2.0**-30]), torch.tensor([2.0**-30])
    c = torch.tensor([1.0])
    out = torch.empty(1)
    fma_kernel[(1,)](a, b, c, out, BLOCK=1)
    assert out.item() == 1.0
    a, b = torch.tensor([1 + 2.0**-12]), torch.tensor([1 - 2.0**-12 + 2.0**-24])
    c = torch.tensor([2.0**24])  # exact sum: 2**24 + 1 + 2**-36, above the tie
    fma_kernel[(1,)](a, b, c, out, BLOCK=1)
    assert out.item() == 2.0**24 + 2


def test_umulhi_takes_int32_as_unsigned() -> None:
    a, b = torch.tensor([-1, 5], dtype=torch.int32), torch.tensor([-1, -1], dtype=torch.int32)
    out = torch.empty(2, dtype=torch.int32)
    umulhi_kernel[(1,)](a, b, out, BLOCK=2)
    assert out.tolist() == [-2, 4]
