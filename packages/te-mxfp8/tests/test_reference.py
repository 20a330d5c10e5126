# SPDX-License-Identifier: Apache-2.0
"""Bytes of the reference: written out by hand, and against an oracle in exact scalar arithmetic."""

from __future__ import annotations

import bisect
import itertools
import math
import struct

import pytest
import torch
from torch import Tensor

from te_mxfp8 import reference
from te_proto.testing import assert_same_bits, hostile

E4M3, E5M2 = "e4m3", "e5m2"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan
FLT_MAX = (2 - 2.0**-23) * 2.0**127
PLANES = ("rowwise", "columnwise", "two_d")


def one_block(values: list[float], x_dtype: torch.dtype, dtype: str, plane: str) -> list[int]:
    """Return the scale byte of one block, then the codes of ``values``; zeros fill the block."""
    line = torch.tensor(values + [0.0] * (32 - len(values)), dtype=torch.float64).to(x_dtype)
    shaped = {
        "rowwise": line.view(1, 32),
        "columnwise": line.view(32, 1),
        "two_d": line.expand(32, 32),
    }[plane]
    out = reference.quantize(
        shaped,
        dtype=dtype,
        rowwise=plane != "columnwise",
        columnwise=plane != "rowwise",
        two_d=plane == "two_d",
        swizzled=False,
    )
    kept = "columnwise" if plane == "columnwise" else "rowwise"
    if plane == "two_d":
        assert_same_bits(out["columnwise_data"], out["rowwise_data"])
        assert out["rowwise_scale_inv"][:32, 0].unique().numel() == 1
        scale = out["rowwise_scale_inv"][0, 0]
        assert (out["columnwise_scale_inv"][0, :32] == scale).all()
    codes = out[f"{kept}_data"].flatten()[: len(values)]
    return [int(out[f"{kept}_scale_inv"][0, 0]), *codes.tolist()]


BYTES = [
    # element format, input dtypes, values, scale byte and codes
    pytest.param(E4M3, (F32, BF16, F16), [0.0, -0.0], [0, 0x00, 0x80], id="zeros-keep-their-sign"),
    pytest.param(E5M2, (F32, BF16, F16), [0.0, -0.0], [0, 0x00, 0x80], id="e5m2-zeros"),
    pytest.param(
        E4M3, (F32, BF16, F16), [448.0, -448.0, 1.0, 27.0], [127, 0x7E, 0xFE, 0x38, 0x5E], id="max"
    ),
    pytest.param(
        E5M2, (F32, BF16, F16), [57344.0, -57344.0, 1.0], [127, 0x7B, 0xFB, 0x3C], id="e5m2-max"
    ),
    pytest.param(E4M3, (F32,), [448 + 2.0**-15, 1.0], [128, 0x76, 0x30], id="max-up-f32"),
    pytest.param(E4M3, (BF16,), [450.0, 1.0], [128, 0x76, 0x30], id="max-up-bf16"),
    pytest.param(E4M3, (F16,), [448.25, 1.0], [128, 0x76, 0x30], id="max-up-f16"),
    pytest.param(E4M3, (F32,), [448 - 2.0**-15, 1.0], [127, 0x7E, 0x38], id="max-down-f32"),
    pytest.param(E4M3, (BF16,), [446.0, 1.0], [127, 0x7E, 0x38], id="max-down-bf16"),
    pytest.param(E4M3, (F16,), [447.75, 1.0], [127, 0x7E, 0x38], id="max-down-f16"),
    pytest.param(E5M2, (F32,), [57344 + 2.0**-8, 1.0], [128, 0x77, 0x38], id="e5m2-max-up-f32"),
    pytest.param(E5M2, (BF16,), [57600.0, 1.0], [128, 0x77, 0x38], id="e5m2-max-up-bf16"),
    pytest.param(E5M2, (F16,), [57376.0, 1.0], [128, 0x77, 0x38], id="e5m2-max-up-f16"),
    pytest.param(E5M2, (F32,), [57344 - 2.0**-8, 1.0], [127, 0x7B, 0x3C], id="e5m2-max-down-f32"),
    pytest.param(E4M3, (F32, BF16, F16), [1.0, -0.5], [119, 0x78, 0xF0], id="one"),
    pytest.param(E5M2, (F32, BF16, F16), [1.0, -0.5], [112, 0x78, 0xF4], id="e5m2-one"),
    # 0.5 * 2**-9 is a tie with zero, 1.5 * 2**-9 one with 2 * 2**-9
    pytest.param(
        E4M3,
        (F32, BF16),
        [448.0, 2.0**-10, 1.5 * 2.0**-9, -(2.0**-9)],
        [127, 0x7E, 0x00, 0x02, 0x81],
        id="subnormal-codes",
    ),
    pytest.param(
        E5M2,
        (F32, BF16),
        [57344.0, 2.0**-17, 1.5 * 2.0**-16, -(2.0**-16)],
        [127, 0x7B, 0x00, 0x02, 0x81],
        id="e5m2-subnormal-codes",
    ),
    # 2**-127 is the smallest scale: 448 * 2**-127 still fits it
    pytest.param(E4M3, (F32, BF16), [448 * 2.0**-127], [0, 0x7E], id="smallest-scale"),
    # ... and so does one ulp more, whose quotient by 448 rounds down to 2**-127
    pytest.param(E4M3, (F32,), [448 * 2.0**-127 + 2.0**-142], [0, 0x7E], id="smallest-scale-up"),
    pytest.param(E4M3, (F32,), [448 * 2.0**-127 + 2.0**-141], [1, 0x76], id="second-scale"),
    pytest.param(E4M3, (F32,), [2.0**-149, -(2.0**-149)], [0, 0x00, 0x80], id="tiny-f32"),
    pytest.param(E4M3, (F32, BF16), [2.0**-133, -(2.0**-133)], [0, 0x08, 0x88], id="tiny-bf16"),
    pytest.param(E4M3, (F16,), [2.0**-24, -(2.0**-24)], [95, 0x78, 0xF8], id="tiny-f16"),
    pytest.param(E5M2, (F32,), [2.0**-149, -(2.0**-149)], [0, 0x00, 0x80], id="e5m2-tiny-f32"),
    pytest.param(E5M2, (F32, BF16), [2.0**-133], [0, 0x24], id="e5m2-tiny-bf16"),
    pytest.param(E5M2, (F16,), [2.0**-24], [88, 0x78], id="e5m2-tiny-f16"),
    pytest.param(E4M3, (F32,), [FLT_MAX, -FLT_MAX], [247, 0x78, 0xF8], id="flt-max"),
    pytest.param(E5M2, (F32,), [FLT_MAX, -FLT_MAX], [240, 0x78, 0xF8], id="e5m2-flt-max"),
    pytest.param(E4M3, (F16,), [65504.0, -65504.0], [135, 0x78, 0xF8], id="f16-max"),
    pytest.param(E5M2, (F16,), [65504.0, -65504.0], [128, 0x78, 0xF8], id="e5m2-f16-max"),
    pytest.param(
        E4M3, (F32, BF16, F16), [INF, -INF, 1.0, -1.0], [254, 0x7E, 0xFE, 0x00, 0x80], id="inf"
    ),
    pytest.param(E4M3, (F32,), [-INF, FLT_MAX], [254, 0xFE, 0x40], id="inf-and-flt-max"),
    pytest.param(E5M2, (F32, BF16, F16), [INF, -INF, 1.0], [254, 0x7B, 0xFB, 0x00], id="e5m2-inf"),
    pytest.param(
        E4M3, (F32, BF16, F16), [NAN, 448.0, -NAN, -1.0], [127, 0x7F, 0x7E, 0x7F, 0xB8], id="nan"
    ),
    pytest.param(
        E5M2, (F32, BF16, F16), [57344.0, NAN, -NAN], [127, 0x7B, 0x7F, 0x7F], id="e5m2-nan"
    ),
    pytest.param(E4M3, (F32, BF16, F16), [NAN] * 32, [0] + [0x7F] * 32, id="nan-only"),
    pytest.param(E5M2, (F32, BF16, F16), [-NAN] * 32, [0] + [0x7F] * 32, id="e5m2-nan-only"),
    pytest.param(E4M3, (F32, BF16, F16), [NAN, INF], [254, 0x7F, 0x7E], id="nan-and-inf"),
    pytest.param(
        E4M3, (F32, BF16, F16), [0.0] * 31 + [NAN], [0] + [0] * 31 + [0x7F], id="nan-last"
    ),
]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(("dtype", "x_dtypes", "values", "expected"), BYTES)
def test_block(
    dtype: str,
    x_dtypes: tuple[torch.dtype, ...],
    values: list[float],
    expected: list[int],
    plane: str,
) -> None:
    for x_dtype in x_dtypes:
        assert one_block(values, x_dtype, dtype, plane) == expected, x_dtype


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize(("x_dtype", "ulp"), [(F32, 2.0**-23), (BF16, 2.0**-7)])
def test_scale_steps_up_one_ulp_above_the_largest_code(
    dtype: str, largest: float, x_dtype: torch.dtype, ulp: float
) -> None:
    step = 2.0 ** math.floor(math.log2(largest)) * ulp
    for k in (-100, -20, -1, 0, 1, 20, 100):
        scales = [
            one_block([amax * 2.0**k], x_dtype, dtype, "rowwise")[0]
            for amax in (largest - step, largest, largest + step)
        ]
        assert scales == [127 + k, 127 + k, 128 + k], k


def test_a_zero_block_beside_others_has_scale_0() -> None:
    x = torch.ones(32, 96)
    x[:, 32:64] = 0.0
    out = reference.quantize(
        x, dtype=E4M3, rowwise=True, columnwise=False, two_d=False, swizzled=False
    )
    assert out["rowwise_scale_inv"][0].tolist() == [119, 0, 119, 0]
    assert out["rowwise_data"][:, 32:64].count_nonzero() == 0


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


def oracle_block(block: list[float], dtype: str) -> tuple[int, list[int]]:
    amax = max([abs(v) for v in block if not math.isnan(v)], default=0.0)
    if math.isinf(amax):
        scale = 254
    else:
        quotient = float32(amax * float32(1 / TABLES[dtype][-1]))
        scale = next(e for e in range(255) if math.ldexp(1.0, e - 127) >= quotient)
    return scale, [oracle_code(float32(v * math.ldexp(1.0, 127 - scale)), dtype) for v in block]


def oracle(x: Tensor, dtype: str, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the codes of ``x`` and one scale byte a block."""
    rows, columns = block
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.uint8)
    scales = torch.empty(m // rows, k // columns, dtype=torch.uint8)
    for i, j in itertools.product(range(m // rows), range(k // columns)):
        where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scale, line = oracle_block(x[where].flatten().tolist(), dtype)
        scales[i, j] = scale
        codes[where] = torch.tensor(line, dtype=torch.uint8).view(rows, columns)
    return codes, scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x_dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "block", [(1, 32), (32, 1), (32, 32)], ids=["rowwise", "columnwise", "two_d"]
)
def test_quantize_equals_the_oracle(
    dtype: str, x_dtype: torch.dtype, block: tuple[int, int]
) -> None:
    x = hostile((96, 96), x_dtype, seed=7, block=block, nonfinite=True)
    codes, scales = oracle(x, dtype, block)
    planes = {"rowwise": block != (32, 1), "columnwise": block != (1, 32)}
    out = reference.quantize(x, dtype=dtype, two_d=block == (32, 32), swizzled=False, **planes)
    if planes["rowwise"]:
        assert_same_bits(out["rowwise_data"], codes)
        assert_same_bits(
            out["rowwise_scale_inv"][:96, :3], scales.repeat_interleave(block[0], dim=0)
        )
    if planes["columnwise"]:
        assert_same_bits(out["columnwise_data"], codes)
        assert_same_bits(
            out["columnwise_scale_inv"][:3, :96], scales.repeat_interleave(block[1], dim=1)
        )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_dequantize_every_code_at_every_scale(
    dtype: str, out_dtype: torch.dtype, columnwise: bool
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 8)
    finite = TABLES[dtype] + ([] if dtype == E4M3 else [INF])
    finite += [NAN] * (128 - len(finite))
    values = torch.tensor(finite + [-v for v in finite], dtype=torch.float64)
    powers = torch.tensor([math.ldexp(1.0, e - 127) for e in range(255)] + [NAN]).double()
    # float64 holds the product; float32 rounds it once, the output type once more
    expected = (powers[:, None] * values).float().to(out_dtype)
    if columnwise:
        codes, scales, expected = codes.t(), scales.t(), expected.t()
    got = reference.dequantize(
        codes,
        scales.contiguous(),
        dtype=dtype,
        columnwise=columnwise,
        swizzled=False,
        out_dtype=out_dtype,
    )
    assert got.dtype == out_dtype
    # which NaN it is depends on the instruction that multiplied
    assert (got.isnan() == expected.isnan()).all()
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
