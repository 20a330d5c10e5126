# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_proto.numerics import in_slabs, loops, magnitudes, materialize, round_to, slabs
from te_proto.testing import assert_same_bits, count_compiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

INF = float("inf")
NAN = float("nan")


def compiled(fn: Callable[..., Any]) -> Any:
    return torch.compile(fn, fullgraph=True, dynamic=True)


@pytest.fixture(params=[False, True], ids=["other", "avx512"])
def avx512(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(loops, "_AVX512", request.param)
    on: bool = request.param
    return on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_magnitudes_are_without_nan_and_leave_their_input_alone(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.0, NAN, -NAN, 0.0, -0.0, INF, -INF, -1.5], dtype=dtype)
    before = x.clone()
    expected = torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0, INF, INF, 1.5])
    assert_same_bits(magnitudes(x).float(), expected)
    assert_same_bits(compiled(magnitudes)(x).float(), expected)
    assert_same_bits(x.nan_to_num(nan=9.0), before.nan_to_num(nan=9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("avx512")
def test_values_are_rounded_once_in_one_graph(dtype: torch.dtype) -> None:
    def halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return round_to(x * 0.5, dtype), round_to(x.t() * 0.5, dtype)

    with count_compiles() as counts:
        run = compiled(halves)
        for rows in (3, 7, 33):
            x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
            for actual, expected in zip(run(x, dtype), halves(x, dtype), strict=True):
                assert_same_bits(actual, (expected.float()).to(dtype))
                assert_same_bits(actual, expected)
    assert (counts.graphs, counts.recompiles) == (1, 0)
    assert_same_bits(halves(x, dtype)[1], (x.t() * 0.5).to(dtype))


def test_what_is_materialized_keeps_its_values_in_one_graph() -> None:
    def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = materialize(x.amax(1) + 1.0)
        turned = materialize(x.t() + 1)
        return x * scale.unsqueeze(1), turned * 2.0

    with count_compiles() as counts:
        run = compiled(doubled)
        for rows in (2, 5, 32):
            x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
            for actual, expected in zip(run(x), doubled(x), strict=True):
                assert_same_bits(actual, expected)
    assert (counts.graphs, counts.recompiles) == (1, 0)
    assert materialize(x) is x


@pytest.mark.parametrize(
    ("rows", "slab", "multiple", "sizes"),
    [
        pytest.param(10, 2**16, 1, [10], id="whole"),
        pytest.param(10, 4 * 6, 1, [4, 4, 2], id="with-a-rest"),
        pytest.param(10, 1, 1, [1] * 10, id="at-least-a-row"),
        pytest.param(10, 7 * 6, 3, [6, 4], id="multiple"),
        pytest.param(10, 1, 8, [8, 2], id="at-least-the-multiple"),
        pytest.param(0, 1, 1, [0], id="empty"),
    ],
)
def test_slabs_are_put_together_in_order(
    rows: int, slab: int, multiple: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SLAB", slab)
    seen: list[tuple[int, int]] = []

    def double(first: int, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        assert len(x) == len(scale)
        seen.append((first, len(x)))
        return x * scale, scale + first

    x, scale = torch.arange(rows * 6.0).view(rows, 6), torch.arange(float(rows)).unsqueeze(1)
    product, shifted = in_slabs(double, x, scale, multiple=multiple)
    assert [size for _, size in seen] == sizes
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    assert [first for first, _ in seen] == starts
    assert_same_bits(product, x * scale)
    offset = torch.tensor(starts).repeat_interleave(torch.tensor(sizes)).unsqueeze(1)
    assert_same_bits(shifted, scale + offset)


def test_what_is_traced_or_elsewhere_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB", 1)
    calls: list[int] = []

    def count(first: int, x: Tensor) -> tuple[Tensor]:
        calls.append(first)
        return (x + 1.0,)

    in_slabs(count, torch.zeros(5, 2, device="meta"))
    assert calls == [0]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        in_slabs(count, torch.zeros(5, 2))
    assert calls == [0, 0]
    with count_compiles() as counts:
        (made,) = compiled(lambda x: in_slabs(lambda _, part: (part + 1.0,), x))(torch.zeros(5, 2))
    assert_same_bits(made, torch.ones(5, 2))
    assert (counts.graphs, counts.recompiles) == (1, 0)
