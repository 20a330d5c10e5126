# SPDX-License-Identifier: Apache-2.0
"""The vectors made by the peer's own reference code; ``golden/mxfp8.json`` says how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_mxfp8 import layout, reference
from te_proto.numerics import decode_e8m0, e8m0_from_amax, e8m0_reciprocal
from te_proto.testing import GoldenCase, assert_same_bits, load_golden

CASES = load_golden(Path(__file__).parent / "golden" / "mxfp8.npz")
ALLOWED = [case for case in CASES.values() if case.allowed]
QUANTIZED = [case for case in ALLOWED if "x" in case.tensors]
SWIZZLED = [case for case in ALLOWED if case.name.startswith("swizzle_")]
PLANES = ("rowwise", "columnwise")


def named(cases: list[GoldenCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@named(QUANTIZED)
def test_quantized_case(case: GoldenCase) -> None:
    x = case["x"]
    planes = {plane: case.tensors[f"{plane}_data"] is not None for plane in PLANES}
    got = reference.quantize(
        x,
        dtype=case.record["fp8"],
        two_d=case.record["with_2d_quantization"],
        swizzled=False,
        **planes,
    )
    m, k = layout.matrix_shape(x.shape)
    scales = {"rowwise": (m, k // 32), "columnwise": (m // 32, k)}
    for plane in (plane for plane in PLANES if planes[plane]):
        assert_same_bits(got[f"{plane}_data"], case[f"{plane}_data"].view(torch.uint8))
        rows, columns = scales[plane]
        # the file holds the logical region only; the padding of ours is zero
        scale = got[f"{plane}_scale_inv"]
        assert_same_bits(scale[:rows, :columns], case[f"{plane}_scale"])
        assert scale.count_nonzero() == scale[:rows, :columns].count_nonzero()


@named(SWIZZLED)
def test_swizzle_case(case: GoldenCase) -> None:
    columnwise = "columnwise" in case.name
    swizzled = reference.swizzle(case["compact"], columnwise=columnwise)
    assert_same_bits(swizzled, case["swizzled"])
    assert_same_bits(reference.unswizzle(swizzled, columnwise=columnwise), case["compact"])


@named([CASES["e8m0_from_amax"]])
def test_scale_of_an_amax(case: GoldenCase) -> None:
    assert_same_bits(e8m0_from_amax(case["amax"], "e4m3"), case["code"])


@named([CASES["e8m0_to_scale"]])
def test_value_of_a_scale_but_255(case: GoldenCase) -> None:
    assert_same_bits(decode_e8m0(case["code"])[:255], case["scale"][:255])
    assert e8m0_reciprocal(case["code"])[255].isnan()


def test_every_case_is_used_or_refused_for_a_known_reason() -> None:
    used = {case.name for case in QUANTIZED + SWIZZLED} | {"e8m0_from_amax"}
    assert used == {case.name for case in ALLOWED}
    assert (len(CASES), len(QUANTIZED), len(SWIZZLED)) == (14, 9, 2)
    assert {name: case.refused for name, case in CASES.items() if not case.allowed} == {
        "REFONLY_infnan_f32": "kernel: inf block -> code 254, NaN ignored in amax; "
        "this reference: inf -> 255, NaN -> 0",
        "e8m0_to_scale": "code 255 decodes to NaN in kernels, inf (2^128) in this helper",
    }


def test_what_the_refused_case_gets_here_is_what_the_kernel_gives() -> None:
    case = CASES["REFONLY_infnan_f32"]
    got = reference.quantize(
        case["x"], dtype="e4m3", rowwise=True, columnwise=False, two_d=False, swizzled=False
    )
    # ones with an infinity, with a NaN, and alone
    assert got["rowwise_scale_inv"][:3, 0].tolist() == [254, 119, 119]
    assert case["rowwise_scale"].flatten().tolist() == [255, 0, 119]
    codes = torch.full((3, 32), 0x78, dtype=torch.uint8)
    codes[0] = 0x00
    codes[case["x"].isinf()] = 0x7E
    codes[case["x"].isnan()] = 0x7F
    assert_same_bits(got["rowwise_data"], codes)
