# SPDX-License-Identifier: Apache-2.0
"""Bytes of the reference: written out by hand, and against an oracle in exact scalar arithmetic."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from te_fp8_block import reference
from te_proto.testing import assert_same_bits, hostile

E4M3, E5M2 = "e4m3", "e5m2"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)
INF, NAN = math.inf, math.nan
FLT_MAX = (2 - 2.0**-23) * 2.0**127
PLANES = ("rowwise", "columnwise", "two_d")


def quantize(x: Tensor, plane: str, **options: Any) -> dict[str, Tensor]:
    return reference.quantize(
        x,
        rowwise=plane != "columnwise",
        columnwise=plane != "rowwise",
        two_d=plane == "two_d",
        **{"dtype": E4M3, "pow_2": True, "amax_epsilon": 0.0, **options},
    )


def one_block(
    values: list[float], x_dtype: torch.dtype, plane: str, **options: Any
) -> tuple[float, list[int]]:
    """Return scale_inv of one block and the codes of ``values``; zeros fill the block."""
    line = torch.tensor(values + [0.0] * (128 - len(values)), dtype=torch.float64).to(x_dtype)
    shaped = {
        "rowwise": line.view(1, 128),
        "columnwise": line.view(128, 1),
        "two_d": line.expand(128, 128),
    }[plane]
    out = quantize(shaped, plane, **options)
    kept = "columnwise" if plane == "columnwise" else "rowwise"
    if plane == "two_d":
        assert_same_bits(out["columnwise_data"], out["rowwise_data"].t())
        assert_same_bits(out["columnwise_scale_inv"], out["rowwise_scale_inv"])
    codes = out[f"{kept}_data"].flatten()[: len(values)]
    return out[f"{kept}_scale_inv"][0, 0].item(), codes.tolist()


BYTES = [
    # element format, input dtypes, values, scale_inv and codes, with power-of-two scales
    pytest.param(E4M3, ALL, [0.0, -0.0], 1.0, [0x00, 0x80], id="zeros-keep-their-sign"),
    pytest.param(E5M2, ALL, [0.0, -0.0], 1.0, [0x00, 0x80], id="e5m2-zeros"),
    pytest.param(E4M3, ALL, [448.0, -448.0, 1.0, 27.0], 1.0, [0x7E, 0xFE, 0x38, 0x5E], id="max"),
    pytest.param(
        E5M2, ALL, [57344.0, -57344.0, 1.0, 4.5], 1.0, [0x7B, 0xFB, 0x3C, 0x44], id="e5m2-max"
    ),
    pytest.param(E4M3, (F32,), [448 + 2.0**-15, 1.0], 2.0, [0x76, 0x30], id="max-up-f32"),
    pytest.param(E4M3, (BF16,), [450.0, 1.0], 2.0, [0x76, 0x30], id="max-up-bf16"),
    pytest.param(E4M3, (F16,), [448.25, 1.0], 2.0, [0x76, 0x30], id="max-up-f16"),
    pytest.param(E4M3, (F32,), [448 - 2.0**-15, 1.0], 1.0, [0x7E, 0x38], id="max-down-f32"),
    pytest.param(E4M3, (BF16,), [446.0, 1.0], 1.0, [0x7E, 0x38], id="max-down-bf16"),
    pytest.param(E4M3, (F16,), [447.75, 1.0], 1.0, [0x7E, 0x38], id="max-down-f16"),
    pytest.param(E5M2, (F32,), [57344 + 2.0**-8, 1.0], 2.0, [0x77, 0x38], id="e5m2-max-up-f32"),
    pytest.param(E5M2, (BF16,), [57600.0, 1.0], 2.0, [0x77, 0x38], id="e5m2-max-up-bf16"),
    pytest.param(E5M2, (F16,), [57376.0, 1.0], 2.0, [0x77, 0x38], id="e5m2-max-up-f16"),
    pytest.param(E5M2, (F32,), [57344 - 2.0**-8, 1.0], 1.0, [0x7B, 0x3C], id="e5m2-max-down-f32"),
    pytest.param(E4M3, ALL, [1.0, -0.5], 2.0**-8, [0x78, 0xF0], id="one"),
    pytest.param(E5M2, ALL, [1.0, -0.5], 2.0**-15, [0x78, 0xF4], id="e5m2-one"),
    # 2**-10 is a tie with zero, 1.5 * 2**-9 one with 2 * 2**-9
    pytest.param(
        E4M3,
        (F32, BF16),
        [448.0, 2.0**-10, 1.5 * 2.0**-9, -(2.0**-9)],
        1.0,
        [0x7E, 0x00, 0x02, 0x81],
        id="subnormal-codes",
    ),
    pytest.param(
        E5M2,
        (F32, BF16),
        [57344.0, 2.0**-17, 1.5 * 2.0**-16, -(2.0**-16)],
        1.0,
        [0x7B, 0x00, 0x02, 0x81],
        id="e5m2-subnormal-codes",
    ),
    # 448 / amax ends at 2**127, from amax = 2**-119 down
    pytest.param(E4M3, (F32, BF16), [1.75 * 2.0**-119], 2.0**-127, [0x7E], id="largest-scale"),
    pytest.param(E4M3, (F32, BF16), [1.75 * 2.0**-120], 2.0**-127, [0x76], id="overflow"),
    pytest.param(E5M2, (F32, BF16), [1.75 * 2.0**-113], 2.0**-127, [0x77], id="e5m2-overflow"),
    pytest.param(E4M3, (F32,), [2.0**-149, -(2.0**-149)], 2.0**-127, [0x00, 0x80], id="tiny-f32"),
    pytest.param(
        E4M3, (F32, BF16), [2.0**-133, -(2.0**-133)], 2.0**-127, [0x08, 0x88], id="tiny-bf16"
    ),
    pytest.param(E4M3, (F16,), [2.0**-24, -(2.0**-24)], 2.0**-32, [0x78, 0xF8], id="tiny-f16"),
    pytest.param(E5M2, (F32,), [2.0**-149], 2.0**-127, [0x00], id="e5m2-tiny-f32"),
    pytest.param(E5M2, (F32, BF16), [2.0**-133], 2.0**-127, [0x24], id="e5m2-tiny-bf16"),
    pytest.param(E5M2, (F16,), [2.0**-24], 2.0**-39, [0x78], id="e5m2-tiny-f16"),
    pytest.param(E4M3, (F32,), [FLT_MAX, -FLT_MAX], 2.0**120, [0x78, 0xF8], id="flt-max"),
    pytest.param(E5M2, (F32,), [FLT_MAX, -FLT_MAX], 2.0**113, [0x78, 0xF8], id="e5m2-flt-max"),
    pytest.param(E4M3, (F16,), [65504.0, -65504.0], 2.0**8, [0x78, 0xF8], id="f16-max"),
    pytest.param(E5M2, (F16,), [65504.0, -65504.0], 2.0, [0x78, 0xF8], id="e5m2-f16-max"),
    # one infinity, and the block is cast as it is
    pytest.param(E4M3, ALL, [INF, -INF, 1.0, -1.0], 1.0, [0x7E, 0xFE, 0x38, 0xB8], id="inf"),
    pytest.param(E5M2, ALL, [-INF, 1.0], 1.0, [0xFB, 0x3C], id="e5m2-inf"),
    pytest.param(E4M3, (F32,), [INF, FLT_MAX, -500.0], 1.0, [0x7E, 0x7E, 0xFE], id="inf-and-more"),
    pytest.param(
        E4M3, ALL, [NAN, 448.0, -NAN, -1.0], 1.0, [0x7F, 0x7E, 0x7F, 0xB8], id="nan-is-ignored"
    ),
    pytest.param(E5M2, ALL, [57344.0, NAN, -NAN], 1.0, [0x7B, 0x7F, 0x7F], id="e5m2-nan"),
    pytest.param(E4M3, ALL, [NAN] * 128, 1.0, [0x7F] * 128, id="nan-only"),
    pytest.param(E4M3, ALL, [NAN, INF], 1.0, [0x7F, 0x7E], id="nan-and-inf"),
]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(("dtype", "x_dtypes", "values", "scale_inv", "codes"), BYTES)
def test_block(
    dtype: str,
    x_dtypes: tuple[torch.dtype, ...],
    values: list[float],
    scale_inv: float,
    codes: list[int],
    plane: str,
) -> None:
    for x_dtype in x_dtypes:
        assert one_block(values, x_dtype, plane, dtype=dtype) == (scale_inv, codes), x_dtype


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(
    ("x_dtype", "values", "bits", "codes"),
    [
        # 448 / 7 and 1 / 64 are exact, 448 / 3 and 1 / that are not
        pytest.param(F32, [7.0, 6.75], 0x3C800000, [0x7E, 0x7E], id="exact"),
        pytest.param(F32, [3.0, -1.0], 0x3BDB6DB7, [0x7E, 0xF1], id="rounded"),
        pytest.param(F32, [FLT_MAX, 1.0], 0x7B124924, [0x7E, 0x00], id="flt-max"),
        # the quotient overflows: the largest number of the input's own dtype takes its place
        pytest.param(F32, [1.75 * 2.0**-120], 0x00200000, [0x7E], id="overflow-f32"),
        pytest.param(BF16, [1.75 * 2.0**-120], 0x00202020, [0x7E], id="overflow-bf16"),
        pytest.param(F32, [0.0, -0.0], 0x3F800000, [0x00, 0x80], id="zeros"),
        pytest.param(F32, [INF, 2.0], 0x3F800000, [0x7E, 0x40], id="inf"),
    ],
)
def test_block_under_any_float32_scale(
    x_dtype: torch.dtype, values: list[float], bits: int, codes: list[int], plane: str
) -> None:
    scale_inv, found = one_block(values, x_dtype, plane, pow_2=False)
    assert struct.pack(">f", scale_inv).hex() == f"{bits:08x}"
    assert found == codes


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(
    ("x_dtype", "epsilon", "pow_2", "values", "scale_inv", "codes"),
    [
        # 448 / 1e-4 is 4.48e6, above 2**22
        pytest.param(F32, 1e-4, True, [0.0], 2.0**-22, [0x00], id="zeros"),
        pytest.param(F32, 1e-4, True, [1e-5], 2.0**-22, [0x62], id="below"),
        pytest.param(F32, 1e-4, True, [1.0, 1e-5], 2.0**-8, [0x78, 0x01], id="above"),
        pytest.param(F32, 3.5, False, [2.0], 2.0**-7, [0x78], id="float32-scale"),
        pytest.param(F32, 3.5, True, [NAN, 2.0], 2.0**-7, [0x7F, 0x78], id="nan"),
        pytest.param(F32, 3.5, True, [INF, 2.0], 1.0, [0x7E, 0x40], id="inf"),
        # a quotient that overflows becomes the largest number of the input's dtype
        pytest.param(F32, 1e-37, True, [0.0], 2.0**-127, [0x00], id="overflow-f32"),
        pytest.param(BF16, 1e-37, True, [0.0], 2.0**-127, [0x00], id="overflow-bf16"),
        pytest.param(F16, 1e-37, True, [0.0], 2.0**-15, [0x00], id="overflow-f16"),
        # too small for a float32: as if there were none
        pytest.param(F32, 1e-50, True, [0.0], 1.0, [0x00], id="underflow"),
    ],
)
def test_epsilon_is_the_smallest_amax(
    x_dtype: torch.dtype,
    epsilon: float,
    pow_2: bool,
    values: list[float],
    scale_inv: float,
    codes: list[int],
    plane: str,
) -> None:
    found = one_block(values, x_dtype, plane, pow_2=pow_2, amax_epsilon=epsilon)
    assert found == (scale_inv, codes)


@pytest.mark.parametrize(("dtype", "top"), [(E4M3, 8), (E5M2, 15)])
@pytest.mark.parametrize(("x_dtype", "ulp"), [(F32, 2.0**-23), (BF16, 2.0**-7), (F16, 2.0**-10)])
def test_scale_halves_one_ulp_above_the_largest_code_and_not_at_a_power_of_two(
    dtype: str, top: int, x_dtype: torch.dtype, ulp: float
) -> None:
    for k in (-12, -1, 0, 1, 14) if x_dtype == F16 else (-100, -12, -1, 0, 1, 20, 126):
        found = [
            one_block([amax * 2.0**k], x_dtype, "rowwise", dtype=dtype)[0]
            for amax in (1.75 - ulp, 1.75, 1.75 + ulp, 2 - ulp, 1.0, 1 + ulp)
        ]
        low, high = 2.0 ** (k - top), 2.0 ** (k - top + 1)
        assert found == [low, low, high, high, low, low], k


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("special", [NAN, INF], ids=["nan", "inf"])
def test_special_value_at_each_place_of_a_block_changes_no_other_block(
    plane: str, special: float
) -> None:
    # 128 blocks in a row, each with the value at another place, between blocks of ones
    x = torch.ones(128, 256)
    if plane == "columnwise":
        x = torch.ones(256, 128)
        x[torch.arange(128), torch.arange(128)] = special
    elif plane == "rowwise":
        x[torch.arange(128), torch.arange(128)] = special
    else:
        x[37, 101] = special
    out = quantize(x, plane)
    kept = "columnwise" if plane == "columnwise" else "rowwise"
    data, scale = out[f"{kept}_data"], out[f"{kept}_scale_inv"]
    touched = 1.0 if special == INF else 2.0**-8
    assert scale[0, : 1 if plane == "two_d" else None].unique().tolist() == [touched]
    untouched = scale[0, 1:2] if plane == "two_d" else scale[1]
    assert untouched.unique().tolist() == [2.0**-8]
    hit = data == (0x7E if special == INF else 0x7F)
    assert hit.sum() == (1 if plane == "two_d" else 128)
    assert data[:, :128][~hit[:, :128]].unique().tolist() == [0x38 if special == INF else 0x78]
    assert data[:, 128:].unique().tolist() == [0x78]


def test_a_zero_block_beside_others_has_scale_1() -> None:
    x = torch.ones(2, 384)
    x[:, 128:256] = 0.0
    out = quantize(x, "rowwise")
    assert out["rowwise_scale_inv"].tolist() == [
        [2.0**-8, 2.0**-8, 0.0, 0.0],
        [1.0, 1.0, 0.0, 0.0],
        [2.0**-8, 2.0**-8, 0.0, 0.0],
    ]
    assert out["rowwise_data"][:, 128:256].count_nonzero() == 0


# --- the oracle: spec section 3, one element at a time; Python floats hold every step exactly


def float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(INF, value)


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


def oracle_scale(amax: float, x_dtype: torch.dtype, options: dict[str, Any]) -> float:
    amax = max(amax, float32(options["amax_epsilon"]))
    if amax == 0 or math.isinf(amax):
        return 1.0
    # a float64 quotient of float32 numbers, rounded again, is the float32 quotient
    scale = float32(TABLES[options["dtype"]][-1] / amax)
    if math.isinf(scale):
        scale = torch.finfo(x_dtype).max
    return math.ldexp(1.0, math.frexp(scale)[1] - 1) if options["pow_2"] else scale


def oracle(x: Tensor, block: tuple[int, int], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the codes of ``x`` and one scale_inv a block; edges may be ragged."""
    rows, columns = block
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.uint8)
    scales = torch.empty(-(-m // rows), -(-k // columns))
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        values = x[where].flatten().tolist()
        amax = max([abs(v) for v in values if not math.isnan(v)], default=0.0)
        scale = oracle_scale(amax, x.dtype, options)
        scales[i, j] = float32(1 / scale)
        line = [oracle_code(float32(v * scale), options["dtype"]) for v in values]
        codes[where] = torch.tensor(line, dtype=torch.uint8).view(x[where].shape)
    return codes, scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x_dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("plane", "block"), [("rowwise", (1, 128)), ("columnwise", (128, 1)), ("two_d", (128, 128))]
)
def test_quantize_equals_the_oracle_on_ragged_edges(
    dtype: str, x_dtype: torch.dtype, plane: str, block: tuple[int, int]
) -> None:
    x = hostile((140, 150), x_dtype, seed=7, block=block, nonfinite=True)
    for pow_2, epsilon in ((True, 0.0), (False, 1e-3)):
        options = {"dtype": dtype, "pow_2": pow_2, "amax_epsilon": epsilon}
        codes, scales = oracle(x, block, options)
        out = quantize(x, plane, **options)
        if plane != "columnwise":
            assert_same_bits(out["rowwise_data"], codes)
            expected = scales if plane == "two_d" else scales.t()
            got = out["rowwise_scale_inv"]
            assert_same_bits(got[:, : expected.shape[1]], expected)
            assert got.count_nonzero() == expected.numel()
        if plane != "rowwise":
            assert_same_bits(out["columnwise_data"], codes.t())
            expected = scales.t() if plane == "two_d" else scales
            got = out["columnwise_scale_inv"]
            assert_same_bits(got[:, : expected.shape[1]], expected)
            assert got.count_nonzero() == expected.numel()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("plane", PLANES)
def test_dequantize_every_code_at_scales_of_every_exponent(
    dtype: str, out_dtype: torch.dtype, plane: str
) -> None:
    g = torch.Generator().manual_seed(9)
    mantissa = 1 + torch.rand(254, generator=g, dtype=torch.float64)
    scales = torch.ldexp(mantissa, torch.arange(254) - 127).float()
    scales = torch.cat([scales, torch.tensor([2.0**-149, INF])])
    finite = TABLES[dtype] + ([] if dtype == E4M3 else [INF])
    finite += [NAN] * (128 - len(finite))
    values = torch.tensor(finite + [-v for v in finite], dtype=torch.float64)
    codes = torch.arange(256, dtype=torch.uint8)
    # float64 holds the product; float32 rounds it once, the output type once more
    if plane == "two_d":  # one scale for 128 rows
        scales = scales[::32]
        data, buffer = codes.expand(8 * 128, 256), scales.unsqueeze(1).expand(8, 4)
        expected = (scales.double()[:, None] * values).repeat_interleave(128, 0)
    else:  # one scale for a row of each block, stored transposed
        data, buffer = codes.expand(256, 256), scales.expand(2, 256)
        expected = scales.double()[:, None] * values
    expected = expected.float().to(out_dtype)
    columnwise = plane == "columnwise"
    got = reference.dequantize(
        data,
        buffer.contiguous(),
        tuple(expected.shape),
        dtype=dtype,
        columnwise=columnwise,
        two_d=plane == "two_d",
        out_dtype=out_dtype,
    )
    got = got.t() if columnwise else got
    assert got.dtype == out_dtype
    # which NaN it is depends on the instruction that multiplied
    assert_same_bits(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
