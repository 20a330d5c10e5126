# SPDX-License-Identifier: Apache-2.0
"""The vectors made by the peer's own reference code; ``golden/fp8-current.json`` says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_fp8_current import Float8CurrentScalingQuantizer, reference
from te_proto.testing import GoldenCase, assert_same_bits, load_golden

CASES = load_golden(Path(__file__).parent / "golden" / "fp8-current.npz")
ALLOWED = [case for case in CASES.values() if case.allowed]
# tables of the peer's block format, tested in te-fp8-block: where the quotient overflows, the scale
# is the largest number of bfloat16 or float16; here it is that of float32, whatever the input
BLOCK_RULE = [c for c in ALLOWED if c.record.get("x_dtype_for_inf") in ("bf16", "f16")]
SCALES = [c for c in ALLOWED if c.record.get("x_dtype_for_inf") == "f32"]
QUANTIZED = [c for c in ALLOWED if "x" in c.tensors]


def named(cases: list[GoldenCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def quantizer(case: GoldenCase, **fields: Any) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(
        dtype=case.record["fp8"],
        force_pow_2_scales=case.record["force_pow_2_scales"],
        amax_epsilon=case.record["amax_epsilon"],
        **fields,
    )


@named(QUANTIZED)
def test_quantized_case(case: GoldenCase) -> None:
    q = quantizer(case, separate_transpose=True).quantize(case["x"])
    assert_same_bits(q.fp8_data, case["data"].view(torch.uint8))
    assert_same_bits(q.fp8_scale_inv, case["scale_inv"].reshape(1))
    assert_same_bits(q.data_transpose, case["transpose"].view(torch.uint8))
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        if f"dq_{name}" in case.tensors:
            # of a 0-d tensor the peer makes one of shape (1,)
            expected = case[f"dq_{name}"].reshape(case["x"].shape)
            assert_same_bits(q.dequantize(dtype), expected, what=name)
            columnwise = q.with_usage(rowwise=False)
            assert_same_bits(columnwise.dequantize(dtype), expected, what=f"{name} of transpose")
    one = quantizer(case).quantize(case["x"])
    assert_same_bits(one.fp8_data, q.fp8_data)
    assert_same_bits(one.fp8_scale_inv, q.fp8_scale_inv)


@named(SCALES)
def test_scale_of_an_amax(case: GoldenCase) -> None:
    q = quantizer(case)
    options = {
        "dtype": q.dtype,
        "force_pow_2_scales": q.force_pow_2_scales,
        "amax_epsilon": q.amax_epsilon,
    }
    assert_same_bits(reference.scale_from_amax(case["amax"], **options), case["scale"])
    none = {"data": False, "transpose": False}
    buffers = reference.quantize(torch.empty(0), case["amax"], **options, **none)
    assert list(buffers) == ["fp8_scale_inv"]
    assert_same_bits(buffers["fp8_scale_inv"], case["scale_inv"])


def test_every_case_is_used_or_refused_for_a_known_reason() -> None:
    used = {case.name for case in QUANTIZED + SCALES}
    assert used | {case.name for case in BLOCK_RULE} == {case.name for case in ALLOWED}
    assert (len(CASES), len(QUANTIZED), len(SCALES), len(BLOCK_RULE)) == (69, 42, 8, 16)
    assert {name: case.refused for name, case in CASES.items() if not case.allowed} == {
        "REFONLY_inf_f32": "kernel uses scale 1.0 when amax is inf; "
        "reference uses scale 0 / scale_inv inf",
        "REFONLY_nan_f32": "kernel ignores NaN in amax; reference propagates NaN to the scale",
        "recipeRef_tiny_bf16": "kernel uses FLT_MAX for every input dtype",
    }


@pytest.mark.parametrize(
    ("name", "scale_inv", "codes"),
    [
        ("REFONLY_inf_f32", 0x3F800000, [0x38, 0x40, 0x7E, 0xC4, 0x7E, 0xB0, 0x00, 0xFE]),
        ("REFONLY_nan_f32", 0x3BDB6DB7, [0x71, 0x79, 0x7F, 0xFE, 0x61, 0xE9, 0x00, 0xF9]),
        ("recipeRef_tiny_bf16", 0x00200000, [0x46, 0xBD, 0x4E, 0x00]),
    ],
)
def test_what_a_refused_case_gets_here_is_what_the_kernel_gives(
    name: str, scale_inv: int, codes: list[int]
) -> None:
    case = CASES[name]
    q = quantizer(case).quantize(case["x"])
    assert int(q.fp8_scale_inv.view(torch.int32)) == scale_inv
    assert int(case["scale_inv"].view(torch.int32)) != scale_inv
    assert q.fp8_data.flatten().tolist() == codes
