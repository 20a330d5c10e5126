# SPDX-License-Identifier: Apache-2.0
"""What ``check_op`` takes, and what it finds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from te_toy import ToyQuantizer, values
from te_toy_ops import (
    all_forms,
    dequantize,
    every_argument,
    fill_both,
    linear,
    plain_like,
    quantize,
    quantize_into,
)
from torch import Tensor

from te_proto import custom_op
from te_proto._compat import is_compiling
from te_proto.errors import LayoutError
from te_proto.testing import assert_same_bits, check_op

Q = ToyQuantizer()
INTERNAL = Q.replace(internal=True)


# -- what passes ----------------------------------------------------------------------------------

CALLS = [
    pytest.param(quantize, (values(8, 12), Q), id="plain-to-tensor"),
    pytest.param(quantize, (values(8, 12).half(), INTERNAL), id="plain-to-storage"),
    pytest.param(quantize, (values(16, 12)[::2], Q), id="strided"),
    pytest.param(dequantize, (Q.quantize(values(8, 12)),), id="tensor-to-plain"),
    pytest.param(dequantize, (INTERNAL.quantize(values(8, 12)),), id="storage-to-plain"),
    pytest.param(all_forms, tuple(every_argument().values()), id="all-forms"),
    pytest.param(
        quantize_into, (values(8, 12), Q.make_empty((8, 12), device="cpu"), 2), id="mutating"
    ),
    pytest.param(
        fill_both,
        (torch.empty(8, 12), INTERNAL.quantize(values(8, 12)), values(8, 12, seed=1)),
        id="mutating-two",
    ),
    pytest.param(
        linear,
        (values(8, 12).requires_grad_(), values(4, 12).requires_grad_(), torch.ones(4), Q),
        id="differentiable",
    ),
    pytest.param(
        linear, (values(8, 12).requires_grad_(), Q.quantize(values(4, 12)), None, Q), id="absent"
    ),
]


@pytest.mark.parametrize(("op", "arguments"), CALLS)
def test_op_that_is_what_it_says_passes(op: Any, arguments: tuple[Any, ...]) -> None:
    check_op(op, *arguments)


def test_result_is_returned_and_arguments_stay() -> None:
    x, out = values(8, 12), Q.quantize(values(8, 12, seed=1))
    before = out.dequantize()
    q = check_op(quantize, x, q=Q)
    assert_same_bits(q.dequantize(), Q.quantize(x).dequantize())
    (written,) = check_op(quantize_into, x, out)
    assert_same_bits(written.dequantize(), q.dequantize())
    assert_same_bits(out.dequantize(), before)


# -- what is found --------------------------------------------------------------------------------

_number = itertools.count()


def broken(fn: Any, outputs: Any = plain_like, **options: Any) -> Any:
    """Return an op of its own for ``fn``; by default it is described as returning its like."""
    name = f"te_op_check::op{next(_number)}"
    return custom_op(name, outputs=None if options else outputs, **options)(fn)


def found_by_check(op: Any, *arguments: Any, error: type[Exception] = AssertionError) -> str:
    with pytest.raises(error) as raised:
        check_op(op, *arguments)
    message = str(raised.value)
    assert message.startswith(f"{op.name}: ")
    return message[len(op.name) + 2 :]


def test_result_of_other_strides_is_found() -> None:
    op = broken(lambda x: (x + 1).t().contiguous().t())
    message = found_by_check(op, values(8, 12), error=LayoutError)
    assert "result 0 is described with data contiguous" in message


def test_result_that_is_an_argument_is_found() -> None:
    message = found_by_check(broken(lambda x: x), values(8, 12), error=LayoutError)
    assert "shares the memory of data with an argument" in message


def test_memory_that_is_not_written_is_found() -> None:
    def leave_the_last_row(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1]
        return out

    message = found_by_check(broken(leave_the_last_row), values(8, 12))
    assert message.startswith("result 0 depends on what memory held, or on the call: data: 12 of ")


def test_result_that_is_another_each_time_is_found() -> None:
    message = found_by_check(broken(lambda x: torch.rand_like(x)), values(8, 12))
    assert message.startswith("result 0 depends on what memory held, or on the call: data: ")


def test_argument_written_in_secret_is_found() -> None:
    def clamp(x: Tensor) -> Tensor:
        return x.clamp_(max=0.0) + 1

    message = found_by_check(broken(clamp), values(8, 12))
    assert message.startswith("argument x is changed: data: ")


def test_plane_of_an_argument_written_in_secret_is_found() -> None:
    def zero_the_scales(t: Any) -> Tensor:
        out: Tensor = t.dequantize()
        t.columnwise_scale_inv.zero_()
        return out

    message = found_by_check(broken(zero_the_scales), Q.quantize(values(8, 12)))
    assert message.startswith("argument t is changed: columnwise_scale_inv: ")


def test_argument_that_is_moved_instead_of_written_is_found() -> None:
    def move(out: Tensor, x: Tensor) -> None:
        out.data = x.clone()

    message = found_by_check(broken(move, mutates=("out",)), torch.empty(8, 12), values(8, 12))
    assert message == "out is moved, not written in place"


def test_description_that_reads_no_size_of_the_call_is_found() -> None:
    op = broken(lambda x: x.clone(), lambda x: plain_like(x, shape=(8, 12)))
    check_op(op, values(8, 12))
    message = found_by_check(op, values(8, 16), error=LayoutError)
    assert message == "shape of result 0 is described as (8, 12), got (8, 16)"


def test_gradient_that_is_another_in_a_graph_is_found() -> None:
    op = broken(lambda x: x * 2.0)
    op.register_autograd(lambda ctx, grad: grad * (3.0 if is_compiling() else 2.0))
    message = found_by_check(op, values(8, 12).requires_grad_())
    assert message.startswith("gradient of x in a graph: data: 96 of 96 elements differ")


def test_gradient_that_nobody_asks_for_is_said() -> None:
    message = found_by_check(linear, values(8, 12), values(4, 12), None, Q)
    assert message == "differentiable, but no argument requires grad; give one that does"
