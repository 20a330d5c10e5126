# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from te_nvfp4 import NVFP4BlockScaling, NVFP4Quantizer
from te_proto import get_recipe
from te_proto.errors import QuantizerError

RHT = {"with_rht": True, "with_post_rht_amax": True}
INPUT = NVFP4Quantizer(**RHT)
WEIGHT = NVFP4Quantizer(with_2d_quantization=True)
GRADIENT = NVFP4Quantizer(**RHT, stochastic_rounding=True)
CHOOSE = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}


def test_recipe_is_found_by_name_with_the_defaults() -> None:
    recipe = get_recipe("nvfp4")
    assert (recipe.name, recipe.input, recipe.weight, recipe.grad_output) == (
        "nvfp4",
        INPUT,
        WEIGHT,
        GRADIENT,
    )


@pytest.mark.parametrize(
    ("fields", "roles"),
    [
        pytest.param(
            {"disable_rht": True},
            (NVFP4Quantizer(), WEIGHT, NVFP4Quantizer(stochastic_rounding=True)),
            id="no-rht",
        ),
        pytest.param({"disable_stochastic_rounding": True}, (INPUT, WEIGHT, INPUT), id="no-sr"),
        pytest.param(
            {"disable_2d_quantization": True}, (INPUT, NVFP4Quantizer(), GRADIENT), id="no-2d"
        ),
        pytest.param(
            {"row_scaled_activation": True, "disable_rht": True},
            (
                NVFP4Quantizer(row_scaled_nvfp4=True),
                WEIGHT,
                NVFP4Quantizer(stochastic_rounding=True),
            ),
            id="row-scaled",
        ),
        pytest.param(
            {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"},
            (
                INPUT.replace(nvfp4_4over6_err_mode="MSE"),
                WEIGHT.replace(**CHOOSE, nvfp4_4over6_err_mode="MSE"),
                GRADIENT,
            ),
            id="4over6-weights",
        ),
        pytest.param(
            {
                "nvfp4_4over6": "all",
                "nvfp4_4over6_e4m3_use_256": "activations",
                "disable_rht": True,
            },
            (
                NVFP4Quantizer(**CHOOSE),
                WEIGHT.replace(nvfp4_use_4over6=True),
                NVFP4Quantizer(stochastic_rounding=True),
            ),
            id="4over6-all-but-256-for-activations",
        ),
    ],
)
def test_each_switch_changes_its_roles(
    fields: dict[str, Any], roles: tuple[NVFP4Quantizer, ...]
) -> None:
    recipe = NVFP4BlockScaling(**fields)
    assert (recipe.input, recipe.weight, recipe.grad_output) == roles


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"nvfp4_4over6": "gradients"},
            "nvfp4: nvfp4_4over6 must be one of none, weights, activations, all, got 'gradients'",
            id="role",
        ),
        pytest.param(
            {"nvfp4_4over6_e4m3_use_256": "both"},
            "nvfp4: nvfp4_4over6_e4m3_use_256 must be one of none, weights, activations, all, got "
            "'both'",
            id="role-of-256",
        ),
        pytest.param(
            {"nvfp4_4over6": "activations"},
            "nvfp4: option nvfp4_use_4over6 cannot go with with_rht=True, as no kernel chooses the "
            "scale of a transformed block, got True; turn one of them off",
            id="4over6-activations-with-rht",
        ),
        pytest.param(
            {"row_scaled_activation": True},
            "nvfp4: option row_scaled_nvfp4 cannot go with with_rht=True, as rows are scaled as "
            "they are, got True; turn one of them off",
            id="row-scaled-with-rht",
        ),
    ],
)
def test_switches_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerError) as raised:
        NVFP4BlockScaling(**fields)
    assert str(raised.value) == message
