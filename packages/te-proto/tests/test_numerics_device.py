# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from te_proto import numerics
from te_proto.testing import aot_report, assert_same_bits

pytest.importorskip("triton", reason="triton is not installed; device functions need it")

import triton
import triton.language as tl

from te_proto.numerics import device

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@triton.jit
def encode_kernel(x_ptr, out_ptr, n, OP: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0)
    if OP == "e4m3" or OP == "e5m2":
        codes = device.encode(x, OP, HARDWARE)
    elif OP == "e2m1":
        codes = device.encode_e2m1(x)
    elif OP == "e8m0":
        codes = device.encode_e8m0(x, HARDWARE)
    elif OP == "amax_e4m3":
        codes = device.e8m0_from_amax(x, "e4m3", HARDWARE)
    else:
        codes = device.e8m0_from_amax(x, "e5m2", HARDWARE)
    tl.store(out_ptr + index, codes, mask=index < n)


@triton.jit
def decode_kernel(
    codes_ptr, out_ptr, n, OP: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + index, mask=index < n, other=0)
    if OP == "e4m3" or OP == "e5m2":
        values = device.decode(codes, OP, HARDWARE)
    elif OP == "e2m1":
        values = device.decode_e2m1(codes)
    elif OP == "e8m0":
        values = device.decode_e8m0(codes)
    else:
        values = device.e8m0_reciprocal(codes)
    tl.store(out_ptr + index, values, mask=index < n)


@triton.jit
def pack_kernel(x_ptr, out_ptr, n, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    even = tl.load(x_ptr + 2 * index, mask=index < n, other=0.0)
    odd = tl.load(x_ptr + 2 * index + 1, mask=index < n, other=0.0)
    tl.store(out_ptr + index, device.encode_pack_e2m1(even, odd, HARDWARE), mask=index < n)


@triton.jit
def unpack_kernel(packed_ptr, out_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    even, odd = device.unpack_e2m1(tl.load(packed_ptr + index, mask=index < n, other=0))
    tl.store(out_ptr + 2 * index, even, mask=index < n)
    tl.store(out_ptr + 2 * index + 1, odd, mask=index < n)


ENCODE: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3": numerics.encode_e4m3,
    "e5m2": numerics.encode_e5m2,
    "e2m1": numerics.encode_e2m1,
    "e8m0": numerics.encode_e8m0,
    "amax_e4m3": lambda x: numerics.e8m0_from_amax(x, "e4m3"),
    "amax_e5m2": lambda x: numerics.e8m0_from_amax(x, "e5m2"),
}
DECODE: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3": numerics.decode_e4m3,
    "e5m2": numerics.decode_e5m2,
    "e2m1": numerics.decode_e2m1,
    "e8m0": numerics.decode_e8m0,
    "reciprocal": numerics.e8m0_reciprocal,
}
# the instruction of each, and the first target that has it; encode_e2m1 alone has none
INSTRUCTION = {
    "e4m3": ("cvt.rn.satfinite.e4m3x2.f32", "sm_90"),
    "e5m2": ("cvt.rn.satfinite.e5m2x2.f32", "sm_90"),
    "e8m0": ("cvt.rp.satfinite.ue8m0x2.f32", "sm_100"),
    "amax_e4m3": ("cvt.rp.satfinite.ue8m0x2.f32", "sm_100"),
    "amax_e5m2": ("cvt.rp.satfinite.ue8m0x2.f32", "sm_100"),
}
ENCODE_WAYS = [(op, False) for op in ENCODE] + [(op, True) for op in INSTRUCTION]
DECODE_WAYS = [(op, False) for op in DECODE] + [("e4m3", True), ("e5m2", True)]


def every(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def float32_patterns() -> Tensor:
    """Random bits, bits near the formats, and values where float16's rounding changes E4M3's."""
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=generator).to(torch.int32)
    field = torch.randint(109, 144, (2**17,), generator=generator).to(torch.int32) << 23
    bits[: 2**17] = (bits[: 2**17] & ~0x7F800000) | field
    # 5 bits of mantissa hit ties, and one ulp off them
    ties = (bits[: 2**15] & ~0x3FFFF) + torch.arange(-1, 2, dtype=torch.int32)[:, None]
    # the smallest scale, and the amax whose product rounds down to it
    edges = torch.tensor([0x00400000, 0x04600000, 0x07E00000], dtype=torch.int32)
    edges = edges + torch.arange(-2, 3, dtype=torch.int32)[:, None]
    return torch.cat([bits, ties.flatten(), edges.flatten()]).view(torch.float32)


INPUTS = [
    pytest.param(lambda: every(torch.bfloat16), id="bf16"),
    pytest.param(lambda: every(torch.float16), id="fp16"),
    pytest.param(float32_patterns, id="fp32"),
]


def launch(kernel: object, x: Tensor, out: Tensor, n: int, **constexprs: object) -> Tensor:
    block = 2**15
    kernel[(triton.cdiv(n, block),)](x, out, n, BLOCK=block, **constexprs)  # type: ignore[index]
    return out


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize(("op", "hardware"), ENCODE_WAYS)
def test_encoders_give_the_bits_of_the_torch_functions(
    op: str, hardware: bool, make: Callable[[], Tensor]
) -> None:
    x = make()
    out = torch.empty(x.shape, dtype=torch.uint8)
    launch(encode_kernel, x, out, x.numel(), OP=op, HARDWARE=hardware)
    assert_same_bits(out, ENCODE[op](x))


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(("op", "hardware"), DECODE_WAYS)
def test_decoders_give_the_values_of_the_torch_functions(op: str, hardware: bool) -> None:
    codes = torch.arange(16 if op == "e2m1" else 256, dtype=torch.uint8)
    out = launch(
        decode_kernel, codes, torch.empty(codes.shape), len(codes), OP=op, HARDWARE=hardware
    )
    expected = DECODE[op](codes)
    number = ~expected.isnan()
    assert_same_bits(out[number], expected[number])
    assert out[~number].isnan().all()


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("make", INPUTS)
def test_pairs_are_packed_as_the_torch_function_does(
    make: Callable[[], Tensor], hardware: bool
) -> None:
    x = make()
    x = x[: len(x) // 2 * 2]
    out = torch.empty(len(x) // 2, dtype=torch.uint8)
    launch(pack_kernel, x, out, len(out), HARDWARE=hardware)
    assert_same_bits(out, numerics.pack_e2m1(numerics.encode_e2m1(x)))


@pytest.mark.usefixtures("cpu_triton")
def test_pairs_are_unpacked_as_the_torch_function_does() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    out = launch(unpack_kernel, packed, torch.empty(512, dtype=torch.uint8), 256)
    assert_same_bits(out, numerics.unpack_e2m1(packed))


def inexact(ptx: str) -> list[str]:
    """Instructions that may give other bits than the interpreter."""
    marks = (".ftz", ".approx", "div.", "fma.", "ex2", "lg2")
    lines = (line.strip() for line in ptx.splitlines())
    return [line for line in lines if not line.startswith("//") and any(m in line for m in marks)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_portable_forms_compile_to_exact_instructions(target: str) -> None:
    for kernel, ops, types in (
        (encode_kernel, ENCODE, {"x_ptr": "*fp32", "out_ptr": "*u8"}),
        (decode_kernel, DECODE, {"codes_ptr": "*u8", "out_ptr": "*fp32"}),
    ):
        for op in ops:
            chosen = {"OP": op, "HARDWARE": False, "BLOCK": 1024}
            report = aot_report(kernel, {**types, "n": "i32"}, chosen, target)
            assert (op, inexact(report.ptx)) == (op, [])
            assert (op, report.cvt, report.spills) == (op, (), 0)


@pytest.mark.parametrize("op", list(INSTRUCTION))
def test_hardware_encoders_use_the_instruction(op: str) -> None:
    instruction, target = INSTRUCTION[op]
    types = {"x_ptr": "*fp32", "out_ptr": "*u8", "n": "i32"}
    chosen = {"OP": op, "HARDWARE": True, "BLOCK": 1024}
    report = aot_report(encode_kernel, types, chosen, target)
    assert report.cvt == (instruction,)
    assert inexact(report.ptx) == []


@pytest.mark.parametrize("op", ["e4m3", "e5m2"])
def test_hardware_decoders_use_the_instruction(op: str) -> None:
    types = {"codes_ptr": "*u8", "out_ptr": "*fp32", "n": "i32"}
    chosen = {"OP": op, "HARDWARE": True, "BLOCK": 1024}
    report = aot_report(decode_kernel, types, chosen, "sm_90")
    assert report.cvt == (f"cvt.rn.f16x2.{op}x2",)
    assert inexact(report.ptx) == []


def test_hardware_packing_uses_the_instruction() -> None:
    types = {"x_ptr": "*fp32", "out_ptr": "*u8", "n": "i32"}
    report = aot_report(pack_kernel, types, {"HARDWARE": True, "BLOCK": 1024}, "sm_100")
    assert report.cvt == ("cvt.rn.satfinite.e2m1x2.f32",)
    assert inexact(report.ptx) == []


def test_a_format_without_one_byte_codes_is_refused_when_compiled() -> None:
    types = {"x_ptr": "*fp32", "out_ptr": "*u8", "n": "i32"}
    with pytest.raises(triton.CompilationError) as caught:
        aot_report(refused_kernel, types, {"BLOCK": 1024}, "sm_90")
    assert "NAME must be 'e4m3' or 'e5m2'" in str(caught.value.__cause__ or caught.value)


@triton.jit
def refused_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0)
    tl.store(out_ptr + index, device.encode(x, "e2m1"), mask=index < n)
