# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from te_toy import ToyQuantizer, codes_of, values
from te_toy_ops import (
    all_forms,
    assert_same,
    dequantize,
    linear,
    quantize,
    quantize_into,
)
from torch import Tensor

from te_proto import BufferSpec, QuantizedStorage
from te_proto.errors import UsageError
from te_proto.storage import InnerTensor
from te_proto.testing import count_compiles, new_quantizer_in_graph

Q = ToyQuantizer()
INTERNAL = Q.replace(internal=True)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_PROTO_CHECK", "1")


# -- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [Q, INTERNAL], ids=["tensor", "storage"])
def test_gradients_are_those_of_eager_autograd(q: Any) -> None:
    def leaves() -> list[Tensor]:
        return [
            t.requires_grad_() for t in (values(8, 12), values(4, 12, seed=1), values(4, seed=2))
        ]

    grad = values(8, 4, seed=3)
    x, w, bias = leaves()
    y, _ = linear(x, w, bias, q)
    y.backward(grad)
    x2, w2, bias2 = leaves()
    want = Q.quantize(x2).dequantize() @ w2.t() + bias2
    want.backward(grad)
    assert torch.equal(y, want)
    for a, b in ((x, x2), (w, w2), (bias, bias2)):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("q", [Q, INTERNAL], ids=["tensor", "storage"])
def test_quantized_result_of_a_differentiable_op_has_no_gradient(q: Any) -> None:
    _, xq = linear(values(8, 12).requires_grad_(), values(4, 12), None, q)
    assert not any(t.requires_grad for t in xq.inner_tensors().values())
    assert not xq.dequantize().requires_grad


def test_arguments_without_gradient_get_none() -> None:
    x = values(8, 12).requires_grad_()
    w = INTERNAL.quantize(values(4, 12))
    linear(x, w, None, Q)[0].sum().backward()
    assert torch.equal(x.grad, torch.ones(8, 4) @ w.dequantize())


def test_quantized_argument_that_requires_grad_is_refused_while_grad_is_on() -> None:
    w = Q.quantize(values(4, 12)).requires_grad_()
    message = (
        "te_toy::linear: w is quantized and requires grad, which an op cannot pass on; "
        "detach() or dequantize() it"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        linear(values(8, 12), w, None, Q)
    with torch.no_grad():
        linear(values(8, 12), w, None, Q)
    linear(values(8, 12), w.detach(), None, Q)


class CastStorage(QuantizedStorage):
    data_: InnerTensor


class CastQuantizer(ToyQuantizer):
    """A format of one floating-point buffer: a gradient could be mistaken for its."""

    internal: bool = True
    storage_class: ClassVar = CastStorage

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        return {"data_": BufferSpec(tuple(shape), torch.float32)}

    def quantize_impl(self, x: Tensor) -> dict[str, Tensor]:
        return {"data_": x.round()}

    def dequantize_impl(self, inner: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return inner["data_"].to(dtype)


def test_quantized_result_of_one_buffer_gets_no_gradient_either() -> None:
    x = values(8, 12).requires_grad_()
    y, xq = linear(x, values(4, 12), None, CastQuantizer())
    assert not xq.data_.requires_grad
    y.sum().backward()  # _backward asserts that it is given None
    assert x.grad is not None


def test_op_without_registered_gradient_gives_results_without_one() -> None:
    assert not dequantize(Q.quantize(values(4, 8))).requires_grad


# -- compile ------------------------------------------------------------------------------------


def counted(fn: Callable[..., Any], make: Callable[[int], Any], backend: str = "aot_eager") -> None:
    """One graph for four sizes, results equal to eager."""
    with count_compiles() as counts:
        compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
        for m in (32, 64, 96, 160):
            for a, b in zip(_each(compiled(*make(m))), _each(fn(*make(m))), strict=True):
                assert_same(a, b)
        assert counts.graphs == 1
    assert counts.recompiles == 0


def _each(result: Any) -> Iterator[Any]:
    yield from result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("q", [Q, INTERNAL], ids=["tensor", "storage"])
def test_op_is_one_graph_for_every_size(q: Any) -> None:
    counted(lambda x: quantize(x, q), lambda m: (values(m, 8),))


@new_quantizer_in_graph
def test_every_kind_of_argument_compiles_for_every_size() -> None:
    # TransformerEngine#3053: sizes of the graph among them, which have no hash
    def fn(x: Tensor) -> Any:
        m, k = x.shape
        return all_forms(
            x,
            Q.quantize(x),
            INTERNAL.quantize(x),
            None,
            Q.with_usage(columnwise=False),
            m,
            (k, m),
            torch.bfloat16,
            x.device,
            False,
            2.5,
            "é'\"",
        )

    counted(fn, lambda m: (values(m, 8),))


def test_mutating_op_compiles_for_every_size() -> None:
    def fn(x: Tensor) -> Any:
        t = quantize(x, Q)
        quantize_into(x * 3, t)
        return t

    counted(fn, lambda m: (values(m, 8),))


def test_mutating_op_writes_into_an_input_of_the_graph() -> None:
    with count_compiles() as counts:
        compiled = torch.compile(
            lambda x, t: quantize_into(x, t), backend="aot_eager", fullgraph=True
        )
        for _ in range(3):
            t = Q.quantize(values(8, 8))
            at = t.rowwise_data.data_ptr()
            compiled(values(8, 8, seed=1), t)
            assert t.rowwise_data.data_ptr() == at
            assert codes_of(t) == codes_of(Q.quantize(values(8, 8, seed=1)))
        assert counts.graphs == 1


def test_gradients_compile_for_every_size() -> None:
    def fn(x: Tensor) -> Tensor:
        return linear(x, values_w, None, Q)[0]

    values_w = values(4, 12, seed=1).requires_grad_()
    with count_compiles() as counts:
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
        for m in (32, 64, 96, 160):
            grads = []
            for f in (fn, compiled):
                x, values_w.grad = values(m, 12).requires_grad_(), None
                f(x).square().sum().backward()
                grads.append((x.grad, values_w.grad))
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert counts.graphs == 1


TWIN = """
from te_toy import ToyQuantizer

class Twin(ToyQuantizer):
    def quantize_impl(self, x):
        return super().quantize_impl(x * {factor})
"""


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_classes_of_one_name_are_told_apart_in_one_graph(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    twins = []
    for name, factor in (("one", 1), ("two", 2)):
        module = f"te_twin_{backend}_{name}"
        (tmp_path / f"{module}.py").write_text(TWIN.format(factor=factor))
        twins.append(importlib.import_module(module).Twin())

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return dequantize(quantize(x, twins[0])), dequantize(quantize(x, twins[1]))

    with count_compiles():
        a, b = torch.compile(fn, backend=backend, fullgraph=True)(values(8, 8))
    assert torch.equal(a, Q.quantize(values(8, 8)).dequantize())
    assert torch.equal(b, Q.quantize(values(8, 8) * 2).dequantize())
