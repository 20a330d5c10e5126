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
from te_proto import TensorProto
from te_proto.testing import assert_same_bits, count_compiles, hostile, new_quantizer_in_graph

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


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
def test_create_tensor_in_a_graph_is_the_tensor_of_eager(
    dynamic: bool, internal: bool, known: Known
) -> None:
    quantizer = MXFP8Quantizer(internal=internal, optimize_for_gemm=True)

    def create(x: torch.Tensor) -> Any:
        made = TensorProto(
            shape=x.shape, dtype=x.dtype, quantizer=quantizer, device=x.device
        ).create_tensor()
        return list(made.inner_tensors().values()) if internal else made

    with count_compiles() as counts:
        run = compiled(create, backend="aot_eager", dynamic=dynamic)
        for m in FIRST if dynamic else FIRST[-1:]:
            x = torch.empty(3, m, 96, dtype=torch.float16)
            made, expected = run(x), create(x)
            if internal:
                assert [known(t) for t in made] == [known(t) for t in expected]
            else:
                assert known(made) == known(expected)
    assert (counts.graphs, counts.recompiles) == (1, 0)


@pytest.mark.parametrize("fields", [{}, {"rowwise": False}], ids=["both", "columnwise"])
def test_static_graph_returns_the_tensor_of_eager(
    fields: dict[str, bool], known: Known, assert_same_planes: Same
) -> None:
    quantizer, x = MXFP8Quantizer(**fields), hostile((64, 96), torch.float32)
    q = compiled(quantizer.quantize, backend="aot_eager", dynamic=False)(x)
    assert known(q) == known(quantizer.quantize(x))
    assert_same_planes(q, quantizer.quantize(x))


# -- a quantized tensor as input ------------------------------------------------------------------


@pytest.mark.parametrize("fields", [SWIZZLED, TWO_D], ids=["swizzled-e5m2", "2d-columnwise"])
def test_dequantize_of_an_input_compiles_at_most_twice(fields: dict[str, Any]) -> None:
    quantizer = MXFP8Quantizer(**fields)
    with count_compiles() as counts:
        run = compiled(lambda q: q.dequantize())
        for m in FIRST:
            q = quantizer.quantize(hostile((m, 96), seed=m))
            assert_same_bits(run(q), q.dequantize())
        # two padded sizes that were equal at first may be told apart once
        assert counts.recompiles <= 1
        seen = counts.graphs
        for m in MORE:
            q = quantizer.quantize(hostile((m, 96), seed=m))
            assert_same_bits(run(q), q.dequantize())
    assert (counts.graphs, counts.breaks) == (seen, 0)


def test_parameter_that_requires_grad_compiles_once() -> None:
    weight = torch.nn.Parameter(MXFP8Quantizer().quantize(hostile((64, 96), torch.float32)))
    with count_compiles() as counts:
        run = compiled(lambda q, x: x @ q.dequantize().t(), backend="aot_eager", dynamic=False)
        for seed in range(5):
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed))
            y = run(weight, x)
            assert y.requires_grad
            y.sum().backward()
            assert_same_bits(weight.grad, x.sum(0).expand(64, 96))
            weight.grad = None
    assert (counts.graphs, counts.recompiles) == (1, 0)


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


# -- what is guarded ------------------------------------------------------------------------------


def test_equal_quantizer_is_no_new_graph_and_another_one_is(assert_same_planes: Same) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantizer = MXFP8Quantizer()

        def forward(self, x: torch.Tensor) -> Any:
            return self.quantizer.quantize(x)

    holder, x = Holder(), hostile((32, 64))
    with count_compiles() as counts:
        run = compiled(holder, backend="aot_eager", dynamic=False)
        run(x)
        holder.quantizer = MXFP8Quantizer()
        run(x)
        assert counts.graphs == 1
        holder.quantizer = MXFP8Quantizer(optimize_for_gemm=True)
        assert_same_planes(run(x), holder.quantizer.quantize(x))
        assert counts.graphs == 2


@new_quantizer_in_graph
def test_quantizer_made_inside_the_graph_outlives_train_and_eval() -> None:
    class Lazy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "quantizer"):
                self.quantizer = MXFP8Quantizer()
            usage = self.quantizer if self.training else self.quantizer.with_usage(columnwise=False)
            return usage.quantize(x).dequantize()

    lazy, x = Lazy(), hostile((32, 64))
    run = compiled(lazy, backend="aot_eager", dynamic=False)
    for training in (True, False, True):
        lazy.train(training)
        assert_same_bits(run(x), MXFP8Quantizer().quantize(x).dequantize())
        assert lazy.quantizer == MXFP8Quantizer()


def test_quantizer_has_no_static_method_for_guards_to_trip_over() -> None:
    members = {n: v for cls in reversed(MXFP8Quantizer.__mro__) for n, v in vars(cls).items()}
    static = [n for n, v in members.items() if isinstance(v, staticmethod) and n[:2] != "__"]
    assert static == []
