# SPDX-License-Identifier: Apache-2.0
"""The amax kernel against the reference, bit for bit; ``--te-device`` chooses the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from te_fp8_current import reference
from te_proto.testing import assert_same_bits, hostile

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from te_fp8_current.kernels import amax as amax_module
from te_fp8_current.kernels.amax import TILE, launch_amax

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cpu_triton")

ALL = (torch.float32, torch.bfloat16, torch.float16)


def found(x: Tensor, **launch: object) -> Tensor:
    out = torch.zeros(1, device=x.device)
    launch_amax(x, out, **launch)  # type: ignore[arg-type]
    return out.cpu()


@pytest.mark.parametrize("x_dtype", ALL)
@pytest.mark.parametrize(
    "shape", [(), (1,), (300,), (5, 7), (33, 257), (2, 3, 40), (70, 1)], ids=str
)
@pytest.mark.parametrize("tile", [TILE, (16, 16), (1, 64)], ids=str)
def test_amax_is_that_of_the_reference(
    x_dtype: torch.dtype, shape: tuple[int, ...], tile: tuple[int, int], device: torch.device
) -> None:
    x = hostile(shape, x_dtype, seed=11).to(device)
    for values in (x, x.clamp(-1.0, 1.0), x * 2.0**-12):
        assert_same_bits(found(values, tile=tile), reference.amax(values.cpu()))


@pytest.mark.parametrize("x_dtype", ALL)
@pytest.mark.parametrize(
    ("values", "amax"),
    [
        pytest.param([0.0, -0.0], 0.0, id="zeros"),
        pytest.param([math.nan, -math.nan], 0.0, id="nan-only"),
        pytest.param([math.nan, -2.0, 1.0, -math.nan], 2.0, id="nan-among-others"),
        pytest.param([1.0, -math.inf, math.nan], math.inf, id="infinity"),
        pytest.param([2.0**-24, -(2.0**-24)], 2.0**-24, id="subnormal-of-float16"),
    ],
)
def test_special_values(
    x_dtype: torch.dtype, values: list[float], amax: float, device: torch.device
) -> None:
    for place in range(len(values)):
        rolled = values[place:] + values[:place]
        assert found(torch.tensor(rolled, dtype=x_dtype, device=device)).tolist() == [amax]


@pytest.mark.parametrize("place", [0, 255, 256, 300 * 32 - 1])
def test_the_largest_is_found_in_every_program(place: int, device: torch.device) -> None:
    x = torch.ones(32 * 300, device=device)
    x[place] = -3.0
    assert found(x.view(32, 300)).tolist() == [3.0]
    assert found(x.view(300, 32).t()).tolist() == [3.0]


VIEWS = [
    pytest.param(lambda x: x.t(), id="transposed"),
    pytest.param(lambda x: x[::2, ::3], id="strided"),
    pytest.param(lambda x: x[:1].expand(8, -1), id="expanded"),
    pytest.param(lambda x: x[3:, 5:], id="offset"),
    pytest.param(lambda x: x.view(4, 6, 20).transpose(0, 1), id="no-matrix"),
]


@pytest.mark.parametrize("view", VIEWS)
def test_strided_input(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x = view(hostile((24, 20), seed=12, nonfinite=True).to(device))
    assert_same_bits(found(x), reference.amax(x.cpu()))


def test_offsets_pass_32_bits(device: torch.device) -> None:
    # three rows of 64 bytes in 4 GiB of memory that is never touched
    x = torch.empty(2**31 + 32, dtype=torch.bfloat16, device=device).as_strided((3, 32), (2**30, 1))
    x.fill_(1.0)
    x[2, 31] = -5.0
    assert found(x, tile=(4, 32)).tolist() == [5.0]


@pytest.mark.parametrize("flag", [1.0, 0.0, 1.0 - 2.0**-24, 2.0, math.nan])
def test_noop_of_exactly_1_leaves_the_result(flag: float, device: torch.device) -> None:
    x = torch.full((3, 5), -7.0, device=device)
    noop = torch.tensor(flag, device=device)
    assert found(x, noop=noop).tolist() == [0.0 if flag == 1.0 else 7.0]
    assert_same_bits(found(x, noop=noop), reference.amax(x.cpu(), noop.cpu()))


def test_an_empty_tensor_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amax_module, "amax_kernel", None)  # a launch would subscript it
    for shape in ((0,), (0, 4), (4, 0), (2, 0, 3)):
        assert found(torch.empty(shape)).tolist() == [0.0]
