# SPDX-License-Identifier: Apache-2.0
"""The generator against its published vectors, and which bits each element gets."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from te_nvfp4.philox import block_bytes, philox
from te_nvfp4.rounding import encode_e2m1_stochastic
from te_proto.numerics import decode_e2m1
from te_proto.testing import assert_same_bits


def words(*values: int) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [
        pytest.param((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zero"),
        pytest.param(
            (0xFFFFFFFF,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"
        ),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="pi",
        ),
    ],
)
def test_vectors_of_the_authors(
    counter: tuple[int, ...], key: int, result: tuple[int, ...]
) -> None:
    assert [int(word) for word in philox(torch.tensor(key), words(*counter))] == list(result)


def one_block(seed: int, offset: int, number: int, *, columnwise: bool = False) -> list[int]:
    rng, block = torch.tensor([seed, offset]), torch.tensor([number])
    return block_bytes(rng, block, 1, columnwise=columnwise).flatten().tolist()


def test_element_takes_its_byte_of_the_draw_lowest_first() -> None:
    draw = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert one_block(0, 0, 0) == [word >> shift & 0xFF for word in draw for shift in (0, 8, 16, 24)]


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("seed", [7, -(2**63), 2**63 - 1])
@pytest.mark.parametrize(("offset", "number"), [(5, 9), (2**33 + 1, 2**34 + 2), (-1, 2**62)])
def test_counter_is_offset_then_block_then_plane(
    seed: int, offset: int, number: int, columnwise: bool
) -> None:
    mask = 0xFFFFFFFF
    top = (number >> 32) | (0x80000000 if columnwise else 0)
    draw = philox(
        torch.tensor(seed), words(offset & mask, (offset >> 32) & mask, number & mask, top)
    )
    expected = [int(word) >> shift & 0xFF for word in draw for shift in (0, 8, 16, 24)]
    assert one_block(seed, offset, number, columnwise=columnwise) == expected


def test_no_two_of_seed_offset_plane_and_block_share_a_draw() -> None:
    seen = {
        tuple(one_block(seed, offset, number, columnwise=columnwise))
        for seed, offset, number, columnwise in itertools.product(
            (0, 1, 2**40), (0, 1, 2**40), (0, 1, 2**40), (False, True)
        )
    }
    assert len(seen) == 54


def test_new_axis_goes_where_it_is_asked_for() -> None:
    rng, block = torch.tensor([1, 2]), torch.arange(6).view(2, 3)
    last = block_bytes(rng, block, 2, columnwise=False)
    middle = block_bytes(rng, block, 1, columnwise=False)
    assert (last.shape, middle.shape) == ((2, 3, 16), (2, 16, 3))
    assert_same_bits(middle, last.transpose(1, 2))
    assert last[1, 2].tolist() == one_block(1, 2, 5)


def test_bytes_are_uniform() -> None:
    bits = block_bytes(torch.tensor([3, 4]), torch.arange(2**16), 1, columnwise=False)
    counts = bits.flatten().bincount(minlength=256).double()
    assert counts.numel() == 256
    # 2**20 draws of 256 values: chi-squared of 255 degrees of freedom, 6 sigma
    assert abs(float(((counts - 4096) ** 2 / 4096).sum()) - 255) < 6 * (2 * 255) ** 0.5


# -- rounding --------------------------------------------------------------------------------------


def oracle(value: float, byte: int) -> float:
    """Return the rule of the specification, step by step; float64 is exact for these values."""

    def step(magnitude: float) -> float:
        return 2.0 if magnitude >= 4 else 1.0 if magnitude >= 2 else 0.5

    moved = abs(value) + byte / 256 * step(abs(value))
    result = min(moved // step(moved) * step(moved), 6.0)
    return -result if value < 0 else result


def all_bytes(values: list[float]) -> Tensor:
    """Return what each value becomes for each byte, a row a value."""
    x = torch.tensor(values, dtype=torch.float32).unsqueeze(1).expand(-1, 256)
    return decode_e2m1(encode_e2m1_stochastic(x, torch.arange(256).expand(len(values), -1)))


def test_every_byte_rounds_as_the_specification_says() -> None:
    sizes = [n / 64 + extra for n in range(0, 420, 7) for extra in (0.0, 2.0**-15)]
    values = [sign * size for size in sizes for sign in (1, -1)]
    expected = torch.tensor([[oracle(v, b) for b in range(256)] for v in values])
    assert torch.equal(all_bytes(values), expected)


def test_mean_over_all_bytes_is_the_value_to_a_256th_of_a_step() -> None:
    values = [n / 256 for n in range(0, 1537, 5)]
    for value, mean in zip(values, all_bytes(values).mean(1).tolist(), strict=True):
        assert abs(mean - value) <= (2 if value >= 4 else 1 if value >= 2 else 0.5) / 256


@pytest.mark.parametrize(
    ("value", "codes"),
    [
        pytest.param(0.0, {0}, id="zero"),
        pytest.param(-0.0, {8}, id="negative-zero"),
        pytest.param(2.0**-149, {0}, id="smallest-subnormal"),
        pytest.param(-(2.0**-126), {8}, id="tiny-keeps-its-sign"),
        pytest.param(3.0, {5}, id="exact"),
        pytest.param(1.75, {3, 4}, id="between-steps-of-a-half-and-of-one"),
        pytest.param(-4.5, {14, 15}, id="between-4-and-6"),
        pytest.param(6.0, {7}, id="max"),
        pytest.param(1e30, {7}, id="beyond"),
        pytest.param(float("-inf"), {15}, id="infinity"),
        pytest.param(float("nan"), {7}, id="nan"),
        pytest.param(-float("nan"), {7}, id="negative-nan"),
    ],
)
def test_codes_that_a_value_can_become(value: float, codes: set[int]) -> None:
    x = torch.full((256,), value)
    assert set(encode_e2m1_stochastic(x, torch.arange(256)).tolist()) == codes
