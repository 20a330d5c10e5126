# SPDX-License-Identifier: Apache-2.0
"""The transform: its signs, its order, what becomes of the edges of bfloat16."""

from __future__ import annotations

import math

import pytest
import torch

from te_nvfp4.hadamard import SIGN_MASK, inverse, transform
from te_proto.testing import assert_same_bits, count_compiles

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]  # of the specification


def matrix(signs: bool) -> torch.Tensor:
    h = [[(-1.0) ** bin(r & c).count("1") for c in range(16)] for r in range(16)]
    s = torch.tensor(SIGNS if signs else [1] * 16, dtype=torch.float64).unsqueeze(1)
    return s * torch.tensor(h, dtype=torch.float64) / 4


def test_mask_has_a_bit_for_each_negative_sign() -> None:
    assert sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0) == SIGN_MASK == 55272


@pytest.mark.parametrize("signs", [True, False])
def test_transform_is_the_exact_sum_rounded_once(signs: bool) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 16, 96, generator=g).bfloat16()
    exact = torch.einsum("grk,rc->gck", x.double(), matrix(signs))
    assert_same_bits(transform(x, signs=signs), exact.bfloat16())


@pytest.mark.parametrize("signs", [True, False])
def test_inverse_gives_the_values_back(signs: bool) -> None:
    g = torch.Generator().manual_seed(2)
    y = torch.randn(4, 16, 96, generator=g)
    exact = torch.einsum("gck,rc->grk", y.double(), matrix(signs))
    torch.testing.assert_close(inverse(y, signs=signs).double(), exact, rtol=0, atol=2e-6)
    x = torch.randint(-8, 9, (3, 16, 5), generator=g).bfloat16()  # sums below 2**8 are exact
    assert torch.equal(inverse(transform(x, signs=signs).float(), signs=signs), x.float())


def test_order_of_additions_is_that_of_the_rounds() -> None:
    # (1 + -1) first leaves 2**-30, another order would lose it
    y = torch.zeros(16, 1)
    y[:3, 0] = torch.tensor([4.0, -4.0, 2.0**-28])
    assert inverse(y, signs=False)[0, 0] == 2.0**-30
    # in this order 2**-30 meets 1 first and is lost
    y[:3, 0] = torch.tensor([4.0, 2.0**-28, -4.0])
    assert inverse(y, signs=False)[0, 0] == 0.0


def test_sums_overflow_and_nan_spreads_over_its_group_alone() -> None:
    largest = torch.finfo(torch.bfloat16).max
    x = torch.zeros(2, 16, 3, dtype=torch.bfloat16)
    x[0, :, 0] = largest
    x[0, 3, 1] = math.nan
    y = transform(x, signs=False)
    # four times the largest is beyond float32 in the third round, and its difference is none
    assert str(y[0, :, 0].tolist()) == str([math.inf, *[0.0] * 7, math.nan, *[0.0] * 7])
    assert y[0, :, 1].isnan().all()
    assert not y[0, :, 2].any()
    assert not y[1].any()


def test_subnormals_are_kept() -> None:
    tiny = torch.zeros(1, 16, 1, dtype=torch.bfloat16)
    tiny[0, 0, 0] = 2.0**-131
    assert transform(tiny, signs=False).flatten().tolist() == [2.0**-133] * 16


def test_compiled_transform_rounds_as_eager_does() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = transform(x, signs=True)
        return y, inverse(y.float() * 1.5, signs=True)

    with count_compiles() as counts:
        compiled = torch.compile(both, fullgraph=True, dynamic=True)
        for groups in (2, 4, 6, 10):
            x = torch.randn(groups, 16, 48, generator=torch.Generator().manual_seed(groups))
            x[0, 0, 0], x[1, 3, 2] = math.inf, math.nan
            for found, expected in zip(compiled(x.bfloat16()), both(x.bfloat16()), strict=True):
                assert_same_bits(found.nan_to_num(nan=3.0), expected.nan_to_num(nan=3.0))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


def test_transform_can_be_compiled_as_a_region_of_its_own() -> None:
    region = torch.compiler.nested_compile_region(lambda x: transform(x, signs=True))
    compiled = torch.compile(lambda x: region(region(x)), fullgraph=True)
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert_same_bits(compiled(x), transform(transform(x, signs=True), signs=True))
