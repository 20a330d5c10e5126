# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from te_proto import numerics
from te_proto.errors import QuantizerError
from te_proto.testing import assert_same_bits, load_golden

if TYPE_CHECKING:
    from torch import Tensor

NAN = float("nan")
INF = float("inf")
GOLDEN = load_golden(Path(__file__).parent / "golden" / "numerics.npz")
# fl32(1/448) and fl32(1/57344)
RECIPROCAL_BITS = {"e4m3": 0x3B124925, "e5m2": 0x37924925}


def float32_of(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def every(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def float32_patterns(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        pytest.param(0.0, 0, id="zero"),
        pytest.param(2.0**-149, 0, id="smallest-subnormal"),
        pytest.param(2.0**-127, 0, id="exactly-the-smallest-scale"),
        pytest.param(2.0**-127 + 2.0**-149, 1, id="above-the-smallest-scale"),
        pytest.param(2.0**-126, 1, id="smallest-normal"),
        pytest.param(1.0, 127, id="one"),
        pytest.param(1.0 + 2.0**-23, 128, id="above-one"),
        pytest.param(-1.5, 128, id="sign-is-ignored"),
        pytest.param(2.0**127, 254, id="largest-scale"),
        pytest.param(3.4028234663852886e38, 254, id="largest-float32-saturates"),
        pytest.param(-INF, 254, id="infinity"),
        pytest.param(-NAN, 255, id="nan"),
    ],
)
def test_e8m0_rounds_up(value: float, code: int) -> None:
    assert numerics.encode_e8m0(torch.tensor([value])).tolist() == [code]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_e8m0_is_the_smallest_power_of_two_not_below(dtype: torch.dtype) -> None:
    x = float32_patterns(2**18) if dtype == torch.float32 else every(dtype)
    finite = x[x.isfinite()].double().abs()
    powers = torch.pow(2.0, torch.arange(-127, 128, dtype=torch.float64))
    expected = torch.searchsorted(powers, finite).clamp(max=254).to(torch.uint8)
    assert_same_bits(numerics.encode_e8m0(x[x.isfinite()]), expected)


@pytest.mark.parametrize(
    ("name", "amax", "code"),
    [
        pytest.param("e4m3", 0.0, 0, id="e4m3-zero-block"),
        pytest.param("e4m3", 1.0, 119, id="e4m3-one"),
        pytest.param("e4m3", 448.0, 127, id="e4m3-exactly-max"),
        pytest.param("e4m3", 448.00003, 128, id="e4m3-one-ulp-above-max"),
        pytest.param("e4m3", 3.4028234663852886e38, 247, id="e4m3-largest-float32"),
        pytest.param("e4m3", INF, 254, id="e4m3-infinity"),
        pytest.param("e4m3", NAN, 255, id="e4m3-nan"),
        pytest.param("e5m2", 57344.0, 127, id="e5m2-exactly-max"),
        pytest.param("e5m2", 57344.004, 128, id="e5m2-one-ulp-above-max"),
        pytest.param("e5m2", 3.4028234663852886e38, 240, id="e5m2-largest-float32"),
    ],
)
def test_block_scale_is_the_smallest_that_does_not_saturate(
    name: str, amax: float, code: int
) -> None:
    assert numerics.e8m0_from_amax(torch.tensor([amax]), name).tolist() == [code]


@pytest.mark.parametrize(("name", "exponent_field"), [("e4m3", 8), ("e5m2", 15)])
def test_block_scale_just_above_the_smallest_follows_the_rounded_product(
    name: str, exponent_field: int
) -> None:
    # 1.75 * 2**(field - 127) divided by the format's maximum is 2**-127, where float32 is subnormal
    bits = (exponent_field << 23) | 0x600000
    amax = float32_of(bits, bits + 1, bits + 2)
    assert numerics.e8m0_from_amax(amax, name).tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", list(RECIPROCAL_BITS))
def test_block_scale_equals_the_product_rounded_up(name: str) -> None:
    drop = {"e4m3": 8, "e5m2": 15}[name]
    corners = [
        (torch.arange(field << 23, field + 1 << 23, 5).to(torch.int32) | 1).view(torch.float32)
        for field in (drop, 127)
    ]
    steps = torch.arange(-64, 65)
    thresholds = (torch.arange(255)[:, None] << 23) + 0x600000 + steps
    powers = (torch.arange(1, 255)[:, None] << 23) + steps
    near = [t.flatten().to(torch.int32).view(torch.float32) for t in (thresholds, powers)]
    sixteen = [every(torch.bfloat16).float(), every(torch.float16).float()]
    amax = torch.cat([*corners, *near, *sixteen, float32_patterns(2**20)])

    reciprocal = np.array([RECIPROCAL_BITS[name]], dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        product = amax.numpy() * reciprocal
    expected = numerics.encode_e8m0(torch.from_numpy(product))
    assert_same_bits(numerics.e8m0_from_amax(amax, name), expected)


def test_golden_block_scales() -> None:
    case = GOLDEN["e8m0_from_amax"]
    assert_same_bits(numerics.e8m0_from_amax(case["amax"], "e4m3"), case["code"])


def test_golden_scale_values_and_their_reciprocals() -> None:
    # code 255 is infinity there, and NaN in kernels and here
    case = GOLDEN["e8m0_to_scale"]
    codes, values = case["code"][:255], case["scale"][:255]
    assert_same_bits(numerics.decode_e8m0(codes), values)
    product = numerics.e8m0_reciprocal(codes).double() * values.double()
    assert product.tolist() == [1.0] * 255
    nan = torch.tensor([255], dtype=torch.uint8)
    assert numerics.decode_e8m0(nan).isnan().all()
    assert numerics.e8m0_reciprocal(nan).isnan().all()


def test_block_scales_are_for_eight_bit_formats() -> None:
    message = "e8m0: the element format must be 'e4m3' or 'e5m2', got 'e2m1'; use one of these"
    with pytest.raises(QuantizerError, match=f"^{re.escape(message)}$"):
        numerics.e8m0_from_amax(torch.ones(1), "e2m1")
