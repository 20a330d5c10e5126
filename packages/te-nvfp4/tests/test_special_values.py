# SPDX-License-Identifier: Apache-2.0
"""Special values in each plane, place and option, with the bytes written out.

On CUDA (``--te-device``) they are the bytes of the kernels. ``test_reference`` has more of them.
How the bytes here were had from the specification, apart from this code: an amax ``A`` encodes by
``S = 2688 / A`` (1 for 0 and infinity, at most FLT_MAX); the scale byte of a block with a maximum
``a`` is that of ``a * (S / 6)``, and a code that of ``x / (scale / S)``, each step rounded to
float32 and the last one to its format. With ``A = 2688`` a scale of 1 is for a maximum of 6.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_nvfp4 import NVFP4Quantizer
from te_proto.numerics import unpack_e2m1
from te_proto.testing import count_compiles

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)
INF, NAN = math.inf, math.nan
FLT_MAX, BF16_MAX, F16_MAX = (torch.finfo(x_dtype).max for x_dtype in ALL)
ULP = {F32: 2.0**-23, BF16: 2.0**-7, F16: 2.0**-10}
EDGE = 2688 * 2.0**-128  # below it S overflows

TWO_D = {"with_2d_quantization": True}
CHOOSE = {"nvfp4_use_4over6": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": TWO_D,
    "swizzled": {"optimize_for_gemm": True},
    "row-scaled": {"row_scaled_nvfp4": True},
    "4over6": CHOOSE,
    "4over6-mse-256": {**CHOOSE, "nvfp4_4over6_err_mode": "MSE", "nvfp4_e4m3_max": 256},
    "4over6-fast": {**CHOOSE, "nvfp4_4over6_err_use_fast_math": True},
    "4over6-2d": {**CHOOSE, **TWO_D},
    "sr": {"stochastic_rounding": True},
}

# columns of an amax of their own are of bfloat16 alone
MADE = [
    pytest.param(option, x_dtype, plane, id=f"{option}-{str(x_dtype)[6:]}-{plane}")
    for option in OPTIONS
    for x_dtype in ALL
    for plane in ("rowwise", "columnwise")
    if (option, plane) != ("row-scaled", "columnwise") or x_dtype == BF16
]
planes = pytest.mark.parametrize("plane", ["rowwise", "columnwise"])
inputs = pytest.mark.parametrize("x_dtype", ALL, ids=lambda d: str(d)[6:])


def quantize(
    x: Tensor, plane: str, device: torch.device, seed: int = 1, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale bytes ``[lines, blocks]``, codes and amax of a matrix cut in blocks along rows.

    The columnwise plane, which is stored transposed, is that of the transposed matrix.
    """
    # row-scaled columns and the choice for 16x16 blocks are made beside a rowwise plane alone
    beside = "row_scaled_nvfp4" in options or {*CHOOSE, *TWO_D} <= options.keys()
    rowwise = beside or plane == "rowwise"
    q = NVFP4Quantizer(rowwise=rowwise, columnwise=plane == "columnwise", **options)
    rng = torch.tensor([seed, 0], device=device) if q.stochastic_rounding else None
    made = q.quantize((x if plane == "rowwise" else x.t()).to(device), rng=rng)
    scale = getattr(made, f"{plane}_scale_inv").cpu()
    codes = unpack_e2m1(getattr(made, f"{plane}_data").cpu())
    return scale[: x.shape[0], : x.shape[1] // 16], codes, getattr(made, f"amax_{plane}").cpu()


def tensor(values: Any, x_dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(x_dtype)


# fmt: off
BYTES: dict[str, tuple[Any, ...]] = {
    # input dtypes, values of a block, amax of all (of another block, if it is not their own);
    # scale byte, codes
    "bf16-max": ((BF16,), [BF16_MAX, -BF16_MAX / 2, 1.0], BF16_MAX, 0x7E, [7, 13, 0]),
    "f16-max": ((F16,), [F16_MAX, -F16_MAX / 2, 2.0**-24], F16_MAX, 0x7E, [7, 13, 0]),
    "one-beside-flt-max": ((F32,), [1.0, -1.0], FLT_MAX, 0x00, [7, 15]),
    "tiny-beside-bf16-max": ((BF16,), [2.0**-133, -0.0], BF16_MAX, 0x00, [0, 8]),
    "tiny-beside-f16-max": ((F16,), [2.0**-24, -(2.0**-24)], F16_MAX, 0x00, [7, 15]),
    "tiny-bf16": ((F32, BF16), [2.0**-133, -(2.0**-133)], 2.0**-133, 0x03, [0, 8]),
    "tiny-f16": (ALL, [2.0**-24, -(2.0**-24)], 2.0**-24, 0x7E, [7, 15]),
    "subnormal-f16": ((F16,), [2.0**-14 - 2.0**-24], 2.0**-14 - 2.0**-24, 0x7E, [7]),
    "subnormal-f32": ((F32,), [2.0**-126 - 2.0**-149], 2.0**-126 - 2.0**-149, 0x33, [6]),
    "subnormal-bf16": ((BF16,), [2.0**-126 - 2.0**-133], 2.0**-126 - 2.0**-133, 0x33, [6]),
    # where S becomes the largest float32, and from there down with it
    "edge": ((F32, BF16), [EDGE, -EDGE / 2], EDGE, 0x7E, [7, 13]),
    "below-edge": ((F32,), [EDGE - 2.0**-140], EDGE - 2.0**-140, 0x7E, [7]),
    "half-edge": ((F32, BF16), [EDGE / 2, -EDGE / 4], EDGE / 2, 0x76, [7, 13]),
    "smallest-scale": ((F32,), [2.0**-135], 2.0**-135, 0x01, [0]),
    "no-scale": ((F32,), [2.0**-136, -(2.0**-136)], 2.0**-136, 0x00, [0, 8]),
    # scales halfway between two codes, and their neighbours
    "scale-tie-down": (ALL, [6.375], 2688.0, 0x38, [7]),
    "scale-tie-past": ((F32,), [6.375 + 2.0**-20], 2688.0, 0x39, [7]),
    "scale-tie-up": (ALL, [7.125], 2688.0, 0x3A, [7]),
    "scale-tie-after-the-sixth": ((F32,), [7.125 - 2.0**-21], 2688.0, 0x3A, [7]),
    "scale-tie-before": ((F32,), [7.125 - 2.0**-20], 2688.0, 0x39, [7]),
    "scale-of-half-a-step": ((F32, BF16), [6 * 2.0**-10], 2688.0, 0x00, [7]),
    "scale-of-more": ((F32,), [6 * 2.0**-10 + 2.0**-30], 2688.0, 0x01, [5]),
    "subnormal-tie": ((F32, BF16), [9 * 2.0**-9], 2688.0, 0x02, [6]),
    "largest-scale-tie": (ALL, [2592.0], 2688.0, 0x7E, [7]),
    "largest-scale-before": ((F32,), [2592.0 - 2.0**-12], 2688.0, 0x7D, [7]),
    # infinity elsewhere: S is 1
    "largest-beside-inf": ((F32,), [FLT_MAX, -2.0], INF, 0x7E, [7, 8]),
    "small-beside-inf": (ALL, [2.0**-10, -(2.0**-24)], INF, 0x00, [7, 15]),
    "zeros-beside-inf": (ALL, [0.0, -0.0], INF, 0x00, [0, 8]),
    "nan-beside-inf": (ALL, [NAN, 2.0], INF, 0x2B, [7, 7]),
}
# fmt: on


def matrix(values: list[float], amax: float, x_dtype: torch.dtype) -> Tensor:
    """Return ``values`` as the beginning of one block, and ``amax`` in another."""
    x = torch.zeros(32, 32, dtype=x_dtype)
    x[3, : len(values)] = tensor(values, x_dtype)
    x[17, 20] = tensor(amax, x_dtype)
    return x


@planes
@pytest.mark.parametrize("option", ["1d", "2d"])
@pytest.mark.parametrize("name", BYTES)
def test_block(name: str, option: str, plane: str, device: torch.device) -> None:
    x_dtypes, values, amax, scale, line = BYTES[name]
    for x_dtype in x_dtypes:
        x = matrix(values, amax, x_dtype)
        scales, codes, found = quantize(x, plane, device, **OPTIONS[option])
        assert found.tolist() == [amax]
        # a 16x16 block has one scale for all its lines
        lines = range(16) if option == "2d" else [3]
        assert scales[:16, 0].tolist() == [scale if i in lines else 0 for i in range(16)]
        assert codes[3, : len(line)].tolist() == line
        codes[3, : len(line)] = 0
        assert codes.nonzero().tolist() in ([], [[17, 20]])  # [] if amax is too small for a code


def test_codes_lie_two_a_byte_along_the_blocks_of_each_plane(device: torch.device) -> None:
    x = torch.zeros(16, 16)
    x[0, :6] = tensor([6.0, -0.0, -4.0, 1.0, 2.0, -3.0], F32)
    for rows, plane in ((x, "rowwise"), (x.t(), "columnwise")):
        q = NVFP4Quantizer(rowwise=plane == "rowwise", columnwise=plane == "columnwise")
        data = getattr(q.quantize(rows.to(device)), f"{plane}_data").cpu()
        # the first of two in the low half
        assert data[0].tolist() == [0x87, 0x2E, 0xD4, 0x00, 0x00, 0x00, 0x00, 0x00]
        assert data[1:].count_nonzero() == 0


@pytest.mark.parametrize(("option", "x_dtype", "plane"), MADE)
@pytest.mark.parametrize(("zero", "code"), [(0.0, 0), (-0.0, 8)], ids=["0", "-0"])
def test_zero_tensor(
    zero: float, code: int, option: str, x_dtype: torch.dtype, plane: str, device: torch.device
) -> None:
    x = torch.full((32, 64), zero, dtype=x_dtype)
    found = quantize(x, plane, device, **OPTIONS[option])
    assert [part.unique().tolist() for part in found] == [[0], [code], [0.0]]


@pytest.mark.parametrize("special", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("option", "x_dtype", "plane"), [m for m in MADE if m.values[0] not in ("swizzled", "sr")]
)
def test_special_value_at_each_place_of_a_block(
    special: float, option: str, x_dtype: torch.dtype, plane: str, device: torch.device
) -> None:
    two_d, nan = option.endswith("2d"), math.isnan(special)
    n, line = (256, 16) if two_d else (3, 32)
    # line i has it at place i of its second block; of 16x16 blocks, each has it in one place
    x = torch.full((line, n + 1, 16), -2.0, dtype=x_dtype)
    place = torch.arange(n if two_d else line)
    at = (place // 16, place, place % 16) if two_d else (place, place * 0 + 1, place % 16)
    x[at] = special
    scales, codes, amax = quantize(x.flatten(1), plane, device, **OPTIONS[option])
    # -2 is the largest number and becomes -6 under the largest scale, 448 or 256
    scale, code = 0x78 if option == "4over6-mse-256" else 0x7E, 15
    if not nan:  # S is 1
        # -6 times a third, rounded, or -4 times a half, exactly; other errors are infinite
        scale, code = (0x30, 14) if option == "4over6-fast" else (0x2B, 15)
    expected = torch.full((line, n + 1), scale, dtype=torch.uint8)
    made = torch.full((line, n + 1, 16), code, dtype=torch.uint8)
    if not nan:
        held = slice(0, 256) if two_d else slice(1, 2)
        expected[:, held], made[:, held] = 0x7E, 8
    made[at] = 15 if special == -INF else 7
    assert torch.equal(scales, expected)
    assert torch.equal(codes, made.flatten(1))
    assert amax.unique().tolist() == [2.0 if nan else INF]


@planes
@inputs
@pytest.mark.parametrize("option", ["1d", "4over6"])
def test_amax_of_all_around_each_power_of_two(
    option: str, x_dtype: torch.dtype, plane: str, device: torch.device
) -> None:
    # from 2**-116 up S is no more than a float32 holds, and the scale is 448
    for k in range(-13, 16) if x_dtype == F16 else range(-116, 128):
        for factor in (1 - ULP[x_dtype] / 2, 1.0, 1 + ULP[x_dtype]):
            x = torch.zeros(16, 16, dtype=x_dtype)
            x[3, 5:7] = tensor([-factor * 2.0**k, factor * 2.0 ** (k - 1)], x_dtype)
            scales, codes, amax = quantize(x, plane, device, **OPTIONS[option])
            assert amax.tolist() == [factor * 2.0**k]
            assert (scales[3, 0].item(), codes[3, 5:7].tolist()) == (0x7E, [15, 5]), (k, factor)


# scale bytes under 2688 of blocks with a maximum of 2**-9 to 2**11: a sixth of it, 4 / 3 of a
# power of two, is 11 / 8 in E4M3
SIXTHS = [0x00, 0x00, 0x01, 0x01, 0x03, 0x05, *range(0x0B, 0x7C, 8)]


@planes
@inputs
def test_amax_of_a_block_around_each_power_of_two(
    x_dtype: torch.dtype, plane: str, device: torch.device
) -> None:
    for factor in (1 - ULP[x_dtype] / 2, 1.0, 1 + ULP[x_dtype]):
        x = torch.zeros(32, 16, dtype=x_dtype)
        x[:21, 9] = tensor([factor * 2.0**k for k in range(-9, 12)], x_dtype)
        x[31, 0] = 2688.0
        scales, codes, _ = quantize(x, plane, device)
        assert scales[:21, 0].tolist() == SIXTHS
        # 2**-7 is 4 under the smallest scale
        assert codes[:21, 9].tolist() == [6 if k == -7 else 7 for k in range(-9, 12)]


# fmt: off
CHOICES: dict[str, tuple[Any, ...]] = {
    # e4m3_max, error, values; scale byte and codes of the block, in a tensor whose S is 1
    "5-is-4-times-1.25": (448, "MAE", [5.0] * 16, 0x3A, [6] * 16),
    "5-under-256": (256, "MSE", [5.0] * 16, 0x3A, [6] * 16),
    "tie-goes-to-6": (448, "MAE", [6.0] * 16, 0x38, [7] * 16),
    "nan-goes-to-6": (448, "MAE", [5.0] * 15 + [NAN], 0x35, [7] * 16),
    "mse-nan": (448, "MSE", [NAN] + [-5.0] * 15, 0x35, [7] + [15] * 15),
    "zeros": (448, "MAE", [0.0, -0.0], 0x00, [0, 8]),
    "mae": (448, "MAE", [6.0, 0.5, 0.5, 2.5], 0x38, [7, 1, 1, 4]),
    "mse": (448, "MSE", [6.0, 0.5, 0.5, 2.5], 0x3C, [6, 1, 1, 3]),
    # a scale of half a step is none, one and a half times it is the smallest
    "smallest-scale": (448, "MAE", [5 * 2.0**-10], 0x01, [4]),
    "no-scale": (448, "MAE", [2.0**-10] * 16, 0x00, [7] * 16),
}
# fmt: on


@planes
@inputs
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
@pytest.mark.parametrize("name", CHOICES)
def test_4over6(
    name: str, two_d: bool, x_dtype: torch.dtype, plane: str, device: torch.device
) -> None:
    e4m3_max, error, values, scale, line = CHOICES[name]
    options = {"nvfp4_e4m3_max": e4m3_max, "nvfp4_4over6_err_mode": error, **CHOOSE}
    x = matrix(values, 6.0 * e4m3_max, x_dtype)
    if two_d:
        x[:16] = x[3]
    options |= TWO_D if two_d else {}
    scales, codes, _ = quantize(x, plane, device, **options)
    assert (int(scales[3, 0]), codes[3, : len(line)].tolist()) == (scale, line)
    # the other block's maximum is 6 * 448, which cannot become 4, or 6 * 256, a tie
    assert scales[17, 1] == {448: 0x7E, 256: 0x78}[e4m3_max]


EXTREMES: dict[str, tuple[Any, ...]] = {
    # values, amax of all; scale byte and codes of the block
    "flt-max": ([FLT_MAX, -1.0], FLT_MAX, 0x7E, [7, 8]),
    "tiny": ([2.0**-149], 2.0**-149, 0x00, [0]),
    "smallest-normal": ([2.0**-126], 2.0**-126, 0x38, [6]),
    "one-beside-flt-max": ([1.0, -1.0], FLT_MAX, 0x00, [7, 15]),
    "beside-inf": ([2.0, 1.0], INF, 0x2B, [7, 5]),
}


@planes
@pytest.mark.parametrize("name", EXTREMES)
def test_4over6_of_the_extremes(name: str, plane: str, device: torch.device) -> None:
    values, amax, scale, line = EXTREMES[name]
    scales, codes, _ = quantize(matrix(values, amax, F32), plane, device, **CHOOSE)
    assert (int(scales[3, 0]), codes[3, : len(line)].tolist()) == (scale, line)


@pytest.mark.parametrize(
    ("plane", "choose"),
    [("rowwise", {}), ("columnwise", {}), ("rowwise", CHOOSE)],
    ids=["rowwise", "columnwise", "4over6"],
)
def test_lines_of_their_own_amax(plane: str, choose: dict[str, bool], device: torch.device) -> None:
    cases = [
        # values, amax, scale byte, codes
        ([0.0, -0.0], 0.0, 0x00, [0, 8]),
        ([NAN, -NAN, -0.0], 0.0, 0x00, [7, 7, 8]),
        ([NAN, -3.0, 1.5], 3.0, 0x7E, [7, 15, 5]),
        ([-INF, INF, 1.0], INF, 0x7E, [15, 7, 0]),
        ([BF16_MAX, -1.0], BF16_MAX, 0x7E, [7, 8]),
        ([2.0**-133, -(2.0**-133)], 2.0**-133, 0x03, [0, 8]),
        ([2.0**-24, -(2.0**-25)], 2.0**-24, 0x7E, [7, 13]),
        ([1.0, -0.5], 1.0, 0x7E, [7, 13]),
    ]
    x = torch.zeros(32, 32, dtype=BF16)
    for line, (values, *_) in zip(x, cases, strict=False):
        line[: len(values)] = tensor(values, BF16)
    scales, codes, amax = quantize(x, plane, device, row_scaled_nvfp4=True, **choose)
    assert amax.tolist() == [case[1] for case in cases] + [0.0] * 24
    assert scales[:8, 0].tolist() == [case[2] for case in cases]
    for row, (*_, line) in zip(codes, cases, strict=False):
        assert row[: len(line)].tolist() == line


# row 3 of H is + - - +, over and over; its sign is -1
TURNED, PLAIN = [15, 7, 7, 15] * 4, [7, 15, 15, 7] * 4
TRANSFORMED: dict[str, tuple[Any, ...]] = {
    # signs, one value; columnwise amax, scale byte and codes of its group
    "one": (True, 1.0, 0.25, 0x7E, TURNED),
    "one-without-signs": (False, 1.0, 0.25, 0x7E, PLAIN),
    "inf": (True, -INF, INF, 0x7E, PLAIN),
    "nan": (True, NAN, 0.0, 0x00, [7] * 16),
    "bf16-max": (True, BF16_MAX, BF16_MAX / 4, 0x7E, TURNED),
    # three quarters of the smallest bfloat16 round to it, half of it to zero
    "tiny": (True, 3 * 2.0**-133, 2.0**-133, 0x03, [8, 0, 0, 8] * 4),
    "nothing": (True, 2.0**-132, 0.0, 0x00, [8, 0, 0, 8] * 4),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_block(name: str, device: torch.device) -> None:
    signs, value, amax, scale, line = TRANSFORMED[name]
    x = torch.zeros(32, 48, dtype=BF16)
    x[16 + 3, 5] = value
    q = NVFP4Quantizer(with_random_sign_mask=signs, with_rht=True, with_post_rht_amax=True)
    made = q.quantize(x.to(device))
    assert made.amax_columnwise.tolist() == [amax]
    assert made.amax_rowwise.tolist() == [0.0 if math.isnan(value) else abs(value)]
    codes = unpack_e2m1(made.columnwise_data.cpu())
    assert codes[5, 16:].tolist() == line
    codes[5, 16:] = 0
    assert codes.count_nonzero() == 0  # neither another group nor another column
    assert made.columnwise_scale_inv[5, :2].tolist() == [0, scale]


@planes
@inputs
def test_stochastic_rounding_keeps_codes_and_specials(
    x_dtype: torch.dtype, plane: str, device: torch.device
) -> None:
    line = [7, 15, 6, 5, 4, 3, 2, 1, 9, 0, 8, 7, 7]
    values = [448 * v for v in (6, -6, 4, 3, 2, 1.5, 1, 0.5, -0.5, 0.0, -0.0)]
    x = torch.zeros(16, 32, dtype=x_dtype)
    x[9, :13] = tensor([*values, NAN, -NAN], x_dtype)
    for seed in range(16):
        _, codes, _ = quantize(x, plane, device, seed=seed, stochastic_rounding=True)
        assert codes[9, :13].tolist() == line
        infinite = torch.tensor([INF, -INF], dtype=x_dtype).repeat(16, 16)
        _, codes, _ = quantize(infinite, plane, device, seed=seed, stochastic_rounding=True)
        assert codes.flatten().tolist() == [7, 15] * 256


BACK: dict[str, tuple[Any, ...]] = {
    # values, amax of all; what they become
    "zeros": ([0.0, -0.0], 6.0, [0.0, -0.0]),
    "nan": ([NAN, 3.0, -6.0], 6.0, [6.0, 3.0, -6.0]),
    # codes of 6 under a scale of zero
    "no-scale": ([2.0**-30, -(2.0**-30)], 6.0, [0.0, -0.0]),
    # infinity times a code of 0, or a scale of 0, is none
    "inf": ([INF, -INF, 1.0], INF, [INF, -INF, NAN]),
    "beside-inf": ([2.0, -1.0], INF, [INF, -INF]),
    # 448 * amax comes first, and is no float32
    "flt-max": ([FLT_MAX, -FLT_MAX], FLT_MAX, [INF, -INF]),
    "large": ([2.0**119, -(2.0**118)], 2.0**119, [2.0**119, -(2.0**118)]),
}


@planes
@pytest.mark.parametrize("name", BACK)
def test_special_values_come_back(name: str, plane: str, device: torch.device) -> None:
    values, amax, expected = BACK[name]
    x = matrix(values, amax, F32)
    q = NVFP4Quantizer(rowwise=plane == "rowwise", columnwise=plane == "columnwise")
    back = q.quantize((x if plane == "rowwise" else x.t()).to(device)).dequantize().cpu()
    line = (back if plane == "rowwise" else back.t())[3, : len(values)]
    assert str(line.tolist()) == str(expected)


@inputs
def test_graph_gives_these_bytes(x_dtype: torch.dtype) -> None:
    with count_compiles():
        compiled = torch.compile(NVFP4Quantizer().quantize, backend="aot_eager", fullgraph=True)
        for x_dtypes, values, amax, scale, line in BYTES.values():
            if x_dtype in x_dtypes:
                x = matrix(values, amax, x_dtype)
                for plane, t in (("rowwise", x), ("columnwise", x.t().contiguous())):
                    made = compiled(t)
                    assert getattr(made, f"{plane}_scale_inv")[3, 0] == scale
                    codes = unpack_e2m1(getattr(made, f"{plane}_data"))
                    assert codes[3, : len(line)].tolist() == line
