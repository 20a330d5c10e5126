# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import FrozenInstanceError
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

import te_fp8_block
import te_proto
from te_fp8_block.layout import BLOCK
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.recipe import Float8BlockScaling
from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor
from te_proto.errors import QuantizerError

ROLES = ("input", "weight", "grad_output")


def of_each(recipe: te_proto.Recipe, field: str) -> list[Any]:
    return [getattr(getattr(recipe, role), field) for role in ROLES]


def test_defaults_are_e4m3_powers_of_two_and_128x128_for_the_weight_only() -> None:
    recipe = Float8BlockScaling()
    assert recipe.name == "fp8_block"
    assert recipe.weight == Float8BlockQuantizer(
        dtype="e4m3",
        rowwise=True,
        columnwise=True,
        internal=False,
        optimize_for_gemm=False,
        block_len=128,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2,
    )
    assert recipe.input == recipe.grad_output == recipe.weight.replace(block_scaling_dim=1)


def test_hybrid_is_e5m2_for_gradients_only() -> None:
    recipe = Float8BlockScaling(fp8_format="hybrid")
    assert of_each(recipe, "dtype") == ["e4m3", "e4m3", "e5m2"]


def test_options_reach_all_three_quantizers() -> None:
    recipe = Float8BlockScaling(force_pow_2_scales=False, amax_epsilon=1e-6)
    assert of_each(recipe, "force_pow_2_scales") == [False] * 3
    assert of_each(recipe, "amax_epsilon") == [1e-6] * 3


@pytest.mark.parametrize("dims", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)], ids=str)
def test_one_role_may_have_128x128_blocks(dims: tuple[int, int, int]) -> None:
    x, w, grad = dims
    recipe = Float8BlockScaling(
        x_block_scaling_dim=x, w_block_scaling_dim=w, grad_block_scaling_dim=grad
    )
    assert of_each(recipe, "block_scaling_dim") == list(dims)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        pytest.param({"x_block_scaling_dim": 2}, "x_block_scaling_dim and w_block_scaling_dim"),
        pytest.param(
            {"grad_block_scaling_dim": 2}, "w_block_scaling_dim and grad_block_scaling_dim"
        ),
        pytest.param(
            {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
            "x_block_scaling_dim and grad_block_scaling_dim",
        ),
        pytest.param(
            {"x_block_scaling_dim": 2, "grad_block_scaling_dim": 2},
            "x_block_scaling_dim and w_block_scaling_dim and grad_block_scaling_dim",
        ),
    ],
)
def test_two_roles_of_128x128_blocks_are_refused(options: dict[str, int], given: str) -> None:
    with pytest.raises(QuantizerError) as raised:
        Float8BlockScaling(**options)  # type: ignore[arg-type]
    assert str(raised.value) == (
        "fp8_block: at most 1 of input, weight and gradient may have blocks of 128x128, "
        f"got {given} of 2; set all but one to 1"
    )


@pytest.mark.parametrize("fp8_format", ["e5m2", "E4M3", "fp8"])
def test_other_element_formats_are_refused(fp8_format: str) -> None:
    with pytest.raises(QuantizerError) as raised:
        Float8BlockScaling(fp8_format=fp8_format)
    assert str(raised.value) == (
        f"fp8_block: fp8_format must be 'e4m3' or 'hybrid', got {fp8_format!r}"
    )


def test_option_of_a_quantizer_is_refused_by_it() -> None:
    with pytest.raises(QuantizerError) as raised:
        Float8BlockScaling(w_block_scaling_dim=3)
    assert str(raised.value) == "fp8_block: option block_scaling_dim must be 1 or 2, got 3"


def test_recipe_is_a_value() -> None:
    recipe = Float8BlockScaling()
    assert recipe == Float8BlockScaling()
    assert recipe != Float8BlockScaling(fp8_format="hybrid")
    with pytest.raises(FrozenInstanceError):
        recipe.weight = Float8BlockQuantizer()  # type: ignore[misc]


# -- the card of the format -----------------------------------------------------------------------


def test_registry_finds_the_format_through_its_entry_point() -> None:
    (point,) = entry_points(group="te_proto.formats", name="fp8_block")
    assert point.value == "te_fp8_block._format:FORMAT"
    assert te_proto.describe("fp8_block") == te_fp8_block.FORMAT
    assert te_proto.get_quantizer("fp8_block") is Float8BlockQuantizer
    assert te_proto.get_recipe("fp8_block") == Float8BlockScaling()


def test_card_names_the_classes_that_the_quantizer_makes() -> None:
    card = te_fp8_block.FORMAT
    for name, cls in (
        (card.quantizer, Float8BlockQuantizer),
        (card.tensor, Float8BlockwiseTensor),
        (card.storage, Float8BlockwiseStorage),
    ):
        assert name == f"{cls.__module__}:{cls.__qualname__}"
    assert card.recipe == f"{Float8BlockScaling.__module__}:{Float8BlockScaling.__qualname__}"
    assert Float8BlockQuantizer.format_name == card.name
    for internal, cls in ((False, Float8BlockwiseTensor), (True, Float8BlockwiseStorage)):
        assert type(Float8BlockQuantizer(internal=internal).quantize(torch.ones(3, 5))) is cls


def test_card_has_the_numbers_of_the_layout() -> None:
    card = te_fp8_block.FORMAT
    assert card.elements == ("e4m3", "e5m2")
    assert Float8BlockQuantizer().dtype == card.elements[0]
    for element in card.elements:
        assert Float8BlockQuantizer(dtype=element).dtype == element
    # (rows, columns) of a matrix, by default
    assert card.block == (BLOCK, BLOCK)
    q = Float8BlockQuantizer(columnwise=False).quantize(torch.ones(512, 512))
    assert q.rowwise_data.numel() == BLOCK * BLOCK * q.rowwise_scale_inv.numel()
    assert str(q.rowwise_scale_inv.dtype) == f"torch.{card.scale}"
