# SPDX-License-Identifier: Apache-2.0
"""Under ``torch.compile(fullgraph=True)``: one graph for every M, the bytes of eager.

That a second process finds these graphs on disk is a test of all formats, in tests-integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_mxfp8 import ops
from te_mxfp8.quantizer import MXFP8Quantizer
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

FIRST = (32, 64, 96, 160)
MORE = (192, 32, 288, 64, 1024)
SWIZZLED = {"optimize_for_gemm": True, "dtype": "e5m2"}
TWO_D = {"with_2d_quantization": True, "rowwise": False}


def compiled(fn: Callable[..., Any], backend: str = "inductor", dynamic: bool = True) -> Any:
    return torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend)


# -- a quantized tensor as output -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        # Inductor's code for the other layouts is compared with the reference in its own tests
        pytest.param({}, "inductor", id="compact"),
        pytest.param(SWIZZLED, "aot_eager", id="swizzled-e5m2"),
        pytest.param(TWO_D, "aot_eager", id="2d-columnwise"),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_quantize_is_one_graph_with_the_bytes_of_eager(
    fields: dict[str, Any], backend: str, assert_same_planes: Same, known: Known
) -> None:
    quantizer = MXFP8Quantizer(**fields)
    with count_compiles() as counts:
        run = compiled(quantizer.quantize, backend)
        for m in (*FIRST, *MORE):
            x = hostile((m, 96), seed=m)
            q, expected = run(x), quantizer.quantize(x)
            assert known(q) == known(expected)
            assert_same_planes(q, expected)
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


def test_storage_inside_a_graph_is_that_of_eager() -> None:
    quantizer = MXFP8Quantizer(internal=True, columnwise=False)

    def buffers(x: torch.Tensor) -> list[torch.Tensor]:
        q = quantizer.quantize(x)
        return [q.rowwise_data, q.rowwise_scale_inv]

    with count_compiles() as counts:
        run = compiled(buffers, backend="aot_eager")
        for m in (*FIRST, *MORE):
            x = hostile((2, m, 64), seed=m)
            for got, expected in zip(run(x), buffers(x), strict=True):
                assert_same_bits(got, expected)
                assert got.stride() == expected.stride()
    assert (counts.graphs, counts.recompiles) == (1, 0)


# -- a quantized tensor as input ------------------------------------------------------------------


# -- there and back -------------------------------------------------------------------------------


def test_round_trip_with_gradient_is_one_graph() -> None:
    quantizer = MXFP8Quantizer()

    def step(x: torch.Tensor) -> torch.Tensor:
        # exact neighbours: Inductor does not round between fused operations
        return quantizer.quantize(-x).dequantize() * 2.0

    with count_compiles() as counts:
        run = compiled(step)
        for m in (*FIRST, *MORE):
            x = hostile((m, 96), seed=m).requires_grad_()
            y = run(x)
            assert_same_bits(y.detach(), step(x.detach()))
            y.backward(torch.full_like(y, 0.5))
            assert x.grad is not None
            assert x.grad.unique().tolist() == [-1.0]
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


def test_size_marked_dynamic_is_not_specialized() -> None:
    quantizer = MXFP8Quantizer()
    with count_compiles() as counts:
        run = torch.compile(
            lambda x: quantizer.quantize(x).dequantize(), fullgraph=True, backend="aot_eager"
        )
        for m in FIRST:
            x = hostile((m, 96), seed=m)
            torch._dynamo.mark_dynamic(x, 0)
            assert_same_bits(run(x), quantizer.quantize(x).dequantize())
    assert (counts.graphs, counts.recompiles) == (1, 0)


@pytest.mark.usefixtures("cpu_triton")
def test_ops_of_the_kernels_are_one_graph() -> None:
    quantizer = MXFP8Quantizer(internal=True, optimize_for_gemm=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return ops.dequantize_op(ops.quantize_op(x, quantizer), torch.float32)

    with count_compiles() as counts:
        run = compiled(there_and_back, backend="aot_eager")
        for m in FIRST:
            x = hostile((m, 64), seed=m)
            assert_same_bits(run(x), quantizer.quantize(x).dequantize(torch.float32))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)
