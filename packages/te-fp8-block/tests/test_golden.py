# SPDX-License-Identifier: Apache-2.0
"""The vectors made by the peer's own reference code; ``golden/fp8-block.json`` says how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_fp8_block import reference
from te_proto.testing import GoldenCase, assert_same_bits, load_golden

GOLDEN = Path(__file__).parent / "golden"
CASES = load_golden(GOLDEN / "fp8-block.npz")
ALLOWED = [case for case in CASES.values() if case.allowed]
# the tables of the per-tensor file that have the rule of blocks: where the quotient overflows, the
# scale is the largest number of the input's own dtype
SCALES = load_golden(GOLDEN / "fp8-block-scales.npz")
LARGEST = {"bf16": torch.finfo(torch.bfloat16).max, "f16": torch.finfo(torch.float16).max}
PLANES = ("rowwise", "columnwise")
named = pytest.mark.parametrize("case", ALLOWED, ids=[case.name for case in ALLOWED])


@named
def test_quantized_case(case: GoldenCase) -> None:
    record = case.record
    got = reference.quantize(
        case["x"],
        dtype=record["fp8"],
        rowwise=True,
        columnwise=True,
        two_d=record["block_scaling_dim"] == 2,
        pow_2=record["force_pow_2_scales"],
        amax_epsilon=record["amax_epsilon"],
    )
    for plane in PLANES:
        assert_same_bits(got[f"{plane}_data"], case[f"{plane}_data"].view(torch.uint8))
        # the padding of these scales is zero in the file too
        assert_same_bits(got[f"{plane}_scale_inv"], case[f"{plane}_scale_inv"])


@named
@pytest.mark.parametrize("plane", PLANES)
def test_dequantized_case(case: GoldenCase, plane: str) -> None:
    expected = case[f"dq_{plane}"]
    got = reference.dequantize(
        case[f"{plane}_data"].view(torch.uint8),
        case[f"{plane}_scale_inv"],
        tuple(case["x"].shape),
        dtype=case.record["fp8"],
        columnwise=plane == "columnwise",
        two_d=case.record["block_scaling_dim"] == 2,
        out_dtype=expected.dtype,
    )
    assert_same_bits(got, expected)


@pytest.mark.parametrize("case", SCALES.values(), ids=SCALES)
def test_scale_of_an_amax(case: GoldenCase) -> None:
    scale = reference.block_scale(
        case["amax"],
        dtype=case.record["fp8"],
        largest=LARGEST[case.record["x_dtype_for_inf"]],
        pow_2=case.record["force_pow_2_scales"],
        amax_epsilon=case.record["amax_epsilon"],
    )
    assert_same_bits(scale, case["scale"])
    assert_same_bits(torch.ones_like(scale) / scale, case["scale_inv"])


def test_every_case_is_used_or_refused_for_a_known_reason() -> None:
    assert (len(CASES), len(ALLOWED)) == (42, 41)
    assert (len(SCALES), sum(case.allowed for case in SCALES.values())) == (16, 16)
    assert {name: case.refused for name, case in CASES.items() if not case.allowed} == {
        "REFONLY_infnan_1d": "row0: kernel scale 1 (ref scale 0, scale_inv inf); row1: kernel "
        "ignores NaN in amax (ref scale NaN)",
    }


def test_what_the_refused_case_gets_here_is_what_the_kernel_gives() -> None:
    case = CASES["REFONLY_infnan_1d"]
    x = case["x"]
    assert x[0].isinf().any()
    assert x[1].isnan().any()
    got = reference.quantize(
        x, dtype="e4m3", rowwise=True, columnwise=False, two_d=False, pow_2=True, amax_epsilon=0.0
    )
    assert got["rowwise_scale_inv"][0, 0] == 1.0
    rest = reference.quantize(
        x[1:].nan_to_num(nan=0.0),
        dtype="e4m3",
        rowwise=True,
        columnwise=False,
        two_d=False,
        pow_2=True,
        amax_epsilon=0.0,
    )
    assert_same_bits(got["rowwise_scale_inv"][:, 1:3], rest["rowwise_scale_inv"][:, :2])
    assert_same_bits(got["rowwise_data"][2], rest["rowwise_data"][1])
    assert got["rowwise_data"][1][x[1].isnan()].unique().tolist() == [0x7F]
