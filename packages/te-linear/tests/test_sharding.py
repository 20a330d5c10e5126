# SPDX-License-Identifier: Apache-2.0
"""Shape rules of parallel layers, for any number of ranks and without a process."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from linear_toy import RECIPE, ToyQuantizer

from te_linear import Linear, LinearConfig, LinearPlan, plan_linear
from te_linear.sharding import gathered, join_axes, scattered
from te_proto import Recipe, TensorProto
from te_proto.errors import ShapeError, UsageError
from te_proto.layout import BufferSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

TP = [1, 2, 4, 8]
M, K, N = 64, 32, 48  # of each rank


class BlockQuantizer(ToyQuantizer):
    """Codes, scales of blocks of 16 padded to tiles of 4, and one maximum for all rows."""

    with_amax_reduction: bool = False
    padded: bool = False

    format_name: ClassVar[str] = "block"

    def call_arguments(self) -> tuple[str, ...]:
        return ("group",) if self.with_amax_reduction else ()

    def at_rest(self) -> BlockQuantizer:
        return self.replace(with_amax_reduction=False)

    def alignment(self) -> tuple[int, int]:
        return (self.multiple if self.columnwise else 1, self.multiple if self.rowwise else 1)

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        m, k = math.prod(shape[:-1]), shape[-1]
        tile = 128 if self.padded else 1

        def up(n: int) -> int:
            return (n + tile - 1) // tile * tile

        out: dict[str, BufferSpec] = {}
        if self.rowwise:
            out["rowwise_data"] = BufferSpec(tuple(shape), torch.uint8)
            out["rowwise_scale_inv"] = BufferSpec((up(m), (k + 15) // 16), torch.uint8)
        if self.columnwise:
            out["columnwise_data"] = BufferSpec((k, m), torch.uint8)
            out["columnwise_scale_inv"] = BufferSpec((k, (m + 15) // 16), torch.uint8)
        if not self.padded:
            out["amax"] = BufferSpec((1,), torch.float32)
        return out


BLOCK = BlockQuantizer(multiple=16)
CONFIG = LinearConfig(input=BLOCK, weight=BLOCK, grad_output=BLOCK)


def plan(
    kind: str, tp: int, *, sequence: bool, config: LinearConfig = CONFIG, m: int = M
) -> LinearPlan:
    config = dataclasses.replace(
        config, parallel_mode=kind, tp_size=tp, tp_group="tp", sequence_parallel=sequence
    )

    def proto(*shape: int) -> TensorProto:
        return TensorProto(shape=shape, dtype=torch.bfloat16, requires_grad=True, device="cpu")

    rows = m if kind == "column" and sequence else m * tp
    return plan_linear(proto(rows, K), proto(N, K), proto(N), config, grad_enabled=True)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("sequence", [False, True])
def test_column_parallel_takes_the_whole_input_and_returns_columns(tp: int, sequence: bool) -> None:
    made = plan("column", tp, sequence=sequence)
    rows = M * tp
    own = (M if sequence else rows, K)
    assert made.input.local.shape == own
    assert made.input.operand.shape == (rows, K)
    assert (made.output.shape, made.gradient.shape) == ((rows, N), (rows, N))
    assert made.grad_input.shape == made.saved_input.shape == own
    assert made.saved_input_operand.operand.shape == (rows, K)
    assert made.grad_weight.shape == (N, K)
    assert made.grad_bias.shape == (N,)
    gathers = "quantized" if sequence and tp > 1 else None
    assert (made.input.gather, made.saved_input_operand.gather) == (gathers, gathers)
    reduces = None if tp == 1 else "reduce_scatter" if sequence else "all_reduce"
    assert (made.reduce_product, made.reduce_grad_input) == (None, reduces)
    assert made.grad_output.gather is None
    assert not made.reduce_grad_bias


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("sequence", [False, True])
def test_row_parallel_returns_the_sum_over_the_ranks(tp: int, sequence: bool) -> None:
    made = plan("row", tp, sequence=sequence)
    rows = M * tp
    own = (M if sequence else rows, N)
    assert made.input.local.shape == made.input.operand.shape == (rows, K)
    assert (made.partial_product.shape, made.output.shape) == ((rows, N), own)
    assert made.grad_output.local.shape == made.gradient.shape == own
    assert made.grad_output.operand.shape == (rows, N)
    assert made.grad_input.shape == (rows, K)
    assert made.grad_output.gather == ("quantized" if sequence and tp > 1 else None)
    reduces = None if tp == 1 else "reduce_scatter" if sequence else "all_reduce"
    assert (made.reduce_product, made.reduce_grad_input) == (reduces, None)
    assert made.reduce_grad_bias == (sequence and tp > 1)


def test_what_is_gathered_has_the_scale_of_all_ranks() -> None:
    made = plan("column", 4, sequence=True)
    assert made.input.local.quantizer.with_amax_reduction
    assert made.input.group == "tp"
    assert made.input.axes == (0, 0, 1, 1, None)
    assert made.input.names[-1] == "amax"
    assert not made.saved_input.quantizer.with_amax_reduction
    assert made.grad_output.group is None  # it is not gathered
    other = plan("column", 4, sequence=True, config=dataclasses.replace(CONFIG, amax_group="all"))
    assert other.input.group == "all"


@pytest.mark.parametrize(
    ("quantizer", "ways"),
    [
        (BLOCK.replace(padded=True), ("plain", "quantized")),
        (ToyQuantizer(), ("quantized", "plain")),
    ],
    ids=["padded-scales-of-rows", "one-scale-a-column"],
)
def test_a_plane_that_cannot_be_put_together_is_gathered_plain(
    quantizer: ToyQuantizer, ways: tuple[str, str]
) -> None:
    config = LinearConfig(input=quantizer, weight=BLOCK, grad_output=quantizer)
    made = plan("column", 2, sequence=True, config=config)
    assert (made.input.gather, made.saved_input_operand.gather) == ways
    assert made.input.operand.shape == made.saved_input_operand.operand.shape == (2 * M, K)
    local = {"plain": (2 * M, K), "quantized": (M, K)}
    assert [s.local.shape for s in (made.input, made.saved_input_operand)] == [
        local[way] for way in ways
    ]
    # the planes of the whole are not kept, but the part that came
    assert (made.saved_input.shape, made.saved_input.quantizer) == ((M, K), None)
    assert made.keeps_argument_input
    row = plan("row", 2, sequence=True, config=config)
    assert (row.grad_output.gather, row.grad_output.local.shape) == ("plain", (2 * M, N))


@pytest.mark.parametrize(("kind", "role"), [("column", "input"), ("row", "grad_output")])
@pytest.mark.parametrize("tp", TP[1:])
def test_rows_that_do_not_fit_are_refused_in_forward_with_their_multiple(
    kind: str, role: str, tp: int
) -> None:
    size = K if kind == "column" else N
    message = (
        f"linear: {role} of shape (24, {size}): toy: M must be a multiple of 16, got 24; the rows "
        f"of all {tp} sequence parallel ranks must be a multiple of 16 x TP = {16 * tp}"
    )
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        plan(kind, tp, sequence=True, m=24)


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    config = dataclasses.replace(
        CONFIG, parallel_mode="row", tp_size=4, tp_group="tp", sequence_parallel=True
    )
    x = TensorProto(shape=(30, 2, K), dtype=torch.bfloat16, device="cpu")
    w = TensorProto(shape=(N, K), dtype=torch.bfloat16, device="cpu")
    message = "linear: the first axis of input must be a multiple of TP = 4, which sequence"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}"):
        plan_linear(x, w, None, config, grad_enabled=False)
    with pytest.raises(ShapeError, match="which must not be the last, got shape"):
        plan_linear(x.replace(shape=(K,)), w, None, config, grad_enabled=False)


@pytest.mark.parametrize(
    ("quantizer", "rows", "axes"),
    [
        (BLOCK, 16, (0, 0, 1, 1, None)),
        (BLOCK, 48, (0, 0, 1, 1, None)),
        (BLOCK, 24, None),  # half a block, though 2 x 24 rows have as many blocks as the parts
        (BLOCK, 15, None),
        (BLOCK, 0, None),
        (BLOCK.replace(padded=True), 128, (0, 0, 1, 1)),
        (BLOCK.replace(padded=True), 64, None),  # 64 rows of scales are padding
        (BLOCK.replace(columnwise=False), 15, (0, 0, None)),
    ],
)
def test_axes_along_which_shards_follow_each_other(
    quantizer: BlockQuantizer, rows: int, axes: Any
) -> None:
    assert join_axes(quantizer, (rows, K)) == axes
    if axes is not None:
        one = quantizer.describe_buffers((rows, K))
        for tp in TP[1:]:
            many = quantizer.describe_buffers(gathered((rows, K), tp))
            for (name, spec), axis in zip(one.items(), axes, strict=True):
                sizes = list(spec.shape)
                if axis is not None:
                    sizes[axis] *= tp
                assert many[name].shape == tuple(sizes)


@pytest.mark.parametrize("tp", TP)
def test_gathered_undoes_scattered(tp: int) -> None:
    assert gathered(scattered((8 * tp, 3, 5), tp), tp) == (8 * tp, 3, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel_mode": "both"}, "parallel_mode must be 'column', 'row' or None, got 'both'"),
        ({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        ({"tp_size": 2}, "parallel_mode must be 'column' or 'row' for more than one rank"),
        ({"sequence_parallel": True}, "parallel_mode must be 'column' or 'row' for more than one"),
        ({"parallel_mode": "row", "tp_size": 2}, "tp_group must be the c10d name of the 2 ranks"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^linear: {re.escape(message)}"):
        LinearConfig.from_recipe(RECIPE, **options)


def test_configuration_is_a_value() -> None:
    again = pickle.loads(pickle.dumps(CONFIG))
    assert (again, hash(again)) == (CONFIG, hash(CONFIG))
    assert len({CONFIG, again, dataclasses.replace(CONFIG, tp_group="x")}) == 2


def test_module_holds_its_part_of_the_parameters() -> None:
    recipe = Recipe(name="toy", input=BLOCK, weight=BLOCK, grad_output=BLOCK)
    options: dict[str, Any] = {"recipe": recipe, "tp_size": 4, "tp_group": "tp"}
    column = Linear(64, 96, parallel_mode="column", **options)
    row = Linear(64, 96, parallel_mode="row", **options)
    assert (column.weight.shape, column.bias.shape) == ((24, 64), (24,))
    assert (row.weight.shape, row.bias.shape) == ((96, 16), (96,))
    assert "column parallel over 4" in repr(column)
    with pytest.raises(ShapeError, match="in_features of a row parallel layer must be a multiple"):
        Linear(66, 96, parallel_mode="row", **options)


def test_a_reduction_without_a_group_is_refused() -> None:
    config = dataclasses.replace(CONFIG, input=BLOCK.replace(with_amax_reduction=True))
    x = TensorProto(shape=(16, K), dtype=torch.bfloat16, device="cpu")
    w = TensorProto(shape=(N, K), dtype=torch.bfloat16, device="cpu")
    with pytest.raises(UsageError, match="^linear: the quantizer of input reduces its amax over a"):
        plan_linear(x, w, None, config, grad_enabled=False)
    config = dataclasses.replace(config, amax_group="all")
    assert plan_linear(x, w, None, config, grad_enabled=False).input.group == "all"
