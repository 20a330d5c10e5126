# SPDX-License-Identifier: Apache-2.0
"""Under ``torch.compile(fullgraph=True)``: one graph for every M, the bytes of eager.

Up to 128 rows there is one block of rows, and a size of 1 is a constant of the graph: that is the
other graph a function may have.
That a second process finds these graphs on disk is a test of all formats, in tests-integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_fp8_block import ops
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.tensor import Float8BlockwiseStorage
from te_proto import TensorProto, custom_op
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

FIRST = (160, 192, 320, 130)
MORE = (288, 1024, 384)
ONE_D = {"block_scaling_dim": 1}
TWO_D = {"block_scaling_dim": 2}
dims = pytest.mark.parametrize("fields", [ONE_D, TWO_D], ids=["1d", "2d"])


def compiled(fn: Callable[..., Any], *, dynamic: bool = True) -> Any:
    # Inductor's code is compared with the reference in its own tests, and in tests-integration
    return torch.compile(fn, fullgraph=True, dynamic=dynamic, backend="aot_eager")


def values(m: int, dtype: torch.dtype = torch.bfloat16, *, dynamic_k: bool = False) -> torch.Tensor:
    x = hostile((m, 300), dtype, seed=m, block=(1, 128))
    if not dynamic_k:  # which takes longer to trace
        torch._dynamo.mark_static(x, 1)
    return x


# -- a quantized tensor as output -----------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(ONE_D, id="1d"),
        pytest.param(TWO_D, id="2d"),
        pytest.param(TWO_D | {"rowwise": False, "dtype": "e5m2"}, id="2d-columnwise"),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_quantize_is_one_graph_with_the_bytes_of_eager(
    fields: dict[str, Any], assert_same_planes: Same, known: Known
) -> None:
    quantizer = Float8BlockQuantizer(**fields)
    with count_compiles() as counts:
        run = compiled(quantizer.quantize)
        for m in (*FIRST, *MORE):
            x = values(m, dynamic_k=True)
            q, expected = run(x), quantizer.quantize(x)
            assert known(q) == known(expected)
            assert_same_planes(q, expected)
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


@dims
def test_storage_that_leaves_a_graph_is_that_of_eager(
    fields: dict[str, Any], assert_same_planes: Same, known: Known
) -> None:
    quantizer = Float8BlockQuantizer(internal=True, **fields)
    with count_compiles() as counts:
        run = compiled(quantizer.quantize)
        for m in (*FIRST, *MORE):
            q, expected = run(values(m)), quantizer.quantize(values(m))
            assert type(q) is Float8BlockwiseStorage
            assert known(q) == known(expected)
            assert_same_planes(q, expected)
            assert q.rowwise_scale_inv.shape == expected.rowwise_scale_inv.shape
            assert q.columnwise_scale_inv.shape == expected.columnwise_scale_inv.shape
            assert_same_bits(q.dequantize(), expected.dequantize())
    assert (counts.graphs, counts.recompiles) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        pytest.param(ONE_D, lambda q: q.with_usage(rowwise=False), id="drop"),
        pytest.param(
            TWO_D | {"columnwise": False}, lambda q: q.with_usage(columnwise=True), id="make"
        ),
        pytest.param(
            TWO_D | {"columnwise": False}, lambda q: q.t().unsqueeze(0).clone(), id="transpose"
        ),
    ],
)
def test_change_inside_the_graph_keeps_it_one(
    fields: dict[str, Any], change: Callable[[Any], Any], known: Known, assert_same_planes: Same
) -> None:
    quantizer = Float8BlockQuantizer(**fields)

    def run(x: torch.Tensor) -> Any:
        return change(quantizer.quantize(x))

    with count_compiles() as counts:
        graph = compiled(run)
        for m in FIRST:
            assert known(graph(values(m))) == known(run(values(m)))
            assert_same_planes(graph(values(m)), run(values(m)))
    assert (counts.graphs, counts.recompiles) == (1, 0)


@pytest.mark.parametrize("rows", [(32, 64, 160, 96, 1024, 128), (1024, 160, 96, 32)], ids=str)
@dims
def test_one_block_of_rows_is_a_second_graph_and_there_is_no_third(
    fields: dict[str, Any], rows: tuple[int, ...], assert_same_planes: Same
) -> None:
    quantizer = Float8BlockQuantizer(**fields)
    with count_compiles() as counts:
        run = compiled(quantizer.quantize)
        for m in rows:
            assert_same_planes(run(values(m)), quantizer.quantize(values(m)))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (2, 0, 1)


@dims
def test_slice_and_cat_inside_the_graph_are_those_of_eager(
    fields: dict[str, Any], assert_same_planes: Same
) -> None:
    quantizer = Float8BlockQuantizer(**fields)

    def run(x: torch.Tensor) -> Any:
        q = quantizer.quantize(x)
        return torch.cat([q[:, 128:], q[:, 128:256]], 0)

    with count_compiles():
        graph = compiled(run, dynamic=False)
        with pytest.raises(Exception, match="cat: shapes must agree on every axis but 0"):
            graph(values(128))

    def again(x: torch.Tensor) -> Any:
        q = quantizer.quantize(x)
        return torch.cat([q[:, :256], q[:, 256:]], -1)

    with count_compiles():
        graph = compiled(again, dynamic=False)
        for m in (64, 160):
            assert_same_planes(graph(values(m)), again(values(m)))


# -- a quantized tensor as input ------------------------------------------------------------------


@dims
def test_write_into_an_input_of_the_graph(fields: dict[str, Any], assert_same_planes: Same) -> None:
    quantizer = Float8BlockQuantizer(**fields)

    def write(q: Any, x: torch.Tensor) -> Any:
        return q.quantize_(x)

    def copy(q: Any, x: torch.Tensor) -> Any:
        return q.copy_(quantizer.quantize(x))

    for fn in (write, copy):
        with count_compiles():
            q, x = quantizer.quantize(torch.ones(160, 300)), values(160, torch.float32)
            before = [t.data_ptr() for t in q.inner_tensors().values()]
            compiled(fn, dynamic=False)(q, x)
            assert [t.data_ptr() for t in q.inner_tensors().values()] == before
            assert_same_planes(q, quantizer.quantize(x))


# -- there and back -------------------------------------------------------------------------------


def test_round_trip_with_gradient_is_one_graph() -> None:
    # Inductor's, of 128x128 blocks, is among the tests of all formats
    quantizer = Float8BlockQuantizer(block_scaling_dim=1, rowwise=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        return quantizer.quantize(-x).dequantize() * 2.0

    with count_compiles() as counts:
        run = compiled(step)
        for m in FIRST:
            x = values(m).requires_grad_()
            y = run(x)
            assert_same_bits(y.detach(), step(x.detach()))
            y.backward(torch.full_like(y, 0.5))
            assert x.grad is not None
            assert x.grad.unique().tolist() == [-1.0]
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


@custom_op(
    "te_fp8_block_tests::scales",
    outputs=lambda q: TensorProto(shape=(), dtype=torch.float32, device=q.device),
)
def sum_of_scales(q: Float8BlockwiseStorage) -> torch.Tensor:
    """Read the scales as a kernel of a user does."""
    row, column = q.rowwise_scale_inv, q.columnwise_scale_inv
    assert row is not None
    assert column is not None
    assert row.dim() == column.dim() == 2
    return row.sum() + column.sum()


def test_op_of_a_user_gets_the_scales_in_their_shape() -> None:
    quantizer = Float8BlockQuantizer(internal=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = sum_of_scales(quantizer.quantize(x))
        return out

    with count_compiles() as counts:
        graph = compiled(run)
        for m in FIRST:
            assert_same_bits(graph(values(m)), run(values(m)))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


@pytest.mark.usefixtures("cpu_triton")
def test_ops_of_the_kernels_compile_once() -> None:
    quantizer = Float8BlockQuantizer(internal=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return ops.dequantize_op(ops.quantize_op(x, quantizer), torch.float32)

    with count_compiles() as counts:
        run = compiled(there_and_back)
        for m in FIRST:
            x = values(m)
            assert_same_bits(run(x), quantizer.quantize(x).dequantize(torch.float32))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


# -- what is guarded ------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("block_scaling_dim", 2), ("amax_epsilon", 0.7)])
def test_number_among_the_options_is_a_constant_of_a_dynamic_graph(
    field: str, value: float, assert_same_planes: Same
) -> None:
    # dynamo would take it for a symbol: its value reaches a branch, or a kernel, all the same
    class Holder:
        quantizer = Float8BlockQuantizer(rowwise=False, **{field: value})  # type: ignore[arg-type]

    holder, x = Holder(), values(64, torch.float32)
    with count_compiles():
        q = compiled(lambda holder, x: holder.quantizer.quantize(x))(holder, x)
    assert_same_planes(q, holder.quantizer.quantize(x))
