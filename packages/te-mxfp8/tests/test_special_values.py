# SPDX-License-Identifier: Apache-2.0
"""Special values in each plane and place, through the quantizer, with the bytes written out.

On CUDA (``--te-device``) they are the bytes of the kernels. ``test_reference`` has more of them
for one block. How the bytes here were had from the specification, by hand: the scale byte is the
least ``e`` with ``amax / max(dtype) <= 2**(e - 127)``; a code is that of ``x * 2**(127 - e)``,
ties to even. 448 and 57344 are ``1.75 * 2**8`` and ``1.75 * 2**15``, so an ``amax`` of
``2**k`` up to ``1.75 * 2**k`` has ``e = k + 119`` (E4M3) or ``k + 112`` (E5M2).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_mxfp8 import MXFP8Quantizer
from te_proto.testing import count_compiles, new_quantizer_in_graph

E4M3, E5M2 = "e4m3", "e5m2"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)
INF, NAN = math.inf, math.nan
FLT_MAX, BF16_MAX, F16_MAX = (torch.finfo(x_dtype).max for x_dtype in ALL)
TINY = {F32: 2.0**-149, BF16: 2.0**-133, F16: 2.0**-24}
ULP = {F32: 2.0**-23, BF16: 2.0**-7, F16: 2.0**-10}
PLANES = ("rowwise", "columnwise")

planes = pytest.mark.parametrize("plane", PLANES)
elements = pytest.mark.parametrize("dtype", [E4M3, E5M2])
inputs = pytest.mark.parametrize("x_dtype", ALL, ids=lambda d: str(d)[6:])


def scales_and_codes(
    x: Tensor, plane: str, dtype: str, device: torch.device, *, two_d: bool = False
) -> tuple[Tensor, Tensor]:
    """Return one scale byte a block, and the codes, of a matrix whose blocks are cut in rows.

    The columnwise plane is that of the transposed matrix, transposed back.
    """
    q = MXFP8Quantizer(
        dtype=dtype,
        rowwise=plane == "rowwise",
        columnwise=plane == "columnwise",
        with_2d_quantization=two_d,
    )
    m, k = x.shape
    made = q.quantize((x if plane == "rowwise" else x.t()).to(device))
    scale = getattr(made, f"{plane}_scale_inv").cpu()
    codes = getattr(made, f"{plane}_data").cpu()
    if plane == "rowwise":
        return scale[:m, : k // 32], codes
    return scale[: k // 32, :m].t(), codes.t()


def block(values: list[float], x_dtype: torch.dtype) -> Tensor:
    """Return a block of ``values`` with zeros behind."""
    line = torch.zeros(32, dtype=torch.float64)
    line[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return line.to(x_dtype)


BYTES = [
    # element format, input dtypes, values, scale byte, codes
    pytest.param(E4M3, (BF16,), [BF16_MAX, -BF16_MAX], 247, [0x78, 0xF8], id="bf16-max"),
    pytest.param(E5M2, (BF16,), [BF16_MAX, -BF16_MAX], 240, [0x78, 0xF8], id="e5m2-bf16-max"),
    pytest.param(E4M3, (F32,), [FLT_MAX, 1.0, -1.0], 247, [0x78, 0x00, 0x80], id="flt-max-and-1"),
    pytest.param(
        E4M3, (F16,), [F16_MAX, TINY[F16], -1.0], 135, [0x78, 0x00, 0x82], id="f16-all-of-it"
    ),
    pytest.param(
        E5M2, (F16,), [F16_MAX, -TINY[F16], 1.0], 128, [0x78, 0x80, 0x38], id="e5m2-f16-all-of-it"
    ),
    # times 2**127, the largest there is
    pytest.param(
        E4M3, (F32, BF16), [2.0**-126, -(2.0**-126)], 0, [0x40, 0xC0], id="smallest-normal"
    ),
    pytest.param(E5M2, (F32, BF16), [2.0**-126], 0, [0x40], id="e5m2-smallest-normal"),
    pytest.param(E4M3, (F32,), [2.0**-126 - 2.0**-149], 0, [0x40], id="largest-subnormal-f32"),
    pytest.param(
        E5M2, (BF16,), [2.0**-126 - 2.0**-133], 0, [0x40], id="e5m2-largest-subnormal-bf16"
    ),
    pytest.param(E4M3, (F16,), [2.0**-14, -(2.0**-14)], 105, [0x78, 0xF8], id="f16-normal"),
    pytest.param(E5M2, (F16,), [2.0**-14], 98, [0x78], id="e5m2-f16-normal"),
    pytest.param(E4M3, (F16,), [2.0**-14 - 2.0**-24], 105, [0x78], id="f16-largest-subnormal"),
    pytest.param(E5M2, (F16,), [2.0**-14 - 2.0**-24], 98, [0x78], id="e5m2-f16-largest-subnormal"),
    # 2**-17 * 2**8 is the smallest code, half of it a tie that goes to zero
    pytest.param(
        E4M3,
        ALL,
        [1.0, 2.0**-17, 2.0**-18, -(2.0**-18), 2.0**-24],
        119,
        [0x78, 0x01, 0x00, 0x80, 0x00],
        id="smallest-codes",
    ),
    pytest.param(E5M2, ALL, [1.0, 2.0**-24, -(2.0**-24)], 112, [0x78, 0x18, 0x98], id="e5m2-small"),
    pytest.param(
        E4M3, ALL, [448.0, 17.0, 19.0, -17.0], 127, [0x7E, 0x58, 0x5A, 0xD8], id="ties-to-even"
    ),
    pytest.param(
        E5M2, ALL, [57344.0, 9.0, 11.0, -9.0], 127, [0x7B, 0x48, 0x4A, 0xC8], id="e5m2-ties"
    ),
    pytest.param(
        E4M3,
        (F32,),
        [448.0, TINY[F32], -TINY[F32], -0.0],
        127,
        [0x7E, 0x00, 0x80, 0x80],
        id="max-and-tiny",
    ),
    # infinity takes the largest scale, and a finite number then all but the largest exponents
    pytest.param(
        E4M3, (BF16,), [INF, BF16_MAX, -BF16_MAX], 254, [0x7E, 0x40, 0xC0], id="inf-and-bf16-max"
    ),
    pytest.param(
        E5M2, (F32,), [-INF, FLT_MAX, -1.0], 254, [0xFB, 0x40, 0x80], id="e5m2-inf-and-flt-max"
    ),
    pytest.param(
        E4M3, (F16,), [-INF, F16_MAX, -F16_MAX], 254, [0xFE, 0x00, 0x80], id="inf-and-f16-max"
    ),
    pytest.param(E4M3, (F32,), [NAN, TINY[F32]], 0, [0x7F, 0x00], id="nan-and-tiny"),
    pytest.param(E4M3, (BF16,), [NAN, -TINY[BF16]], 0, [0x7F, 0x88], id="nan-and-tiny-bf16"),
    pytest.param(E5M2, ALL, [NAN, -INF, 1.0], 254, [0x7F, 0xFB, 0x00], id="e5m2-nan-and-inf"),
    pytest.param(E4M3, ALL, [NAN, -0.0], 0, [0x7F, 0x80], id="nan-and-zeros"),
]


@planes
@pytest.mark.parametrize(("dtype", "x_dtypes", "values", "scale", "codes"), BYTES)
def test_block(
    dtype: str,
    x_dtypes: tuple[torch.dtype, ...],
    values: list[float],
    scale: int,
    codes: list[int],
    plane: str,
    device: torch.device,
) -> None:
    for x_dtype in x_dtypes:
        x = torch.zeros(32, 64, dtype=x_dtype)
        x[9, :32] = block(values, x_dtype)
        expected_scale = torch.zeros(32, 2, dtype=torch.uint8)
        expected_codes = torch.zeros(32, 64, dtype=torch.uint8)
        expected_codes[9, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
        for two_d in (False, True):
            # a 32x32 block has one scale for all its lines
            expected_scale[slice(None) if two_d else 9, 0] = scale
            found = scales_and_codes(x, plane, dtype, device, two_d=two_d)
            assert torch.equal(found[0], expected_scale), (x_dtype, two_d)
            assert torch.equal(found[1], expected_codes), (x_dtype, two_d)


@elements
@inputs
@planes
@pytest.mark.parametrize(("zero", "code"), [(0.0, 0x00), (-0.0, 0x80)], ids=["0", "-0"])
def test_zero_tensor(
    zero: float, code: int, plane: str, x_dtype: torch.dtype, dtype: str, device: torch.device
) -> None:
    x = torch.full((64, 96), zero, dtype=x_dtype)
    for two_d in (False, True):
        scale, codes = scales_and_codes(x, plane, dtype, device, two_d=two_d)
        assert scale.unique().tolist() == [0]
        assert codes.unique().tolist() == [code]


@elements
@inputs
@planes
def test_zero_blocks_between_others(
    plane: str, x_dtype: torch.dtype, dtype: str, device: torch.device
) -> None:
    x = torch.ones(96, 96, dtype=x_dtype)
    x[32:64, 32:64] = -0.0
    one = {E4M3: 119, E5M2: 112}[dtype]
    for two_d in (False, True):
        scale, codes = scales_and_codes(x, plane, dtype, device, two_d=two_d)
        assert scale[::32].tolist() == [[one] * 3, [one, 0, one], [one] * 3]
        assert torch.equal(scale, scale[::32].repeat_interleave(32, 0))
        assert codes[32:64, 32:64].unique().tolist() == [0x80]
        codes[32:64, 32:64] = 0x78
        assert codes.unique().tolist() == [0x78]


@elements
@inputs
@planes
@pytest.mark.parametrize(
    ("special", "code", "rest"),
    [
        # the block's own maximum is 2: its code is 0x78 in both formats, under 120 and 113
        pytest.param(NAN, 0x7F, None, id="nan"),
        pytest.param(-NAN, 0x7F, None, id="-nan"),
        # 2 * 2**-127 is below half of the smallest code
        pytest.param(INF, 0x7E, 0x00, id="inf"),
        pytest.param(-INF, 0xFE, 0x00, id="-inf"),
    ],
)
def test_special_value_at_each_place_of_a_block(
    special: float,
    code: int,
    rest: int | None,
    plane: str,
    x_dtype: torch.dtype,
    dtype: str,
    device: torch.device,
) -> None:
    scale_of_two = {E4M3: 120, E5M2: 113}[dtype]
    if dtype == E5M2 and rest is not None:
        code -= 3  # 0x7B is the largest
    # row i has the special value at place i of its second block, and a 32x32 block in every place
    x = torch.full((32, 96), 2.0, dtype=x_dtype)
    place = torch.arange(32)
    x[place, 32 + place] = special
    scale, codes = scales_and_codes(x, plane, dtype, device)
    assert scale[:, ::2].unique().tolist() == [scale_of_two]
    assert scale[:, 1].unique().tolist() == [scale_of_two if rest is None else 254]
    expected = torch.full((32, 96), 0x78, dtype=torch.uint8)
    expected[:, 32:64] = 0x78 if rest is None else rest
    expected[place, 32 + place] = code
    assert torch.equal(codes, expected)

    x = torch.full((32, 32, 32, 32), 2.0, dtype=x_dtype)
    i, j = torch.meshgrid(place, place, indexing="ij")
    x[i, i, j, j] = special  # block (i, j) of [block, row, block, column]
    scale, codes = scales_and_codes(x.view(1024, 1024), plane, dtype, device, two_d=True)
    assert scale.unique().tolist() == [scale_of_two if rest is None else 254]
    expected = torch.full((32, 32, 32, 32), 0x78 if rest is None else rest, dtype=torch.uint8)
    expected[i, i, j, j] = code
    assert torch.equal(codes, expected.view(1024, 1024))


# where 2**k and its neighbours are normal numbers of the input dtype
EXPONENTS = {F32: range(-125, 128), BF16: range(-125, 128), F16: range(-13, 16)}


@elements
@inputs
@planes
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_amax_around_each_power_of_two_and_each_bound(
    two_d: bool, plane: str, x_dtype: torch.dtype, dtype: str, device: torch.device
) -> None:
    ulp, top = ULP[x_dtype], {E4M3: 8, E5M2: 15}[dtype]
    largest, half = {E4M3: (0x7E, 0x76), E5M2: (0x7B, 0x77)}[dtype]
    cases = [
        # amax / 2**k, steps of the scale above that of 2**k, code of amax
        (1 - ulp / 2, 0, 0x78),
        (1.0, 0, 0x78),
        (1 + ulp, 0, 0x78),
        (1.75 - ulp, 0, largest),
        (1.75, 0, largest),
        (1.75 + ulp, 1, half),  # 448 * 2**k and 57344 * 2**k end a scale
    ]
    exponents = [k for k in EXPONENTS[x_dtype] if k - top > -127]
    every = [(f * 2.0**k, k - top + 127 + up, code) for k in exponents for f, up, code in cases]
    if two_d:
        x = torch.zeros(len(every), 32, 32, dtype=x_dtype)
        x[:, 13, 21] = torch.tensor([amax for amax, *_ in every], dtype=torch.float64).to(x_dtype)
        scale, codes = scales_and_codes(x.view(-1, 32), plane, dtype, device, two_d=True)
        scale, codes = scale[::32], codes.view(-1, 32, 32)[:, 13]
    else:
        x = torch.zeros(len(every), 32, dtype=x_dtype)
        x[:, 21] = torch.tensor([amax for amax, *_ in every], dtype=torch.float64).to(x_dtype)
        scale, codes = scales_and_codes(x, plane, dtype, device)
    assert scale[:, 0].tolist() == [e for _, e, _ in every]
    assert codes[:, 21].tolist() == [code for *_, code in every]
    assert codes.count_nonzero() == len(every)


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize(("plane", "turned"), [("rowwise", False), ("columnwise", True)])
def test_scale_byte_of_a_special_block_lies_where_the_page_says(
    plane: str, turned: bool, swizzled: bool, device: torch.device
) -> None:
    # line 69 of block 3: 512 * (69 // 128) + 16 * (69 % 32) + 4 * (69 // 32) + 3 in GEMM order
    x = torch.zeros(128, 128)
    x[69, 96:] = INF
    q = MXFP8Quantizer(optimize_for_gemm=swizzled).quantize((x.t() if turned else x).to(device))
    flat = getattr(q, f"{plane}_scale_inv").cpu().flatten()
    compact = 3 * 128 + 69 if turned else 69 * 4 + 3
    assert flat.nonzero().flatten().tolist() == [91 if swizzled else compact]
    assert flat.max() == 254


@planes
@pytest.mark.parametrize(
    ("values", "x_dtype", "expected"),
    [
        # a scale of 2**127 times a code of 448 is no float32
        pytest.param([INF, 1.0, -INF], F32, [INF, 0.0, -INF], id="inf"),
        pytest.param([NAN, 2.0, -0.0], F16, [NAN, 2.0, -0.0], id="nan"),
        pytest.param([NAN] * 32, BF16, [NAN] * 32, id="nan-only"),
        # rounded to 2**128, and to 2**16 in float16
        pytest.param([FLT_MAX, 1.0], F32, [INF, 0.0], id="flt-max"),
        pytest.param([-BF16_MAX], BF16, [-INF], id="bf16-max"),
        pytest.param([F16_MAX, -1.0], F16, [INF, -1.0], id="f16-max"),
        # a code of 2**-7 under 2**-127; 2**-149 itself is below the smallest code there, 2**-136
        pytest.param([2.0**-133, 2.0**-149], F32, [2.0**-133, 0.0], id="tiny-f32"),
        pytest.param([-TINY[F16]], F16, [-TINY[F16]], id="tiny-f16"),
    ],
)
def test_special_values_come_back(
    values: list[float],
    x_dtype: torch.dtype,
    expected: list[float],
    plane: str,
    device: torch.device,
) -> None:
    x = block(values, x_dtype).view((1, 32) if plane == "rowwise" else (32, 1))
    q = MXFP8Quantizer(rowwise=plane == "rowwise", columnwise=plane == "columnwise")
    back = q.quantize(x.to(device)).dequantize().cpu().flatten()
    assert str(back.tolist()) == str(expected + [0.0] * (32 - len(expected)))


@new_quantizer_in_graph
@elements
def test_graph_gives_these_bytes(dtype: str) -> None:
    rows = [case.values for case in BYTES if case.values[0] == dtype]
    for x_dtype in ALL:
        taken: list[Any] = [row for row in rows if x_dtype in row[1]]
        x = torch.stack([block(values, x_dtype) for _, _, values, *_ in taken])

        def both(x: Tensor) -> tuple[Any, ...]:
            q = MXFP8Quantizer(dtype=dtype, columnwise=False, internal=True).quantize(x)
            p = MXFP8Quantizer(dtype=dtype, rowwise=False, internal=True).quantize(x.t())
            return q.rowwise_scale_inv, q.rowwise_data, p.columnwise_scale_inv, p.columnwise_data

        with count_compiles():
            scale, codes, scale_t, codes_t = torch.compile(both, backend="aot_eager")(x)
        n = len(taken)
        for scales in (scale[:n, 0], scale_t[0, :n]):
            assert scales.tolist() == [e for *_, e, _ in taken]
        for found in (codes, codes_t.t()):
            assert found.tolist() == [c + [0] * (32 - len(c)) for *_, c in taken]
