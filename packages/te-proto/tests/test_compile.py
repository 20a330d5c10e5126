# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors under torch.compile: one graph for every size, no recompilation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from te_toy import Rounding, ToyQuantizer, codes_of, proto, values
from torch import Tensor

from te_proto import (
    QuantizedStorage,
    TensorProto,
    custom_op,
    eval_proto,
    fallback,
    to_tensor_proto,
)
from te_proto.errors import FallbackError
from te_proto.testing import count_compiles, new_quantizer_in_graph

Q = ToyQuantizer()
ROW = Q.with_usage(columnwise=False)
INTERNAL = Q.replace(internal=True)
SIZES = (32, 64, 96, 160)

Make = Callable[[int], tuple[Any, ...]]


def plain(m: int) -> tuple[Tensor]:
    return (values(m, 20, seed=m),)


def leaf(m: int) -> tuple[Tensor]:
    return (values(m, 20, seed=m).requires_grad_(),)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
        return
    assert type(a) is type(b)
    assert to_tensor_proto(a) == to_tensor_proto(b)
    if isinstance(a, QuantizedStorage):
        assert codes_of(a) == codes_of(b)
    else:
        assert torch.equal(a, b)


def run(fn: Callable[..., Any], make: Make, *, graphs: int = 1, backend: str = "aot_eager") -> None:
    """Compare with eager over four sizes, then five more calls; count the compilations."""
    with count_compiles() as counts:
        compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
        for m in SIZES:
            assert_same(compiled(*make(m)), fn(*make(m)))
        assert counts.graphs <= graphs
        seen = counts.graphs
        for m in (*SIZES, SIZES[0]):
            compiled(*make(m))
        assert counts.graphs == seen
    assert counts.breaks == 0
    assert counts.recompiles <= graphs - 1


# -- made in the graph --------------------------------------------------------------------------


def pieces(x: Tensor) -> tuple[Any, ...]:
    q = Q.quantize(x).detach()
    return (
        q.view(2, -1, x.shape[-1]),
        q[4:-4],
        *q.split([8, x.shape[0] - 8]),
        q.clone(),
        q.to(torch.bfloat16),
        q.with_usage(columnwise=False),
    )


MADE = {
    "quantize": lambda x: Q.quantize(x),
    "quantize-storage": lambda x: INTERNAL.quantize(x),
    "quantize-dequantize": lambda x: Q.quantize(x).dequantize() * 2,
    "quantizer-in-graph": lambda x: ToyQuantizer(ceiling=1.5, columnwise=False).quantize(x),
    "requantize": lambda x: ROW.quantize(ROW.replace(block=0).quantize(x)),
    "its-own-quantizer": lambda x: ROW.quantize(x).quantizer.quantize(x * 2),
    "storage-with_usage": lambda x: INTERNAL.quantize(x).with_usage(rowwise=False),
    "alignment": lambda x: x + Q.alignment()[0] + Q.with_usage(rowwise=False).alignment()[1],
    "proto-of-quantized": lambda x: x * to_tensor_proto(ROW.quantize(x)).nbytes,
    "pieces-and-copies": pieces,
    "transpose": lambda x: ROW.quantize(x).detach().t(),
    "cat": lambda x: torch.cat([ROW.quantize(x).detach(), ROW.quantize(x * 2).detach()]),
    "like": lambda x: torch.zeros_like(torch.empty_like(ROW.quantize(x).new_zeros(x.shape))),
}


OF_A_NEW_QUANTIZER = ("storage-with_usage", "proto-of-quantized")


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(
            fn, id=name, marks=new_quantizer_in_graph if name in OF_A_NEW_QUANTIZER else ()
        )
        for name, fn in MADE.items()
    ],
)
def test_made_in_the_graph_is_one_graph_and_equals_eager(fn: Any) -> None:
    run(fn, plain)


def test_fallback_inside_a_graph_follows_the_policy() -> None:
    with fallback("allow"):
        run(lambda x: ROW.quantize(x) + 1, plain)
    with (
        count_compiles(),
        pytest.raises(Exception, match="toy: aten.add.Tensor has no quantized form"),
    ):
        torch.compile(lambda x: Q.quantize(x) + 1, backend="aot_eager", fullgraph=True)(*plain(8))


def copied(x: Tensor) -> Any:
    t = Q.quantize(x)
    t.copy_(x * 2)
    return t


def written(x: Tensor) -> Any:
    t = Q.quantize(x)
    Q.quantize_into(x * 2, t)
    return t


def written_storage(x: Tensor) -> Any:
    s = INTERNAL.quantize(x)
    INTERNAL.quantize_into(x * 2, s, noop=torch.zeros(1))
    return s


@pytest.mark.parametrize("fn", [copied, written, written_storage])
def test_written_in_the_graph_is_one_graph_and_equals_eager(fn: Any) -> None:
    run(fn, plain)


@pytest.mark.parametrize("q", [Q.with_usage(columnwise=False), INTERNAL, None], ids=str)
def test_allocated_in_the_graph_is_one_graph(q: Any) -> None:
    def fn(x: Tensor) -> Any:
        return TensorProto(
            shape=x.shape, dtype=x.dtype, quantizer=q, device=x.device
        ).create_tensor()

    with count_compiles() as counts:
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
        for m in SIZES:
            assert to_tensor_proto(compiled(*plain(m))) == proto((m, 20), q)
        assert counts.graphs == 1


@pytest.mark.parametrize("fn", ["quantize", "quantize-dequantize"])
def test_inductor_gives_the_bytes_of_eager(fn: str) -> None:
    run(MADE[fn], plain, backend="inductor")


# -- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradient_through_a_graph_equals_eager_for_every_size(backend: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return (Q.quantize(x).dequantize(torch.float32) * x).square()

    with count_compiles() as counts:
        compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
        for m in SIZES:
            grads = []
            for f in (fn, compiled):
                (x,) = leaf(m)
                f(x).sum().backward()
                grads.append(x.grad)
            torch.testing.assert_close(*grads)
        assert counts.graphs == 1


def test_gradient_of_a_quantized_result_of_a_graph_is_refused_by_torch_not_wrong() -> None:
    # AOTAutograd takes the gradient for a tensor of the result's class, and it is plain:
    # pytorch#118670, and torchtitan#2776 where nobody could see why
    with count_compiles() as counts, fallback("allow"):
        compiled = torch.compile(lambda x: Q.quantize(x * 2), backend="aot_eager", fullgraph=True)
        (x,) = leaf(32)
        out = compiled(x)
        assert codes_of(out) == codes_of(Q.quantize(x.detach() * 2))
        assert counts.graphs == 1
        with pytest.raises(
            RuntimeError, match=r"tensor subclass where we guessed its\smetadata incorrectly"
        ):
            out.dequantize().sum().backward()
    assert x.grad is None


def test_quantized_gradient_of_a_plain_result_of_a_graph_falls_back() -> None:
    # pytorch#118670: AOTAutograd guessed that it is plain
    fn = torch.compile(lambda x: x * 3, backend="aot_eager", fullgraph=True)
    grad = Q.quantize(values(32, 20, seed=1))
    with count_compiles():
        (x,) = leaf(32)
        with fallback("allow"):
            fn(x).backward(grad)
        assert torch.equal(x.grad, grad.dequantize() * 3)
        with (
            fallback("error"),
            pytest.raises(FallbackError, match="^toy: backward of a compiled graph has no"),
        ):
            fn(x).backward(grad)


# -- graph inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        pytest.param(lambda t: t.dequantize(), lambda m: (Q.quantize(*plain(m)),), id="tensor"),
        pytest.param(
            lambda t: t.dequantize(), lambda m: (INTERNAL.quantize(*plain(m)),), id="storage"
        ),
        pytest.param(
            lambda t: t.detach().t().dequantize() * 3,
            lambda m: (Q.quantize(*plain(m)).requires_grad_(),),
            id="requires-grad",
        ),
        pytest.param(
            lambda t, x: t.quantizer.quantize(t.dequantize() + x),
            lambda m: (Q.quantize(*plain(m)), *plain(m)),
            id="two",
        ),
    ],
)
def test_quantized_input_is_at_most_two_graphs(fn: Any, make: Make) -> None:
    # two of its sizes may be equal at first, and torch then takes them for one (duck sizing)
    run(fn, make, graphs=2)


WRITES: dict[str, Any] = {
    "copy_": lambda t, x: t.copy_(x),
    "quantize_": lambda t, x: t.quantize_(x),
    "quantize_into": lambda t, x: t.quantizer.quantize_into(x, t),
    "op": lambda t, x: write_op(t, x),
}
READS: dict[str, Any] = {
    "dequantize": lambda t: t.dequantize(),
    "with_usage": lambda t: t.with_usage(rowwise=False).dequantize(),
    "clone": lambda t: t.clone(),
    "inner_tensors": lambda t: QuantizedStorage.inner_tensors(t)["rowwise_scale_inv"] + 0,
    "op": lambda t: read_op(t),
}


@custom_op("te_compiled::write", mutates=("out",))
def write_op(out: Any, x: Any) -> None:
    out.quantizer.quantize_into(x, out)


@custom_op("te_compiled::read", outputs=lambda t: t.replace(quantizer=None))
def read_op(t: Any) -> Tensor:
    out: Tensor = t.dequantize()
    return out


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_what_was_written_into_an_input_is_read_in_the_same_graph(write: str, read: str) -> None:
    def fn(t: Any, x: Tensor) -> Any:
        before = READS[read](t)
        WRITES[write](t, x)
        return before, READS[read](t)

    t, (x,) = Q.quantize(torch.ones(32, 20)), plain(32)
    with count_compiles():
        found = torch.compile(fn, backend="aot_eager", fullgraph=True)(t, x)
    for out, value in zip(found, (torch.ones(32, 20), x), strict=True):
        assert_same(out, READS[read](Q.quantize(value)))
    assert codes_of(t) == codes_of(Q.quantize(x))


def test_input_is_written_in_place() -> None:
    def fn(t: Any, x: Tensor) -> Tensor:
        t.copy_(x)
        return t.dequantize()

    with count_compiles() as counts:
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
        for m in SIZES:
            t, (x,) = Q.quantize(torch.zeros(m, 20)), plain(m)
            at = [b.data_ptr() for b in t.inner_tensors().values()]
            out = compiled(t, x)
            assert torch.equal(out, Q.quantize(x).dequantize())
            assert codes_of(t) == codes_of(Q.quantize(x))
            assert [b.data_ptr() for b in t.inner_tensors().values()] == at
        assert counts.graphs <= 2


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Q.quantize(*plain(32)).requires_grad_(), id="leaf"),
        pytest.param(lambda: torch.nn.Parameter(Q.quantize(*plain(32))), id="parameter"),
        pytest.param(
            lambda: torch.nn.Parameter(Q.quantize(*plain(32)), requires_grad=False), id="frozen"
        ),
    ],
)
def test_input_that_requires_grad_compiles_once(make: Any) -> None:
    # pytorch#194318: the flag of the outer tensor was lost on rebuild, so each call recompiled
    t = make()
    with count_compiles() as counts:
        compiled = torch.compile(lambda t: t.dequantize() * 2, backend="aot_eager", fullgraph=True)
        for _ in range(5):
            out = compiled(t)
            assert out.requires_grad is t.requires_grad
        assert counts.graphs == 1
    if t.requires_grad:
        out.sum().backward()
        assert torch.equal(t.grad, torch.full((32, 20), 2.0))


def test_another_quantizer_is_another_graph_and_an_equal_one_is_not() -> None:
    with count_compiles() as counts:
        compiled = torch.compile(
            lambda t: t.quantizer.quantize(t.dequantize() * 2).dequantize(),
            backend="aot_eager",
            fullgraph=True,
        )
        for ceiling, graphs in ((1.0, 1), (2.0, 2), (1.0, 2), (2.0, 2)):
            q = ToyQuantizer(ceiling=ceiling)
            t = q.quantize(*plain(32))
            assert torch.equal(compiled(t), q.quantize(t.dequantize() * 2).dequantize())
            assert counts.graphs == graphs


def test_quantizer_as_argument_is_guarded_by_its_fields() -> None:
    with count_compiles() as counts:
        compiled = torch.compile(
            lambda x, q: q.quantize(x).dequantize(), backend="aot_eager", fullgraph=True
        )
        for rounding in (Rounding.NEAREST, Rounding.ZERO, Rounding.NEAREST):
            (x,), q = plain(32), ToyQuantizer(rounding=rounding)
            assert torch.equal(compiled(x, q), q.quantize(x).dequantize())
        assert counts.graphs == 2


# -- modules ------------------------------------------------------------------------------------


class Lazy(torch.nn.Module):
    """Makes its quantizer in the first forward, another one for eval."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.quantizer is None or self.quantizer.columnwise != self.training:
            self.quantizer = ToyQuantizer(columnwise=self.training)
        return self.quantizer.quantize(x).dequantize()


@new_quantizer_in_graph
def test_lazily_made_quantizer_survives_train_eval_train() -> None:
    # pytorch#187041: after a recompilation the attribute was None
    module = Lazy()
    with count_compiles():
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for training in (True, False, True, False):
            compiled.train(training)
            (x,) = plain(32)
            want = ToyQuantizer(columnwise=training)
            assert torch.equal(compiled(x), want.quantize(x).dequantize())
            assert module.quantizer == want


def test_forward_and_backward_twice_with_a_shared_quantizer_leak_nothing() -> None:
    before = Q.state()
    with count_compiles() as counts:
        compiled = torch.compile(
            lambda x: Q.quantize(x).dequantize(), backend="aot_eager", fullgraph=True
        )
        for grad in (True, False, True, False):
            (x,) = leaf(32)
            with torch.set_grad_enabled(grad):
                out = compiled(x)
            assert torch.equal(out, Q.quantize(x.detach()).dequantize())
            if grad:
                out.sum().backward()
                assert torch.equal(x.grad, torch.ones(32, 20))
        assert counts.graphs == 2  # with and without grad
    assert Q.state() == before


def test_eval_proto_predicts_what_a_graph_returns() -> None:
    def fn(x: Tensor) -> Any:
        return Q.quantize(x * 2)

    predicted = eval_proto(fn, to_tensor_proto(*plain(32)))
    with count_compiles():
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        assert to_tensor_proto(compiled(*plain(32))) == predicted


# -- caches on disk -----------------------------------------------------------------------------

PROCESS = """
import torch
from te_toy import ToyQuantizer, values
from te_proto import custom_op
from te_proto.testing import count_compiles

@custom_op("te_cached::quantize", outputs=lambda x, q: x.replace(quantizer=q))
def quantize(x, q):
    return q.quantize(x)

# dynamo's graph is the same for every quantizer: copy_ meets it only below
def by_input(t, x):
    return t.clone().copy_(x * 2).dequantize()

# a wrapper made in the graph would bypass AOTAutograd's cache, a storage does not
def by_op(q, x):
    return quantize(x, q.replace(internal=True)).rowwise_scale_inv

for fn in (by_input, by_op):
    for ceiling in CEILINGS:
        with count_compiles() as counts:
            x, q = values(8, 16) * 4, ToyQuantizer(ceiling=ceiling, columnwise=False)
            first = q.quantize(x) if fn is by_input else q
            out = torch.compile(fn, fullgraph=True)(first, x)
            right = torch.equal(out, fn(first, x))
            print(fn.__name__, ceiling, right, counts.aot_hits, counts.aot_misses)
"""


@new_quantizer_in_graph
def test_disk_caches_tell_quantizers_of_one_class_apart(
    fresh: Callable[..., str], tmp_path: Path
) -> None:
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # they pay from some kernels on
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    first = fresh(f"CEILINGS = [1.0]\n{PROCESS}", **environment)
    assert first.splitlines() == ["by_input 1.0 True 0 1", "by_op 1.0 True 0 1"]
    environment["PYTHONHASHSEED"] = "1"
    # another ceiling is another entry; the first is found by another process
    second = fresh(f"CEILINGS = [2.0, 1.0]\n{PROCESS}", **environment)
    assert second.splitlines() == [
        "by_input 2.0 True 0 1",
        "by_input 1.0 True 1 0",
        "by_op 2.0 True 0 1",
        "by_op 1.0 True 1 0",
    ]
