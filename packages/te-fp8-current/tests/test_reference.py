# SPDX-License-Identifier: Apache-2.0
"""Bytes of the reference: written out by hand, and against an oracle in exact scalar arithmetic."""

from __future__ import annotations

import bisect
import math
import struct

import pytest
import torch
from torch import Tensor

from te_fp8_current import reference
from te_proto.testing import assert_same_bits, hostile

E4M3, E5M2 = "e4m3", "e5m2"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)
INF, NAN = math.inf, math.nan
FLT_MAX = (2 - 2.0**-23) * 2.0**127
BF16_MAX = (2 - 2.0**-7) * 2.0**127
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

ONE = 0x3F800000
OVER_448, OVER_57344 = 0x3B124925, 0x37924925  # fl32(1 / 448), fl32(1 / 57344)


def quantize(
    x: Tensor, dtype: str = E4M3, *, pow_2: bool = False, epsilon: float = 0.0, **which: bool
) -> dict[str, Tensor]:
    return reference.quantize(
        x,
        reference.amax(x),
        dtype=dtype,
        force_pow_2_scales=pow_2,
        amax_epsilon=epsilon,
        **{"data": True, "transpose": False, **which},
    )


def word(value: Tensor) -> int:
    return int(value.view(torch.int32))


BYTES = [
    # element format, input dtypes, values, bits of scale_inv, codes; the same with powers of two
    pytest.param(E4M3, ALL, [0.0, -0.0], ONE, [0x00, 0x80], id="zeros-keep-their-sign"),
    pytest.param(E5M2, ALL, [0.0, -0.0], ONE, [0x00, 0x80], id="e5m2-zeros"),
    pytest.param(
        E4M3, ALL, [448.0, -448.0, 1.0, 27.0, -0.0], ONE, [0x7E, 0xFE, 0x38, 0x5E, 0x80], id="max"
    ),
    pytest.param(E5M2, ALL, [57344.0, -57344.0, 1.0], ONE, [0x7B, 0xFB, 0x3C], id="e5m2-max"),
    pytest.param(E4M3, ALL, [7.0, -1.0], 0x3C800000, [0x7E, 0xE8], id="seven"),
    # 0.5 * 2**-9 is a tie with zero, 1.5 * 2**-9 one with 2 * 2**-9
    pytest.param(
        E4M3,
        ALL,
        [448.0, 2.0**-10, 1.5 * 2.0**-9, -(2.0**-9)],
        ONE,
        [0x7E, 0x00, 0x02, 0x81],
        id="subnormal-codes",
    ),
    pytest.param(
        E5M2,
        (F32, BF16),
        [57344.0, 2.0**-17, 1.5 * 2.0**-16, -(2.0**-16)],
        ONE,
        [0x7B, 0x00, 0x02, 0x81],
        id="e5m2-subnormal-codes",
    ),
    # infinity: scale 1, so that everything else is cast as it is
    pytest.param(
        E4M3,
        ALL,
        [INF, -INF, 1.0, -1.0, 1000.0, -0.0],
        ONE,
        [0x7E, 0xFE, 0x38, 0xB8, 0x7E, 0x80],
        id="inf",
    ),
    pytest.param(E4M3, (F32,), [-INF, FLT_MAX], ONE, [0xFE, 0x7E], id="inf-and-flt-max"),
    pytest.param(E5M2, ALL, [INF, -INF, 1.0], ONE, [0x7B, 0xFB, 0x3C], id="e5m2-inf"),
    pytest.param(E4M3, ALL, [NAN, 448.0, -NAN, -1.0], ONE, [0x7F, 0x7E, 0x7F, 0xB8], id="nan"),
    pytest.param(E4M3, ALL, [448.0, -1.0, NAN], ONE, [0x7E, 0xB8, 0x7F], id="nan-last"),
    pytest.param(E5M2, ALL, [57344.0, NAN, -NAN], ONE, [0x7B, 0x7F, 0x7F], id="e5m2-nan"),
    pytest.param(E4M3, ALL, [NAN, -NAN], ONE, [0x7F, 0x7F], id="nan-only"),
    pytest.param(E5M2, ALL, [NAN, -NAN], ONE, [0x7F, 0x7F], id="e5m2-nan-only"),
    pytest.param(E4M3, ALL, [NAN, 0.0, -0.0], ONE, [0x7F, 0x00, 0x80], id="nan-and-zeros"),
    pytest.param(E4M3, ALL, [NAN, INF], ONE, [0x7F, 0x7E], id="nan-and-inf"),
]

DIFFERENT = [
    # the same, then bits and codes where the scale is a power of two
    pytest.param(
        E4M3,
        ALL,
        [1.0, -0.5],
        (OVER_448, [0x7E, 0xF6]),
        (0x3B800000, [0x78, 0xF0]),
        id="one",
    ),
    pytest.param(
        E5M2,
        ALL,
        [1.0, -0.5],
        (OVER_57344, [0x7B, 0xF7]),
        (0x38000000, [0x78, 0xF4]),
        id="e5m2-one",
    ),
    # 448 / amax overflows: the scale is the largest float32, or 2**127, and its inverse subnormal
    pytest.param(
        E4M3,
        (F32,),
        [1e-37, -1e-37],
        (0x00200000, [0x61, 0xE1]),
        (0x00400000, [0x59, 0xD9]),
        id="1e-37",
    ),
    pytest.param(
        E4M3,
        (F32,),
        [2.0**-149, -(2.0**-149)],
        (0x00200000, [0, 0x80]),
        (0x00400000, [0, 0x80]),
        id="tiny-f32",
    ),
    pytest.param(
        E4M3,
        (F32, BF16),
        [2.0**-133, -(2.0**-133)],
        (0x00200000, [0x10, 0x90]),
        (0x00400000, [0x08, 0x88]),
        id="tiny-bf16",
    ),
    pytest.param(
        E5M2,
        (F32, BF16),
        [2.0**-133],
        (0x00200000, [0x28]),
        (0x00400000, [0x24]),
        id="e5m2-tiny-bf16",
    ),
    pytest.param(
        E4M3,
        ALL,
        [2.0**-24, -(2.0**-24)],
        (0x2F124925, [0x7E, 0xFE]),
        (0x2F800000, [0x78, 0xF8]),
        id="tiny-f16",
    ),
    pytest.param(
        E4M3,
        (F32,),
        [FLT_MAX, -FLT_MAX, 1.0],
        (0x7B124924, [0x7E, 0xFE, 0]),
        (0x7B800000, [0x78, 0xF8, 0]),
        id="flt-max",
    ),
    pytest.param(
        E5M2,
        (F32,),
        [FLT_MAX, -FLT_MAX],
        (0x77924924, [0x7B, 0xFB]),
        (0x78000000, [0x78, 0xF8]),
        id="e5m2-flt-max",
    ),
    pytest.param(
        E4M3,
        (F32, F16),
        [65504.0, -65504.0],
        (0x431236DB, [0x7E, 0xFE]),
        (0x43800000, [0x78, 0xF8]),
        id="f16-max",
    ),
]


@pytest.mark.parametrize(("dtype", "x_dtypes", "values", "scale_inv", "codes"), BYTES)
@pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])
def test_bytes(
    dtype: str,
    x_dtypes: tuple[torch.dtype, ...],
    values: list[float],
    scale_inv: int,
    codes: list[int],
    pow_2: bool,
) -> None:
    for x_dtype in x_dtypes:
        out = quantize(torch.tensor(values, dtype=torch.float64).to(x_dtype), dtype, pow_2=pow_2)
        assert word(out["fp8_scale_inv"]) == scale_inv, x_dtype
        assert out["fp8_data"].tolist() == codes, x_dtype


@pytest.mark.parametrize(("dtype", "x_dtypes", "values", "plain", "power"), DIFFERENT)
def test_bytes_where_a_power_of_two_differs(
    dtype: str,
    x_dtypes: tuple[torch.dtype, ...],
    values: list[float],
    plain: tuple[int, list[int]],
    power: tuple[int, list[int]],
) -> None:
    for x_dtype in x_dtypes:
        x = torch.tensor(values, dtype=torch.float64).to(x_dtype)
        for pow_2, expected in ((False, plain), (True, power)):
            out = quantize(x, dtype, pow_2=pow_2)
            assert (word(out["fp8_scale_inv"]), out["fp8_data"].tolist()) == expected, x_dtype


@pytest.mark.parametrize(
    ("values", "epsilon", "scale_inv", "codes"),
    [
        pytest.param([0.0, -0.0], 1.0, OVER_448, [0x00, 0x80], id="zero-below"),
        pytest.param([0.5, -0.25], 2.0, 0x3B924925, [0x6E, 0xE6], id="below"),
        pytest.param([2.0, -1.0], 2.0, 0x3B924925, [0x7E, 0xF6], id="equal"),
        pytest.param([7.0, -1.0], 2.0, 0x3C800000, [0x7E, 0xE8], id="above"),
        pytest.param([NAN], 7.0, 0x3C800000, [0x7F], id="nan-only"),
        pytest.param([INF, 1.0], 7.0, ONE, [0x7E, 0x38], id="inf"),
        pytest.param([2.0**-149], 1e-37, 0x00200000, [0x00], id="overflow-all-the-same"),
        pytest.param([448.0], FLT_MAX, 0x7B124924, [0x00], id="largest"),
    ],
)
def test_epsilon_is_the_least_maximum(
    values: list[float], epsilon: float, scale_inv: int, codes: list[int]
) -> None:
    out = quantize(torch.tensor(values), epsilon=epsilon)
    assert (word(out["fp8_scale_inv"]), out["fp8_data"].tolist()) == (scale_inv, codes)


def test_empty_tensor_has_the_scale_of_zero() -> None:
    for shape in ((0,), (0, 4), (4, 0), (2, 0, 3)):
        out = quantize(torch.empty(shape), transpose=True)
        assert (out["fp8_data"].shape, word(out["fp8_scale_inv"])) == (shape, ONE)
        assert out["data_transpose"].shape == (shape[-1], *shape[:-1])
    assert word(quantize(torch.empty(0), epsilon=1.0)["fp8_scale_inv"]) == OVER_448


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("x_dtype", "ulp"), [(F32, 2.0**-23), (BF16, 2.0**-7)])
def test_power_of_two_steps_down_one_ulp_above_the_largest_code(
    dtype: str, x_dtype: torch.dtype, ulp: float
) -> None:
    largest = LARGEST[dtype]
    step = 2.0 ** math.floor(math.log2(largest)) * ulp
    for k in range(-100, 101):
        found = [
            float(
                quantize(torch.tensor([a * 2.0**k], dtype=x_dtype), dtype, pow_2=True)[
                    "fp8_scale_inv"
                ]
            )
            for a in (largest - step, largest, largest + step)
        ]
        assert found == [2.0**k, 2.0**k, 2.0 ** (k + 1)], k


# --- the oracle: spec section 3, one element at a time; Python floats hold every step exactly


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def magnitudes(dtype: str) -> list[float]:
    """Return the value of every code from 0 to the largest finite one, by definition."""
    mantissa, bias, count = (3, 7, 0x7F) if dtype == E4M3 else (2, 15, 0x7C)
    values = []
    for code in range(count):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        values.append(math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias))
    return values


TABLES = {dtype: magnitudes(dtype) for dtype in (E4M3, E5M2)}


def oracle_code(value: float, dtype: str) -> int:
    if math.isnan(value):
        return 0x7F
    table, sign = TABLES[dtype], 0x80 if math.copysign(1.0, value) < 0 else 0
    value = abs(value)
    if value >= table[-1]:
        return sign | len(table) - 1
    above = bisect.bisect_right(table, value)
    middle = (table[above - 1] + table[above]) / 2
    up = value > middle or (value == middle and above % 2 == 0)
    return sign | (above if up else above - 1)


def oracle_scale(amax: float, dtype: str, pow_2: bool, epsilon: float) -> float:
    amax = max(amax, float32(epsilon))
    if amax == 0.0 or math.isinf(amax):
        return 1.0
    quotient = LARGEST[dtype] / amax
    scale = FLT_MAX if quotient > FLT_MAX else float32(quotient)
    return 2.0 ** (math.frexp(scale)[1] - 1) if pow_2 else scale


def oracle(x: Tensor, dtype: str, pow_2: bool, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the codes of ``x`` and the inverse of its scale."""
    values = x.flatten().tolist()
    amax = max((abs(v) for v in values if not math.isnan(v)), default=0.0)
    scale = oracle_scale(amax, dtype, pow_2, epsilon)
    codes = []
    for value in values:
        product = value * scale
        finite = abs(product) <= FLT_MAX
        codes.append(oracle_code(float32(product) if finite else product, dtype))
    return (
        torch.tensor(codes, dtype=torch.uint8).view(x.shape),
        torch.tensor([float32(1.0 / scale)]),
    )


def inputs(x_dtype: torch.dtype) -> list[Tensor]:
    """Tensors of about one binade each, of all binades at once, and with everything in them."""
    blocks = hostile((96, 32), x_dtype, seed=7)
    return [
        *(row for row in blocks if row.isfinite().all()),
        blocks,
        hostile((16, 32), x_dtype, seed=8, nonfinite=True),
    ]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x_dtype", ALL)
@pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_quantize_equals_the_oracle(
    dtype: str, x_dtype: torch.dtype, pow_2: bool, epsilon: float
) -> None:
    for x in inputs(x_dtype):
        codes, scale_inv = oracle(x, dtype, pow_2, epsilon)
        out = quantize(x, dtype, pow_2=pow_2, epsilon=epsilon, transpose=True)
        assert_same_bits(out["fp8_scale_inv"], scale_inv)
        assert_same_bits(out["fp8_data"], codes)
        assert_same_bits(out["data_transpose"], codes.movedim(-1, 0))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])
def test_scale_equals_the_oracle_around_every_power_of_two(dtype: str, pow_2: bool) -> None:
    exponents = torch.arange(1, 255, dtype=torch.int32) << 23
    tops = torch.tensor([0, 0x600000], dtype=torch.int32)  # 2**k and 1.75 * 2**k
    off = torch.tensor([-1, 0, 1], dtype=torch.int32)
    bits = (exponents[:, None, None] + tops[:, None] + off).flatten()
    amax = torch.cat([bits, torch.arange(8, dtype=torch.int32)]).view(torch.float32)
    found = reference.scale_from_amax(amax, dtype=dtype, force_pow_2_scales=pow_2, amax_epsilon=0.0)
    expected = [oracle_scale(a, dtype, pow_2, 0.0) for a in amax.tolist()]
    assert_same_bits(found, torch.tensor(expected, dtype=torch.float64).float())
    assert (found > 0).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", ALL)
@pytest.mark.parametrize("length", [256, 256 * 1025], ids=["short", "long"])
def test_dequantize_every_code(dtype: str, out_dtype: torch.dtype, length: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(length // 256)
    finite = TABLES[dtype] + ([] if dtype == E4M3 else [INF])
    finite += [NAN] * (128 - len(finite))
    values = torch.tensor(finite + [-v for v in finite], dtype=torch.float64)
    for scale_inv in (1.0, 1 / 448, 2.0**-127, 0x200000 * 2.0**-149, 7.6e35, 3.0):
        inverse = torch.tensor([scale_inv])
        # float64 holds the product; float32 rounds it once, the output type once more
        expected = (values * inverse.double()).float().to(out_dtype).repeat(length // 256)
        got = reference.dequantize(codes, inverse, dtype=dtype, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        # which NaN it is depends on the instruction that multiplied
        assert (got.isnan() == expected.isnan()).all()
        assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
