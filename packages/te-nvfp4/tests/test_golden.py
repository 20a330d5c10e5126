# SPDX-License-Identifier: Apache-2.0
"""The vectors made by the peer's own reference code; ``golden/nvfp4.json`` says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_nvfp4 import NVFP4Quantizer, hadamard, layout, reference
from te_proto.blocks import matrix_shape
from te_proto.numerics import decode_e2m1, encode_e2m1, pack_e2m1, swizzle, unpack_e2m1, unswizzle
from te_proto.testing import GoldenCase, assert_same_bits, load_golden

CASES = load_golden(Path(__file__).parent / "golden" / "nvfp4.npz")
ALLOWED = [case for case in CASES.values() if case.allowed]
QUANTIZED = [case for case in ALLOWED if "quant_tile_shape" in case.record.get("options", {})]
PLANES = ("rowwise", "columnwise")


def quantizer(case: GoldenCase) -> NVFP4Quantizer:
    options: dict[str, Any] = dict(case.record["options"])
    tile = options.pop("quant_tile_shape")
    return NVFP4Quantizer(
        **options,
        with_2d_quantization=tile == [16, 16],
        with_post_rht_amax=options.get("with_rht", False),
    )


def named(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


@named(*(case.name for case in QUANTIZED))
def test_quantized_case(case: GoldenCase) -> None:
    x, q = case["x"], quantizer(case)
    got = q.replace(internal=True).quantize(x).inner_tensors()
    m, k = matrix_shape(x.shape)
    for plane, (outer, inner) in {"rowwise": (m, k), "columnwise": (k, m)}.items():
        if not getattr(q, plane):
            assert f"{plane}_data" not in got
            continue
        assert_same_bits(got[f"{plane}_data"].view(outer, -1), case[f"{plane}_data"], what=plane)
        # the file holds the logical region only; the padding of ours is zero
        scale = got[f"{plane}_scale_inv"]
        compact = case[f"{plane}_scale_inv"].view(torch.uint8)
        assert_same_bits(scale[:outer, : inner // layout.BLOCK], compact, what=plane)
        assert scale.count_nonzero() == compact.count_nonzero()
        assert_same_bits(got[f"amax_{plane}"], case[f"amax_{plane}"].view(-1), what=plane)


@named("rht_48x32_bf16_sign1", "rht_48x32_bf16_sign0")
def test_transform_case(case: GoldenCase) -> None:
    x, signs = case["x"], case.name.endswith("1")
    got = hadamard.transform(x.unflatten(0, (-1, 16)), signs=signs).flatten(0, 1)
    assert_same_bits(got.t(), case["rht_xt"])


@named("rht_matrix_signed", "rht_matrix_unsigned")
def test_transform_of_the_unit_vectors_is_the_matrix(case: GoldenCase) -> None:
    signs = case.name == "rht_matrix_signed"
    unit = torch.eye(16, dtype=torch.bfloat16)
    # row c of the transform of the columns of the identity is column c of the matrix
    assert_same_bits(hadamard.transform(unit, signs=signs).t(), case["matrix"])
    mask = NVFP4Quantizer(with_random_sign_mask=signs).rht_matrix_random_sign_mask_t
    assert mask == case.record["random_sign_mask"]


@named("cast_to_fp4x2")
def test_codes_of_values_but_of_negative_zero_and_nan(case: GoldenCase) -> None:
    x = case["x"]
    codes = encode_e2m1(x)
    special = (x == 0) & x.signbit() | x.isnan()
    assert codes[special].tolist() == [7 if v else 8 for v in x[special].isnan().tolist()]
    expected = unpack_e2m1(case["packed"])
    assert_same_bits(codes[~special], expected[~special])
    assert_same_bits(pack_e2m1(expected), case["packed"])


@named("cast_from_fp4x2")
def test_values_of_codes(case: GoldenCase) -> None:
    assert_same_bits(decode_e2m1(unpack_e2m1(case["packed"])), case["values"])


@named("swizzle_M256_N128")
def test_swizzle_case(case: GoldenCase) -> None:
    assert_same_bits(swizzle(case["compact"]), case["swizzled"])


@named("unswizzle_m200_n120")
def test_unswizzle_case(case: GoldenCase) -> None:
    assert_same_bits(unswizzle(case["swizzled"])[:200], case["compact"])


@named("qgemm_fprop_16x32x64")
def test_product_of_dequantized_operands_is_the_peers(case: GoldenCase) -> None:
    values = {}
    for name, two_d in (("x", False), ("w", True)):
        q = NVFP4Quantizer(columnwise=False, with_2d_quantization=two_d)
        quantized = q.quantize(case[name])
        assert_same_bits(quantized.rowwise_data, case[f"{name}_data"])
        assert_same_bits(quantized.amax_rowwise, case[f"{name}_amax"].view(1))
        scale = quantized.rowwise_scale_inv[: len(case[name]), :4]
        assert_same_bits(scale, case[f"{name}_scale"].view(torch.uint8))
        values[name] = quantized.dequantize(torch.float32).double()
    # the peer sums blocks in float32 and divides once; then one rounding to bfloat16
    y = values["x"] @ values["w"].t()
    torch.testing.assert_close(case["y"].double(), y, rtol=2**-8, atol=1e-5)


def test_every_case_is_used_or_refused_for_a_known_reason() -> None:
    single = {
        "rht_matrix_signed",
        "rht_matrix_unsigned",
        "cast_to_fp4x2",
        "cast_from_fp4x2",
        "swizzle_M256_N128",
        "unswizzle_m200_n120",
        "qgemm_fprop_16x32x64",
    }
    assert {case.name for case in QUANTIZED} | single == {case.name for case in ALLOWED}
    assert (len(CASES), len(QUANTIZED), len(single)) == (36, 27, 7)
    assert {name: case.refused for name, case in CASES.items() if not case.allowed} == {
        "zeros_f32": "hardware conversion keeps the sign of -0.0 (code 8)",
        "REFONLY_nan_f32": "kernels ignore NaN in amax and encode NaN as code 7",
    }


@pytest.mark.parametrize(("name", "code"), [("zeros_f32", 8), ("REFONLY_nan_f32", 7)])
def test_refused_case_differs_in_that_element_alone(name: str, code: int) -> None:
    case = CASES[name]
    x = case["x"]
    special = x.isnan() if code == 7 else (x == 0) & x.signbit()
    assert special.sum() == 1
    ours = reference.quantize(x, NVFP4Quantizer())
    assert not torch.equal(ours["rowwise_data"], case["rowwise_data"])
    clean = reference.quantize(torch.where(special, 0.0, x), NVFP4Quantizer())
    codes = unpack_e2m1(ours["rowwise_data"])
    assert codes[special].item() == code
    assert_same_bits(codes[~special], unpack_e2m1(clean["rowwise_data"])[~special])
    for buffer in ("rowwise_scale_inv", "columnwise_scale_inv", "amax_rowwise", "amax_columnwise"):
        assert_same_bits(ours[buffer], clean[buffer])
