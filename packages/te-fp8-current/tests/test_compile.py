# SPDX-License-Identifier: Apache-2.0
"""Under ``torch.compile(fullgraph=True)``: one graph for every M, the bytes and facts of eager.

That a second process finds these graphs on disk is a test of all formats, in tests-integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

ROWS = (32, 64, 96, 160, 192, 32, 288, 64, 33)
FIELDS = [
    pytest.param({}, "inductor", id="one-buffer"),
    pytest.param({"separate_transpose": True, "dtype": "e5m2"}, "inductor", id="separate-e5m2"),
    pytest.param({"separate_transpose": True, "rowwise": False}, "aot_eager", id="transpose"),
    pytest.param({"force_pow_2_scales": True, "columnwise": False}, "aot_eager", id="pow-2"),
]


def compiled(fn: Callable[..., Any], backend: str = "aot_eager", dynamic: bool = True) -> Any:
    return torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend)


@pytest.mark.parametrize(("fields", "backend"), FIELDS)
@pytest.mark.usefixtures("poisoned")
def test_quantize_is_one_graph_with_the_bytes_of_eager(
    fields: dict[str, Any], backend: str, assert_same_planes: Same, known: Known
) -> None:
    quantizer = Quantizer(**fields)
    with count_compiles() as counts:
        run = compiled(quantizer.quantize, backend)
        for m in ROWS:
            x = hostile((m, 40), seed=m)
            q, expected = run(x), quantizer.quantize(x)
            assert known(q) == known(expected)
            assert_same_planes(q, expected)
            pointers = [t.untyped_storage().data_ptr() for t in q.inner_tensors().values()]
            assert len(set(pointers)) == len(pointers)
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


def test_quantize_into_an_input_is_one_graph_and_keeps_the_memory(
    assert_same_planes: Same,
) -> None:
    quantizer = Quantizer(separate_transpose=True)

    def update(x: torch.Tensor, q: Any, noop: torch.Tensor) -> None:
        quantizer.quantize_into(x, q, noop)

    with count_compiles() as counts:
        run = compiled(update)
        for flag in (0.0, 1.0, 0.5):
            x, out = hostile((32, 40)), quantizer.quantize(torch.ones(32, 40))
            before = [t.data_ptr() for t in out.inner_tensors().values()]
            run(x, out, torch.tensor(flag))
            assert [t.data_ptr() for t in out.inner_tensors().values()] == before
            expected = torch.ones(32, 40) if flag == 1.0 else x
            assert_same_planes(out, quantizer.quantize(expected))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


def test_gradient_passes_straight_through_a_graph() -> None:
    quantizer = Quantizer()
    x = torch.randn(32, 40, requires_grad=True)
    weight = torch.randn(32, 40)
    with count_compiles():
        y = compiled(lambda t: (quantizer.quantize(t).dequantize() * weight).sum())(x)
        y.backward()
    assert_same_bits(x.grad, weight)
