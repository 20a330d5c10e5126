# SPDX-License-Identifier: Apache-2.0
"""Options, calls and call arguments that are refused, with the whole message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_nvfp4.quantizer import NVFP4Quantizer
from te_proto.errors import DtypeError, QuantizerError, TeError, UsageError

RHT = {"with_rht": True, "with_post_rht_amax": True}

REFUSED = [
    pytest.param({"dtype": "e4m3"}, "option dtype must be one of e2m1, got 'e4m3'", id="element"),
    pytest.param({"with_rht": 1}, "option with_rht must be a bool, got 1", id="flag"),
    pytest.param(
        {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 300},
        "option nvfp4_e4m3_max must be one of 256, 448, got 300",
        id="e4m3-max",
    ),
    pytest.param(
        {"nvfp4_e4m3_max": 300},
        "option nvfp4_e4m3_max must be one of 256, 448, got 300",
        id="e4m3-max-unused",
    ),
    pytest.param(
        {"nvfp4_4over6_err_mode": "max"},
        "option nvfp4_4over6_err_mode must be one of MAE, MSE, got 'MAX'",
        id="error-mode",
    ),
    pytest.param(
        {"with_rht": True},
        "option with_rht needs with_post_rht_amax=True, as blocks are scaled by the transformed "
        "amax, got True; set both",
        id="rht-without-its-amax",
    ),
    pytest.param(
        {"nvfp4_use_4over6": True, **RHT},
        "option nvfp4_use_4over6 cannot go with with_rht=True, as no kernel chooses the scale of a "
        "transformed block, got True; turn one of them off",
        id="4over6-rht",
    ),
    pytest.param(
        {"nvfp4_use_4over6": True, "stochastic_rounding": True},
        "option nvfp4_use_4over6 cannot go with stochastic_rounding=True, as the choice is by the "
        "error of codes rounded to nearest, got True; turn one of them off",
        id="4over6-sr",
    ),
    pytest.param(
        {"nvfp4_use_4over6": True, "optimize_for_gemm": True},
        "option nvfp4_use_4over6 cannot go with optimize_for_gemm=True, as its kernel writes "
        "compact scales alone, got True; turn one of them off",
        id="4over6-swizzled",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, **RHT},
        "option row_scaled_nvfp4 cannot go with with_rht=True, as rows are scaled as they are, got "
        "True; turn one of them off",
        id="row-scaled-rht",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, "with_2d_quantization": True},
        "option row_scaled_nvfp4 cannot go with with_2d_quantization=True, as a block of 16 rows "
        "would have 16 amaxes, got True; turn one of them off",
        id="row-scaled-2d",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, "stochastic_rounding": True},
        "option row_scaled_nvfp4 cannot go with stochastic_rounding=True, as its kernel rounds to "
        "nearest alone, got True; turn one of them off",
        id="row-scaled-sr",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, "with_amax_reduction": True},
        "option row_scaled_nvfp4 cannot go with with_amax_reduction=True, as ranks hold different "
        "rows, got True; turn one of them off",
        id="row-scaled-reduction",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_option_that_no_kernel_has_is_refused_when_it_is_built(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantizerError) as raised:
        NVFP4Quantizer(**fields)
    assert str(raised.value) == f"nvfp4: {message}"
    base = NVFP4Quantizer()
    with pytest.raises(QuantizerError):
        base.replace(**fields)


BF16 = torch.ones(32, 32, dtype=torch.bfloat16)
CALLS = [
    pytest.param(
        DtypeError,
        {},
        torch.ones(32, 32, dtype=torch.float64),
        "x must be one of float32, bfloat16, float16, got float64; cast it first",
        id="input-dtype",
    ),
    pytest.param(
        DtypeError,
        {**RHT, "columnwise": False},
        BF16.float(),
        "x must be bfloat16 for with_rht, got float32; cast it first, or turn that option off",
        id="rht-of-float32",
    ),
    pytest.param(
        DtypeError,
        {"row_scaled_nvfp4": True},
        BF16.half(),
        "x must be bfloat16 for row_scaled_nvfp4 of both planes, got float16; cast it first, or "
        "turn that option off",
        id="row-scaled-columns-of-float16",
    ),
    pytest.param(
        UsageError,
        {"rowwise": False, "columnwise": False},
        BF16,
        "neither rowwise nor columnwise is on; turn one on with with_usage()",
        id="no-plane",
    ),
    pytest.param(
        UsageError,
        {"row_scaled_nvfp4": True, "rowwise": False},
        BF16,
        "row_scaled_nvfp4 must be quantized with the rowwise usage on, got columnwise; turn it on "
        "with with_usage()",
        id="row-scaled-columnwise",
    ),
    pytest.param(
        UsageError,
        {"row_scaled_nvfp4": True, "nvfp4_use_4over6": True},
        BF16,
        "row_scaled_nvfp4 with nvfp4_use_4over6 must be quantized with the columnwise usage off, "
        "got rowwise+columnwise; turn it off with with_usage()",
        id="row-scaled-4over6-columnwise",
    ),
    pytest.param(
        UsageError,
        {"nvfp4_use_4over6": True, "with_2d_quantization": True, "rowwise": False},
        BF16,
        "nvfp4_use_4over6 with with_2d_quantization must be quantized with the rowwise usage on, "
        "got columnwise; turn it on with with_usage()",
        id="4over6-2d-columnwise",
    ),
]


@pytest.mark.parametrize(("error", "fields", "x", "message"), CALLS)
@pytest.mark.parametrize("into", [False, True], ids=["quantize", "quantize_into"])
def test_call_that_no_kernel_has_is_refused(
    error: type[TeError], fields: dict[str, Any], x: torch.Tensor, message: str, into: bool
) -> None:
    q = NVFP4Quantizer(**fields)
    out = q.make_empty((32, 32), device="cpu") if into else None
    with pytest.raises(error) as raised:
        q.quantize(x) if out is None else q.quantize_into(x, out)
    assert str(raised.value) == f"nvfp4: {message}"


@pytest.mark.parametrize(
    ("rng", "given"),
    [
        pytest.param(torch.tensor([1, 2, 3]), "int64 of shape (3,) on cpu", id="shape"),
        pytest.param(torch.tensor([1.0, 2.0]), "float32 of shape (2,) on cpu", id="dtype"),
        pytest.param(
            torch.zeros(2, dtype=torch.int64, device="meta"),
            "int64 of shape (2,) on meta",
            id="device",
        ),
    ],
)
def test_seed_and_offset_are_two_int64_beside_the_input(rng: torch.Tensor, given: str) -> None:
    q = NVFP4Quantizer(stochastic_rounding=True)
    message = f"nvfp4: rng must be int64 of shape (2,), seed and offset, on cpu, got {given}"
    with pytest.raises(UsageError) as raised:
        q.quantize(BF16, rng=rng)
    assert str(raised.value) == message
    with pytest.raises(UsageError) as raised:
        q.quantize_into(BF16, q.make_empty((32, 32), device="cpu"), rng=rng)
    assert str(raised.value) == message


def test_seed_is_asked_for_by_stochastic_rounding_alone() -> None:
    q = NVFP4Quantizer(stochastic_rounding=True)
    with pytest.raises(UsageError) as raised:
        q.quantize(BF16)
    assert str(raised.value) == f"nvfp4: {q} needs rng with the call, got None"
    rng = torch.tensor([1, 2])
    with pytest.raises(UsageError) as raised:
        NVFP4Quantizer().quantize(BF16, rng=rng)
    assert str(raised.value) == f"nvfp4: {NVFP4Quantizer()} takes no rng with the call, got {rng}"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        pytest.param({}, (), id="none"),
        pytest.param({"stochastic_rounding": True}, ("rng",), id="rng"),
        pytest.param({"with_amax_reduction": True}, ("group",), id="group"),
        pytest.param(
            {"with_amax_reduction": True, "stochastic_rounding": True}, ("group", "rng"), id="both"
        ),
    ],
)
def test_call_arguments_stay_with_the_call(fields: dict[str, bool], names: tuple[str, ...]) -> None:
    q = NVFP4Quantizer(**fields)
    assert q.call_arguments() == names
    assert q.at_rest() == NVFP4Quantizer()
    assert q.at_rest().call_arguments() == ()
