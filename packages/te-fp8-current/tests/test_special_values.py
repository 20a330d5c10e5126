# SPDX-License-Identifier: Apache-2.0
"""Special values in each buffer and place, through the quantizer, with the bytes written out.

On CUDA (``--te-device``) they are the bytes of the kernels. ``test_reference`` has more of them.
How the bytes here were had from the specification, apart from this code: ``scale`` is
``max(dtype) / amax`` rounded to float32, its mantissa cut off where it is a power of two, and the
bits of ``scale_inv`` are those of its inverse, rounded again; a code is that of ``x * scale``, ties
to even. 448 and 57344 are ``1.75 * 2**8`` and ``1.75 * 2**15``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_fp8_current import Float8CurrentScalingQuantizer
from te_proto.testing import count_compiles

E4M3, E5M2 = "e4m3", "e5m2"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)
INF, NAN = math.inf, math.nan
FLT_MAX, BF16_MAX, F16_MAX = (torch.finfo(x_dtype).max for x_dtype in ALL)
TINY = {F32: 2.0**-149, BF16: 2.0**-133, F16: 2.0**-24}
ULP = {F32: 2.0**-23, BF16: 2.0**-7, F16: 2.0**-10}
ONE = 0x3F800000
EDGE = {E4M3: 1.75 * 2.0**-120, E5M2: 1.75 * 2.0**-113}  # max(dtype) / 2**128

elements = pytest.mark.parametrize("dtype", [E4M3, E5M2])
inputs = pytest.mark.parametrize("x_dtype", ALL, ids=lambda d: str(d)[6:])
powers = pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])


def tensor(values: Any, x_dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(x_dtype)


def quantize(
    x: Tensor, dtype: str, device: torch.device, *, pow_2: bool = False, epsilon: float = 0.0
) -> tuple[int, Tensor]:
    """Return the bits of scale_inv and the codes, which each choice of buffers has alike."""
    q = Float8CurrentScalingQuantizer(
        dtype=dtype, force_pow_2_scales=pow_2, amax_epsilon=epsilon, separate_transpose=True
    )
    x = x.to(device)
    made = q.quantize(x)
    scale_inv, codes = made.fp8_scale_inv, made.fp8_data
    assert torch.equal(made.data_transpose, codes.movedim(-1, 0) if codes.dim() else codes)
    alone, one = q.with_usage(rowwise=False), q.replace(separate_transpose=False)
    for other, name in ((alone, "data_transpose"), (one, "fp8_data")):
        buffers = other.quantize(x)
        assert torch.equal(buffers.fp8_scale_inv, scale_inv)
        assert torch.equal(getattr(buffers, name), getattr(made, name))
    return int(scale_inv.cpu().view(torch.int32)), codes.cpu()


# fmt: off
BYTES: dict[str, tuple[Any, ...]] = {
    # element format, input dtypes, values; bits of scale_inv, codes; both with powers of two
    "bf16-max": (E4M3, (BF16,), [BF16_MAX, -BF16_MAX, 1.0, TINY[BF16], -1.0],
        0x7B11B6DB, [0x7E, 0xFE, 0x00, 0x00, 0x80], 0x7B800000, [0x78, 0xF8, 0x00, 0x00, 0x80]),
    "e5m2-bf16-max": (E5M2, (BF16,), [BF16_MAX, -BF16_MAX, 1.0],
        0x7791B6DB, [0x7B, 0xFB, 0x00], 0x78000000, [0x78, 0xF8, 0x00]),
    "f16-all-of-it": (E4M3, (F16,), [F16_MAX, TINY[F16], -1.0],
        0x431236DB, [0x7E, 0x00, 0x84], 0x43800000, [0x78, 0x00, 0x82]),
    "e5m2-f16-max": (E5M2, (F32, F16), [F16_MAX, TINY[F16], -1.0],
        0x3F9236DB, [0x7B, 0x00, 0xBB], 0x40000000, [0x78, 0x00, 0xB8]),
    # the scale is the largest float32, 2**128 but for an ulp, or 2**127
    "smallest-normal": (E4M3, (F32, BF16), [2.0**-126, -(2.0**-126)],
        0x00200000, [0x48, 0xC8], 0x00400000, [0x40, 0xC0]),
    "e5m2-smallest-normal": (E5M2, (F32, BF16), [2.0**-126, -(2.0**-126)],
        0x00200000, [0x44, 0xC4], 0x00400000, [0x40, 0xC0]),
    "largest-subnormal-f32": (E4M3, (F32,), [2.0**-126 - 2.0**-149],
        0x00200000, [0x48], 0x00400000, [0x40]),
    "e5m2-tiny-f32": (E5M2, (F32,), [TINY[F32], -TINY[F32]],
        0x00200000, [0x00, 0x80], 0x00400000, [0x00, 0x80]),
    "e5m2-tiny-f16": (E5M2, (F16,), [TINY[F16], -TINY[F16]],
        0x2B924925, [0x7B, 0xFB], 0x2C000000, [0x78, 0xF8]),
    "largest-subnormal-f16": (E4M3, (F16,), [2.0**-14 - 2.0**-24],
        0x34122492, [0x7E], 0x34800000, [0x78]),
    # the quotient is 2**128, or one ulp of amax less
    "overflow": (E4M3, (F32, BF16), [EDGE[E4M3]], 0x00200000, [0x7E], 0x00400000, [0x76]),
    "e5m2-overflow": (E5M2, (F32, BF16), [EDGE[E5M2]], 0x00200000, [0x7B], 0x00400000, [0x77]),
    "no-overflow-f32": (E4M3, (F32,), [EDGE[E4M3] * (1 + 2.0**-22)],
        0x00200001, [0x7E], 0x00400000, [0x76]),
    "e5m2-no-overflow-bf16": (E5M2, (BF16,), [EDGE[E5M2] + 2.0**-120],
        0x00202492, [0x7B], 0x00400000, [0x77]),
    "largest-power": (E4M3, (F32, BF16), [2 * EDGE[E4M3]], 0x00400000, [0x7E], 0x00400000, [0x7E]),
    "one-and-small": (E4M3, ALL, [1.0, 2.0**-24, -(2.0**-24), -0.0],
        0x3B124925, [0x7E, 0x00, 0x80, 0x80], 0x3B800000, [0x78, 0x00, 0x80, 0x80]),
    "e5m2-one-and-small": (E5M2, ALL, [1.0, 2.0**-24, -(2.0**-24), -0.0],
        0x37924925, [0x7B, 0x1B, 0x9B, 0x80], 0x38000000, [0x78, 0x18, 0x98, 0x80]),
    # infinity: everything else is cast as it is
    "inf-and-all": (E4M3, (F32,), [INF, FLT_MAX, -BF16_MAX, TINY[F32], -0.0, 3.0],
        ONE, [0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x44], ONE, [0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x44]),
    "e5m2-inf-and-f16-max": (E5M2, (F16,), [-INF, F16_MAX, -TINY[F16], 3.0],
        ONE, [0xFB, 0x7B, 0x80, 0x42], ONE, [0xFB, 0x7B, 0x80, 0x42]),
}
# fmt: on


@powers
@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str, pow_2: bool, device: torch.device) -> None:
    dtype, x_dtypes, values, *expected = BYTES[name]
    bits, codes = expected[2:] if pow_2 else expected[:2]
    for x_dtype in x_dtypes:
        x = torch.zeros(2, 2, len(values), dtype=x_dtype)
        x[1, 0] = tensor(values, x_dtype)
        made = torch.zeros(2, 2, len(values), dtype=torch.uint8)
        made[1, 0] = torch.tensor(codes, dtype=torch.uint8)
        found = quantize(x, dtype, device, pow_2=pow_2)
        assert found[0] == bits, x_dtype
        assert torch.equal(found[1], made), x_dtype


# fmt: off
EPSILON: dict[str, tuple[Any, ...]] = {
    # element format, epsilon, values; bits of scale_inv, codes; both with powers of two
    "zero": (E4M3, 2.0, [0.0, -0.0], 0x3B924925, [0x00, 0x80], 0x3C000000, [0x00, 0x80]),
    "e5m2": (E5M2, 2.0, [0.5, -0.25], 0x38124925, [0x73, 0xEF], 0x38800000, [0x70, 0xEC]),
    "far-below": (E4M3, 2.0, [2.0**-24], 0x3B924925, [0x00], 0x3C000000, [0x00]),
    "e5m2-far-below": (E5M2, 2.0, [2.0**-24], 0x38124925, [0x17], 0x38800000, [0x14]),
    "rounded-epsilon": (E4M3, 1e-3, [2.0**-24], 0x3615CBED, [0x0E], 0x36800000, [0x08]),
    "above": (E5M2, 2.0, [4.0, NAN], 0x38924925, [0x7B, 0x7F], 0x39000000, [0x78, 0x7F]),
    "nan": (E4M3, 2.0, [NAN, 0.5], 0x3B924925, [0x7F, 0x6E], 0x3C000000, [0x7F, 0x68]),
    "inf": (E5M2, 2.0, [-INF, 1.0], ONE, [0xFB, 0x3C], ONE, [0xFB, 0x3C]),
    # the largest float32 takes the place of infinity whatever the input dtype
    "overflow": (E4M3, 1e-37, [0.0], 0x00200000, [0x00], 0x00400000, [0x00]),
    "e5m2-overflow": (E5M2, 1e-37, [0.0], 0x00200000, [0x00], 0x00400000, [0x00]),
}
# fmt: on


@inputs
@powers
@pytest.mark.parametrize("name", EPSILON)
def test_epsilon(name: str, pow_2: bool, x_dtype: torch.dtype, device: torch.device) -> None:
    dtype, epsilon, values, *expected = EPSILON[name]
    bits, codes = quantize(tensor(values, x_dtype), dtype, device, pow_2=pow_2, epsilon=epsilon)
    assert [bits, codes.tolist()] == (expected[2:] if pow_2 else expected[:2])


@elements
@inputs
@powers
@pytest.mark.parametrize(("zero", "code"), [(0.0, 0x00), (-0.0, 0x80)], ids=["0", "-0"])
def test_zero_tensor(
    zero: float, code: int, pow_2: bool, x_dtype: torch.dtype, dtype: str, device: torch.device
) -> None:
    for shape in ((), (5,), (3, 5), (2, 3, 4)):
        bits, codes = quantize(torch.full(shape, zero, dtype=x_dtype), dtype, device, pow_2=pow_2)
        assert (bits, codes.unique().tolist()) == (ONE, [code])


@elements
@inputs
@powers
@pytest.mark.parametrize("special", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
def test_special_value_at_each_place(
    special: float, pow_2: bool, x_dtype: torch.dtype, dtype: str, device: torch.device
) -> None:
    largest, code = {E4M3: 0x7E, E5M2: 0x7B}[dtype], 0x7F
    if math.isinf(special):
        bits, rest = ONE, 0x40  # 2, as it is
        code = largest | (0x80 if special < 0 else 0)
    elif pow_2:  # 2 becomes 256 or 32768, 0x78 in both formats
        bits, rest = {E4M3: 0x3C000000, E5M2: 0x38800000}[dtype], 0x78
    else:
        bits, rest = {E4M3: 0x3B924925, E5M2: 0x38124925}[dtype], largest
    for i, j in itertools.product(range(3), range(5)):
        x = torch.full((3, 5), 2.0, dtype=x_dtype)
        x[i, j] = special
        expected = torch.full((3, 5), rest, dtype=torch.uint8)
        expected[i, j] = code
        found = quantize(x, dtype, device, pow_2=pow_2)
        assert found[0] == bits
        assert torch.equal(found[1], expected)
    found = quantize(torch.tensor(special, dtype=x_dtype), dtype, device, pow_2=pow_2)
    assert (found[0], int(found[1])) == (ONE, code)


# bits of scale_inv in E4M3 of an amax of 1, of 1.75, and of their neighbours below and above
AROUND = {
    F32: ([0x3B124924, 0x3B124925, 0x3B124926], [0x3B7FFFFE, 0x3B800000, 0x3B800001]),
    BF16: ([0x3B11B6DB, 0x3B124925, 0x3B136DB7], [0x3B7EDB6E, 0x3B800000, 0x3B809249]),
    F16: ([0x3B1236DB, 0x3B124925, 0x3B126DB7], [0x3B7FDB6D, 0x3B800000, 0x3B801249]),
}
# where 2**k and its neighbours are normal numbers of the input dtype, and so is scale_inv
EXPONENTS = {F32: range(-109, 128), BF16: range(-109, 128), F16: range(-13, 16)}


@elements
@inputs
@powers
def test_amax_around_each_power_of_two_and_each_bound(
    pow_2: bool, x_dtype: torch.dtype, dtype: str, device: torch.device
) -> None:
    ulp, largest = ULP[x_dtype], {E4M3: 0x7E, E5M2: 0x7B}[dtype]
    near_one, near_bound = AROUND[x_dtype]
    codes = [largest] * 6
    if pow_2:
        near_one, near_bound = [0x3B800000] * 3, [0x3B800000, 0x3B800000, 0x3C000000]
        # a code of 1.75 * 2**8 that passes it is under twice the scale
        codes = [0x78, 0x78, 0x78, largest, largest, {E4M3: 0x76, E5M2: 0x77}[dtype]]
    offset = {E4M3: 0, E5M2: 7}[dtype]  # 57344 is 448 * 2**7
    factors = (1 - ulp / 2, 1.0, 1 + ulp, 1.75 - ulp, 1.75, 1.75 + ulp)
    for k in EXPONENTS[x_dtype]:
        for factor, bits, code in zip(factors, [*near_one, *near_bound], codes, strict=True):
            q = Float8CurrentScalingQuantizer(dtype=dtype, force_pow_2_scales=pow_2, internal=True)
            made = q.quantize(tensor([0.0, -factor * 2.0**k], x_dtype).to(device))
            found = int(made.fp8_scale_inv.cpu().view(torch.int32)), made.fp8_data.tolist()
            assert found == (bits + ((k - offset) << 23), [0x00, code | 0x80]), (k, factor)


@pytest.mark.parametrize(
    ("dtype", "values", "x_dtype", "expected"),
    [
        pytest.param(E4M3, [INF, -INF, 3.0, NAN], F32, [448.0, -448.0, 3.0, NAN], id="inf"),
        pytest.param(E5M2, [INF, -F16_MAX, 3.0], F16, [57344.0, -57344.0, 3.0], id="e5m2-inf"),
        pytest.param(E4M3, [NAN, -0.0], BF16, [NAN, -0.0], id="nan"),
        # 448 times 0x7B124924, to the last bit
        pytest.param(E4M3, [FLT_MAX, 1.0], F32, [FLT_MAX, 0.0], id="flt-max"),
        pytest.param(E4M3, [BF16_MAX], BF16, [BF16_MAX], id="bf16-max"),
        # 2**7 + 2**-1 under 2**-128: 2**-133 is a code of 2**-5
        pytest.param(E4M3, [TINY[BF16], TINY[F32]], F32, [TINY[BF16], 0.0], id="tiny"),
        pytest.param(E4M3, [-TINY[F16]], F16, [-TINY[F16]], id="tiny-f16"),
    ],
)
def test_special_values_come_back(
    dtype: str,
    values: list[float],
    x_dtype: torch.dtype,
    expected: list[float],
    device: torch.device,
) -> None:
    for separate in (False, True):
        q = Float8CurrentScalingQuantizer(
            dtype=dtype, rowwise=not separate, separate_transpose=separate
        )
        back = q.quantize(tensor(values, x_dtype).to(device)).dequantize()
        assert str(back.tolist()) == str(expected)


@pytest.mark.parametrize(("dtype", "pow_2"), [(E4M3, False), (E5M2, True)])
def test_graph_gives_these_bytes(dtype: str, pow_2: bool) -> None:
    q = Float8CurrentScalingQuantizer(dtype=dtype, force_pow_2_scales=pow_2, internal=True)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        made = q.quantize(x)
        return made.fp8_scale_inv, made.fp8_data

    with count_compiles():
        compiled = torch.compile(run, backend="aot_eager", dynamic=True)
        for of, x_dtypes, values, *expected in BYTES.values():
            for x_dtype in x_dtypes if of == dtype else ():
                scale_inv, codes = compiled(tensor([*values, 0.0], x_dtype))
                found = [int(scale_inv.view(torch.int32)), codes.tolist()[:-1]]
                assert found == (expected[2:] if pow_2 else expected[:2]), (x_dtype, values)
