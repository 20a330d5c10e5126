# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import FrozenInstanceError
from importlib.metadata import entry_points

import pytest
import torch

import te_mxfp8
import te_proto
from te_mxfp8.layout import BLOCK
from te_mxfp8.quantizer import MXFP8Quantizer
from te_mxfp8.recipe import MXFP8BlockScaling
from te_mxfp8.tensor import MXFP8Storage, MXFP8Tensor
from te_proto.errors import QuantizerError

ROLES = ("input", "weight", "grad_output")


def test_defaults_are_e4m3_in_1x32_blocks_in_both_planes() -> None:
    recipe = MXFP8BlockScaling()
    assert recipe.name == "mxfp8"
    default = MXFP8Quantizer(
        dtype="e4m3",
        rowwise=True,
        columnwise=True,
        internal=False,
        optimize_for_gemm=False,
        with_2d_quantization=False,
    )
    assert [getattr(recipe, role) for role in ROLES] == [default] * 3


def test_hybrid_is_e5m2_for_gradients_only() -> None:
    recipe = MXFP8BlockScaling(fp8_format="hybrid")
    assert [getattr(recipe, role).dtype for role in ROLES] == ["e4m3", "e4m3", "e5m2"]


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_2d_quantization_is_of_the_weight_only(fp8_format: str) -> None:
    recipe = MXFP8BlockScaling(fp8_format=fp8_format, enable_2d_quantization=True)
    assert [getattr(recipe, r).with_2d_quantization for r in ROLES] == [False, True, False]
    assert recipe.weight.replace(with_2d_quantization=False) == MXFP8Quantizer()


@pytest.mark.parametrize("fp8_format", ["e5m2", "E4M3", "fp8"])
def test_other_element_formats_are_refused(fp8_format: str) -> None:
    with pytest.raises(QuantizerError) as raised:
        MXFP8BlockScaling(fp8_format=fp8_format)
    assert str(raised.value) == (
        f"mxfp8: fp8_format must be 'e4m3' or 'hybrid', got {fp8_format!r}"
    )


def test_recipe_is_a_value() -> None:
    recipe = MXFP8BlockScaling()
    assert recipe == MXFP8BlockScaling()
    assert recipe != MXFP8BlockScaling(fp8_format="hybrid")
    with pytest.raises(FrozenInstanceError):
        recipe.weight = MXFP8Quantizer()  # type: ignore[misc]


# -- the card of the format -----------------------------------------------------------------------


def test_registry_finds_the_format_through_its_entry_point() -> None:
    (point,) = entry_points(group="te_proto.formats", name="mxfp8")
    assert point.value == "te_mxfp8._format:FORMAT"
    assert te_proto.describe("mxfp8") == te_mxfp8.FORMAT
    assert te_proto.get_quantizer("mxfp8") is MXFP8Quantizer
    assert te_proto.get_recipe("mxfp8") == MXFP8BlockScaling()


def test_card_names_the_classes_that_the_quantizer_makes() -> None:
    card = te_mxfp8.FORMAT
    for name, cls in (
        (card.quantizer, MXFP8Quantizer),
        (card.tensor, MXFP8Tensor),
        (card.storage, MXFP8Storage),
    ):
        assert name == f"{cls.__module__}:{cls.__qualname__}"
    assert card.recipe == f"{MXFP8BlockScaling.__module__}:{MXFP8BlockScaling.__qualname__}"
    assert MXFP8Quantizer.format_name == card.name
    assert type(MXFP8Quantizer().quantize(torch.ones(32, 32))) is MXFP8Tensor
    assert type(MXFP8Quantizer(internal=True).quantize(torch.ones(32, 32))) is MXFP8Storage


def test_card_has_the_numbers_of_the_layout() -> None:
    card = te_mxfp8.FORMAT
    assert card.elements == ("e4m3", "e5m2")
    assert MXFP8Quantizer().dtype == card.elements[0]
    for element in card.elements:
        assert MXFP8Quantizer(dtype=element).dtype == element
    assert card.block == (1, BLOCK)
    # one scale byte for as many codes: (rows, columns) of a matrix of whole tiles
    q = MXFP8Quantizer(columnwise=False).quantize(torch.ones(128, 128))
    assert q.rowwise_data.numel() == card.block[1] * q.rowwise_scale_inv.numel()
