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

from te_nvfp4 import NVFP4Quantizer
from te_nvfp4.philox import block_bytes
from te_proto.numerics import unpack_e2m1
from te_proto.testing import assert_same_bits, hostile

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan
FLT_MAX = (2 - 2.0**-23) * 2.0**127
TINY = 2.0**-149


def float32(x: float) -> float:
    """Round to float32; what is beyond becomes an infinity."""
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(INF, x)


def divide(a: float, b: float) -> float:
    if b == 0:
        return INF if a else NAN
    return float32(a / b)


def times(a: float, b: float) -> float:
    return float32(a * b)


# -- bytes written out -----------------------------------------------------------------------------


def one_block(
    values: list[float], dtype: torch.dtype, plane: str, others: float, **options: Any
) -> tuple[int, list[int]]:
    """Return the scale and the codes of a block of ``values``, zeros behind, beside one block.

    The other block is of ``others`` alone, and all else is zero.
    """
    line = torch.tensor(values + [0.0] * (16 - len(values)), dtype=torch.float64).to(dtype)
    x = torch.zeros(32, 32, dtype=dtype)
    x[0, :16] = line
    x[16:, 16:] = others
    q = NVFP4Quantizer(rowwise=plane == "rowwise", columnwise=plane != "rowwise", **options)
    t = q.quantize(x if plane == "rowwise" else x.t().contiguous())
    scale = int(getattr(t, f"{plane}_scale_inv")[0, 0])
    return scale, unpack_e2m1(getattr(t, f"{plane}_data"))[0, : len(values)].tolist()


BYTES = [
    # dtypes, values, amax of the tensor if it is another block's, scale byte, codes
    pytest.param((F32, BF16, F16), [0.0, -0.0], 0.0, 0x00, [0, 8], id="zero-tensor"),
    pytest.param((F32, BF16, F16), [0.0, -0.0], 6.0, 0x00, [0, 8], id="zero-block-among-others"),
    pytest.param(
        (F32, BF16, F16),
        [6.0, -6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, -0.5],
        0.0,
        0x7E,  # the one block of its tensor has the largest scale, 448
        [7, 15, 6, 5, 4, 3, 2, 1, 9],
        id="every-code",
    ),
    pytest.param(
        (F32, BF16, F16),
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0],
        0.0,
        0x7E,
        [7, 0, 2, 2, 4, 4, 6, 6, 8, 14],
        id="ties-to-the-even-code",
    ),
    pytest.param(
        (F32,), [6.0, 0.25 + 2.0**-24, 5 + 2.0**-21], 0.0, 0x7E, [7, 1, 7], id="past-ties"
    ),
    pytest.param((F32, BF16, F16), [3.0, 1.5], 6.0, 0x76, [7, 5], id="half-of-the-amax"),
    pytest.param((F32, BF16, F16), [1.0, 1.0], 448.0, 0x38, [7, 7], id="scale-of-one"),
    # a scale of 448 / 2**18 is under half of the smallest, 2**-9: codes of 6 that stand for zero
    pytest.param((F32, BF16), [2.0**-18, -(2.0**-18)], 1.0, 0x01, [7, 15], id="smallest-scale"),
    pytest.param((F32, BF16), [2.0**-19, -(2.0**-19)], 1.0, 0x00, [7, 15], id="scale-of-zero"),
    pytest.param((F32, BF16), [2.0**-140, -(2.0**-149)], 1.0, 0x00, [0, 8], id="next-to-nothing"),
    pytest.param((F32,), [FLT_MAX, -FLT_MAX, FLT_MAX / 2], 0.0, 0x7E, [7, 15, 5], id="flt-max"),
    pytest.param((F32,), [TINY, -TINY], 0.0, 0x00, [0, 8], id="smallest-subnormals"),
    # encoded by FLT_MAX instead of 2688 * 2**126: the scale is 4 / 6 as E4M3, and so are the codes
    pytest.param((F32, BF16), [2.0**-126, 2.0**-127], 0.0, 0x33, [6, 4], id="smallest-normal"),
    # an infinite amax encodes by 1
    pytest.param((F32, BF16, F16), [INF, 1.0, -INF], 0.0, 0x7E, [7, 0, 15], id="infinity"),
    pytest.param((F32, BF16, F16), [6.0, 3.0, -1.0], INF, 0x38, [7, 5, 10], id="beside-infinity"),
    pytest.param((F32, BF16, F16), [NAN, 6.0, -NAN, 3.0], 0.0, 0x7E, [7, 7, 7, 5], id="nan"),
    pytest.param((F32, BF16, F16), [NAN, NAN], 6.0, 0x00, [7, 7], id="nan-alone"),
]


@pytest.mark.parametrize(("dtypes", "values", "others", "scale", "codes"), BYTES)
@pytest.mark.parametrize("plane", ["rowwise", "columnwise"])
def test_bytes_of_a_block(
    dtypes: tuple[torch.dtype, ...],
    values: list[float],
    others: float,
    scale: int,
    codes: list[int],
    plane: str,
) -> None:
    for dtype in dtypes:
        assert one_block(values, dtype, plane, others) == (scale, codes)
        if others == 0.0:
            # its 16x16 block has no other element
            found = one_block(values, dtype, plane, others, with_2d_quantization=True)
            assert found == (scale, codes)


@pytest.mark.parametrize("place", range(16))
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_at_each_place_of_a_block(place: int, value: float) -> None:
    x = torch.full((16, 16), 2.0)
    x[3, place] = value
    t = NVFP4Quantizer(columnwise=False).quantize(x)
    codes = unpack_e2m1(t.rowwise_data)
    assert codes[3, place] == (15 if value < 0 else 7)
    others = torch.ones(16, 16, dtype=torch.bool)
    others[3] = False
    if math.isnan(value):
        assert t.amax_rowwise == 2.0
        others[3, torch.arange(16) != place] = True
        assert set(codes[others].tolist()) == {7}
    else:
        assert t.amax_rowwise == INF
        # blocks without it are scaled by their own maximum, 2 / 6 as E4M3
        assert set(codes[others].tolist()) == {7}
        assert t.rowwise_scale_inv[:16, 0].tolist() == [0x7E if i == 3 else 0x2B for i in range(16)]


# -- an oracle -------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [math.ldexp((code & 7) / 8 + (code >> 3 > 0), max(code >> 3, 1) - 7) for code in range(0x7F)]


def nearest(value: float, table: list[float]) -> int:
    """Return the code of the magnitude ``value``, ties to even, saturating."""
    if value >= table[-1]:
        return len(table) - 1
    above = bisect.bisect_right(table, value)
    middle = (table[above - 1] + table[above]) / 2
    return above if value > middle or (value == middle and above % 2 == 0) else above - 1


def element(value: float) -> int:
    if math.isnan(value):
        return 7
    return nearest(abs(value), E2M1) | (8 if math.copysign(1.0, value) < 0 else 0)


def chance(value: float, byte: int) -> int:
    if math.isnan(value):
        return 7

    def step(magnitude: float) -> float:
        return 2.0 if magnitude >= 4 else 1.0 if magnitude >= 2 else 0.5

    moved = min(float32(abs(value) + byte / 256 * step(abs(value))), 8.0)
    code = E2M1.index(min(moved // step(moved) * step(moved), 6.0))
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


def largest(values: list[float]) -> float:
    return max([abs(v) for v in values if not math.isnan(v)], default=0.0)


class Oracle:
    """One plane, its blocks along the rows of ``x``, element by element."""

    def __init__(self, q: NVFP4Quantizer, x: Tensor, bits: Tensor | None) -> None:
        self.q, self.x, self.bits = q, x.double(), bits
        self.rows, self.columns = x.shape
        values = self.x.tolist()
        all_of = [largest([v for row in values for v in row])] * self.rows
        self.amax = [largest(row) for row in values] if q.row_scaled_nvfp4 else all_of

    def tensor_scales(self, row: int) -> tuple[float, float]:
        amax = self.amax[row]
        encode = min(divide(6.0 * self.q.nvfp4_e4m3_max, amax), FLT_MAX) if amax else 1.0
        encode = encode or 1.0
        return encode, divide(1.0, encode)

    def scale(self, scale_inv: float, decode: float) -> tuple[int, float]:
        code = nearest(min(scale_inv, FLT_MAX), E4M3)
        return code, min(divide(1.0, times(E4M3[code], decode)), FLT_MAX)

    def lines(self, row: int, block: int) -> list[list[float]]:
        """Return the lines that share the scale: 16 of a 16x16 block, or the one."""
        rows = range(row - row % 16, row - row % 16 + 16) if self.q.with_2d_quantization else [row]
        return [self.x[r, block * 16 : block * 16 + 16].tolist() for r in rows]

    def block(self, row: int, block: int) -> tuple[int, list[int]]:
        lines, own = self.lines(row, block), self.x[row, block * 16 : block * 16 + 16].tolist()
        encode, decode = self.tensor_scales(row)
        amax = largest([v for line in lines for v in line])
        if self.q.nvfp4_use_4over6:
            base = times(divide(amax, 6.0) if amax != INF else INF, encode)
            six, four = (self.candidate(lines, row, s) for s in (base, times(base, 1.5)))
            code, multiplier = (four if four[2] < six[2] else six)[:2]
        else:
            code, multiplier = self.scale(times(amax, times(encode, float32(1 / 6))), decode)
        scaled = [times(v, multiplier) for v in own]
        if self.bits is None:
            return code, [element(v) for v in scaled]
        return code, [chance(v, int(b)) for v, b in zip(scaled, self.bits[row, block], strict=True)]

    def candidate(
        self, lines: list[list[float]], row: int, scale_inv: float
    ) -> tuple[int, float, float]:
        encode, decode = self.tensor_scales(row)
        code, multiplier = self.scale(scale_inv, decode)
        sums = []
        for line in lines:
            total = 0.0
            for v in line:
                e = element(times(v, multiplier))
                product = (-1.0 if e & 8 else 1.0) * times(E2M1[e & 7], E4M3[code])
                if self.q.nvfp4_4over6_err_use_fast_math:
                    difference = float32(product - times(v, encode))
                else:
                    bound = 6.0 * self.q.nvfp4_e4m3_max
                    difference = float32(divide(times(product, self.amax[row]), bound) - v)
                mse = self.q.nvfp4_4over6_err_mode == "MSE"
                error = times(difference, difference) if mse else abs(difference)
                total = float32(total + error)
            sums.append(total)
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [float32(sums[i] + sums[i + half]) for i in range(half)]
        return code, multiplier, sums[0]

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, the scale bytes and the amaxes."""
        codes = torch.empty(self.rows, self.columns, dtype=torch.uint8)
        scales = torch.empty(self.rows, self.columns // 16, dtype=torch.uint8)
        for row, block in itertools.product(range(self.rows), range(self.columns // 16)):
            scale, line = self.block(row, block)
            scales[row, block] = scale
            codes[row, block * 16 : block * 16 + 16] = torch.tensor(line, dtype=torch.uint8)
        amaxes = self.amax if self.q.row_scaled_nvfp4 else self.amax[:1]
        return codes, scales, torch.tensor(amaxes)


CHOOSE = {"nvfp4_use_4over6": True}
ORACLE = {
    "1d": {},
    "2d": {"with_2d_quantization": True},
    "sr": {"stochastic_rounding": True},
    "row-scaled": {"row_scaled_nvfp4": True},
    "4over6": CHOOSE,
    "4over6-mse-256": {**CHOOSE, "nvfp4_4over6_err_mode": "MSE", "nvfp4_e4m3_max": 256},
    "4over6-fast": {**CHOOSE, "nvfp4_4over6_err_use_fast_math": True},
    "4over6-2d": {**CHOOSE, "with_2d_quantization": True},
    "4over6-row-scaled": {**CHOOSE, "row_scaled_nvfp4": True, "columnwise": False},
}


@pytest.mark.parametrize("kind", ["moderate", "hostile", "nonfinite"])
@pytest.mark.parametrize("name", ORACLE)
def test_quantize_equals_the_oracle(name: str, kind: str) -> None:
    q = NVFP4Quantizer(**ORACLE[name])
    x = hostile((32, 64), BF16, seed=len(name), block=(1, 16), nonfinite=kind == "nonfinite")
    if kind == "moderate":
        g = torch.Generator().manual_seed(len(name))
        x = (torch.randn(32, 64, generator=g) * torch.randn(32, 1, generator=g).exp()).bfloat16()
    rng = torch.tensor([11, 13]) if q.stochastic_rounding else None
    t = q.quantize(x, rng=rng)
    for plane, matrix in (("rowwise", x), ("columnwise", x.t())):
        if not getattr(q, plane):
            continue
        outer, inner = matrix.shape
        bits = None
        if rng is not None:
            number = torch.arange(outer * inner // 16).view(outer, -1)
            bits = block_bytes(rng, number, 2, columnwise=plane == "columnwise")
        codes, scales, amax = Oracle(q, matrix, bits).all()
        assert_same_bits(getattr(t, f"amax_{plane}"), amax, what=plane)
        assert_same_bits(
            getattr(t, f"{plane}_scale_inv")[:outer, : inner // 16], scales, what=plane
        )
        assert_same_bits(unpack_e2m1(getattr(t, f"{plane}_data")), codes, what=plane)


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("exponent", [-149, -126, -125, -117, -5, 0, 11, 100, 127])
def test_amax_around_each_power_of_two(exponent: int, e4m3_max: int) -> None:
    power = torch.tensor(2.0**exponent)
    q = NVFP4Quantizer(columnwise=False, nvfp4_use_4over6=True, nvfp4_e4m3_max=e4m3_max)
    plain = NVFP4Quantizer(columnwise=False)
    for amax in (power.nextafter(torch.tensor(0.0)), power, power.nextafter(torch.tensor(INF))):
        x = torch.zeros(3, 16)
        x[0, :3] = torch.stack((amax, amax * 0.4, -amax * 0.7))
        x[1, 5:8] = torch.stack((amax * 2.0**-7, -amax * 2.0**-9, amax * 2.0**-8))
        for quantizer in (q, plain):
            codes, scales, found = Oracle(quantizer, x, None).all()
            t = quantizer.quantize(x)
            assert_same_bits(t.amax_rowwise, found)
            assert_same_bits(t.rowwise_scale_inv[:3, :1], scales)
            assert_same_bits(unpack_e2m1(t.rowwise_data), codes)


@pytest.mark.parametrize("name", ["1d", "row-scaled", "4over6-mse-256"])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
def test_dequantize_equals_the_oracle(name: str, out_dtype: torch.dtype) -> None:
    q = NVFP4Quantizer(**{**ORACLE[name], "columnwise": False})
    reciprocal = float32(1 / (6.0 * q.nvfp4_e4m3_max))
    for x in (hostile((32, 64), F32, seed=1), torch.randn(32, 64), torch.full((32, 64), INF)):
        t = q.quantize(x)
        codes = unpack_e2m1(t.rowwise_data)
        amax = t.amax_rowwise.tolist() * (1 if q.row_scaled_nvfp4 else 32)
        expected = torch.empty(32, 64, dtype=torch.float64)
        for row, column in itertools.product(range(32), range(64)):
            scale = E4M3[int(t.rowwise_scale_inv[row, column // 16])]
            factor = times(times(scale, amax[row]), reciprocal)
            code = int(codes[row, column])
            value = (-1.0 if code & 8 else 1.0) * E2M1[code & 7]
            expected[row, column] = times(value, factor)
        got, wanted = t.dequantize(out_dtype), expected.float().to(out_dtype)
        assert_same_bits(got.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))


def test_columnwise_plane_stands_for_the_same_values_as_that_of_the_transpose() -> None:
    x = hostile((48, 64), F32, seed=3)
    for fields in ({}, {"with_2d_quantization": True}, {"optimize_for_gemm": True}):
        columns = NVFP4Quantizer(rowwise=False, **fields).quantize(x)
        rows = NVFP4Quantizer(columnwise=False, **fields).quantize(x.t())
        assert_same_bits(columns.dequantize(), rows.dequantize().t())


def test_transformed_plane_dequantizes_to_the_values_it_was_made_of() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(5)).bfloat16()
    for signs in (True, False):
        q = NVFP4Quantizer(
            rowwise=False, with_rht=True, with_post_rht_amax=True, with_random_sign_mask=signs
        )
        error = (q.quantize(x).dequantize(F32) - x.float()).norm() / x.float().norm()
        assert 0.02 < error < 0.12


def test_2d_columnwise_plane_is_the_transpose_of_the_rowwise_one() -> None:
    t = NVFP4Quantizer(with_2d_quantization=True).quantize(hostile((48, 64), BF16, seed=9))
    assert_same_bits(unpack_e2m1(t.columnwise_data), unpack_e2m1(t.rowwise_data).t())
    rows, columns = t.rowwise_scale_inv[:48, :4], t.columnwise_scale_inv[:64, :3]
    assert_same_bits(rows, columns[::16].t().repeat_interleave(16, 0))
    assert_same_bits(columns, rows[::16].t().repeat_interleave(16, 0))


def test_planes_round_by_chances_of_their_own() -> None:
    x = torch.full((32, 32), 0.3)
    x[0, 0] = 6.0
    for fields in ({}, {"with_2d_quantization": True}):
        q = NVFP4Quantizer(stochastic_rounding=True, **fields)
        t = q.quantize(x, rng=torch.tensor([1, 2]))
        rows, columns = unpack_e2m1(t.rowwise_data), unpack_e2m1(t.columnwise_data).t()
        assert set(rows[:16, :16].flatten().tolist()) == {0, 1, 7}
        assert not torch.equal(rows, columns)


def test_mean_of_many_roundings_is_the_value() -> None:
    x = torch.linspace(-6, 6, 256).view(16, 16)
    q = NVFP4Quantizer(stochastic_rounding=True, columnwise=False, with_2d_quantization=True)
    total = sum(
        q.quantize(x, rng=torch.tensor([seed, 0])).dequantize().double() for seed in range(400)
    )
    # steps of up to 2, a 256th of which is cut off; 400 draws, 5 sigma
    assert ((total / 400 - x).abs() <= 2 / 256 + 5 * 1.0 / 20).all()
    nearest_error = (NVFP4Quantizer(columnwise=False).quantize(x).dequantize() - x).abs().mean()
    assert (total / 400 - x).abs().mean() < nearest_error / 4
