# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from te_toy import ToyQuantizer, ToyStorage, ToyTensor, codes_of, proto, values
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_proto import BufferSpec, QuantizedStorage, TensorProto, custom_op, to_tensor_proto
from te_proto.errors import LayoutError, UsageError
from te_proto.storage import InnerTensor
from te_proto.testing import count_compiles

Q = ToyQuantizer()
INTERNAL = Q.replace(internal=True)


def plain_like(p: TensorProto, **changes: Any) -> TensorProto:
    return p.replace(**{"quantizer": None, "requires_grad": False} | changes)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_PROTO_CHECK", "1")


# -- ops, one for each form ---------------------------------------------------------------------


@custom_op("te_toy::quantize", outputs=lambda x, q: x.replace(quantizer=q))
def quantize(x: Any, q: Any) -> Any:
    return q.quantize(x)


@custom_op("te_toy::dequantize", outputs=lambda t, dtype=torch.float32: plain_like(t, dtype=dtype))
def dequantize(t: Any, dtype: torch.dtype = torch.float32) -> Any:
    return t.dequantize(dtype)


@custom_op(
    "te_toy::all_forms",
    outputs=lambda x, t, s, extra, q, n, sizes, dtype, device, flag, factor, label: (
        TensorProto(shape=(*sizes, n), dtype=dtype, device=device),
        t,
        TensorProto(shape=x.shape, dtype=x.dtype, quantizer=q, device=x.device),
        s.replace(shape=(x.shape[0], s.shape[1])),
    ),
)
def all_forms(x, t, s, extra, q, n, sizes, dtype, device, flag, factor, label):  # type: ignore[no-untyped-def]
    base = 0.0 if extra is None else extra.sum()
    filled = torch.full((*sizes, n), factor, dtype=dtype, device=device) + base
    return (
        (filled if flag else -filled).to(dtype) + len(label),
        t.clone(),
        q.quantize(x),
        s.quantizer.quantize(s.dequantize()[: x.shape[0]]),
    )


@custom_op("te_toy::quantize_into", mutates=("out",))
def quantize_into(x: Any, out: Any, times: int = 1) -> None:
    (out.quantizer if isinstance(out, QuantizedStorage) else None).quantize_into(x * times, out)


@custom_op("te_toy::fill_both", mutates=("a", "b"))
def fill_both(a: Any, b: Any, x: Any) -> None:
    a.copy_(x)
    b.quantizer.quantize_into(x, b)


@custom_op(
    "te_toy::linear",
    outputs=lambda x, w, bias, q: (
        plain_like(x, shape=(*x.shape[:-1], w.shape[0])),
        plain_like(x).replace(quantizer=q),
    ),
)
def linear(x: Any, w: Any, bias: Any, q: Any) -> Any:
    xq = q.quantize(x)
    y = (
        xq.dequantize() @ w.dequantize().t()
        if isinstance(w, QuantizedStorage)
        else xq.dequantize() @ w.t()
    )
    return y if bias is None else y + bias, xq


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, bias, q = inputs
    y, xq = output
    assert isinstance(y, Tensor)
    assert type(xq) is q.create_metadata(x.dtype).cls
    ctx.save_for_backward(x, w.dequantize() if isinstance(w, QuantizedStorage) else w)
    ctx.kinds = (w, bias)
    ctx.q = q


def _backward(ctx: Any, grad: Tensor, of_quantized: None) -> Any:
    assert of_quantized is None
    x, w = ctx.saved_tensors
    given_w, bias = ctx.kinds
    of_w = (
        None if isinstance(given_w, QuantizedStorage) else grad.t() @ ctx.q.quantize(x).dequantize()
    )
    return grad @ w, of_w, None if bias is None else grad.sum(0), None


linear.register_autograd(_backward, setup_context=_save)


def every_argument(m: int = 8) -> dict[str, Any]:
    return {
        "x": values(m, 12),
        "t": Q.quantize(values(m, 8, seed=1)),
        "s": INTERNAL.quantize(values(16, 8, seed=2)),
        "extra": None,
        "q": INTERNAL,
        "n": 3,
        "sizes": (2, m),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "flag": True,
        "factor": 1.5,
        "label": "four",
    }


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert to_tensor_proto(a) == to_tensor_proto(b)
    for x, y in zip(_buffers(a), _buffers(b), strict=True):
        assert x.stride() == y.stride()
        assert torch.equal(x, y)


def _buffers(t: Any) -> list[Tensor]:
    return list(t.inner_tensors().values()) if isinstance(t, QuantizedStorage) else [t]


# -- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [Q, INTERNAL, Q.with_usage(columnwise=False)], ids=["t", "s", "row"])
def test_op_gives_what_the_function_gives(q: Any) -> None:
    x = values(8, 12)
    assert_same(quantize(x, q), q.quantize(x))
    assert_same(dequantize(q.quantize(x)), q.quantize(x).dequantize())
    assert_same(dequantize(q.quantize(x), torch.float16), q.quantize(x).dequantize(torch.float16))


def test_every_kind_of_argument_and_result_goes_through() -> None:
    given = every_argument()
    filled, t, s, kept = all_forms(**given)
    assert_same(filled, torch.full((2, 8, 3), 5.5, dtype=torch.bfloat16))
    assert_same(t, given["t"])
    assert_same(s, INTERNAL.quantize(given["x"]))
    assert_same(kept, INTERNAL.quantize(given["s"].dequantize()[:8]))
    given |= {"extra": torch.ones(2), "flag": False, "sizes": [2], "factor": float("inf"), "n": 0}
    assert_same(all_forms(*given.values())[0], torch.empty(2, 0, dtype=torch.bfloat16))


def test_presence_of_an_argument_is_part_of_the_call() -> None:
    without, given = (
        all_forms(**every_argument() | {"extra": e})[0] for e in (None, torch.full((2,), 2.0))
    )
    assert torch.equal(given, without + 4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_shapes_travel_for_every_rank(rank: int) -> None:
    x = values(*(4,) * rank)
    q = ToyQuantizer(block=0)
    assert_same(dequantize(quantize(x, q)), q.quantize(x).dequantize())


@pytest.mark.parametrize("internal", [False, True])
def test_op_that_mutates_writes_into_the_buffers(internal: bool) -> None:
    out = Q.replace(internal=internal).quantize(values(8, 8))
    at = [t.data_ptr() for t in out.inner_tensors().values()]
    assert quantize_into(values(8, 8, seed=1), out, times=2) is None
    assert [t.data_ptr() for t in out.inner_tensors().values()] == at
    assert codes_of(out) == codes_of(Q.quantize(values(8, 8, seed=1) * 2))


def test_op_may_mutate_plain_and_quantized_arguments() -> None:
    a, b = torch.zeros(8, 8), Q.quantize(torch.zeros(8, 8))
    version = a._version
    fill_both(a, b, values(8, 8))
    assert torch.equal(a, values(8, 8))
    assert a._version > version  # autograd is told
    assert codes_of(b) == codes_of(Q.quantize(values(8, 8)))


def test_op_that_mutates_refuses_a_slice() -> None:
    q = Q.quantize(values(8, 8))
    before = codes_of(q)
    with pytest.raises(UsageError, match="so a write would not reach the whole"):
        quantize_into(values(4, 8), q[4:8])
    assert codes_of(q) == before


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((values(4, 8),), {}),
        ((values(4, 8), Q, 1), {}),
        ((values(4, 8), Q), {"n": 1}),
        ((values(4, 8), Q), {"q": Q}),
    ],
    ids=["missing", "too-many", "unknown", "twice"],
)
def test_arguments_are_bound_as_in_python(args: Any, kwargs: Any) -> None:
    message = (
        f"te_toy::quantize: takes the arguments ('x', 'q'), got {len(args)} positional and "
        f"{tuple(kwargs)}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        quantize(*args, **kwargs)


@pytest.mark.parametrize(
    ("value", "kind"), [({"a": 1}, "dict"), ([values(2)], "list"), ((1.5,), "tuple")]
)
def test_argument_of_another_kind_is_refused_by_name(value: Any, kind: str) -> None:
    message = (
        f"argument q is a {kind}; an op takes tensors, quantizers, None, numbers, strings, dtypes, "
        "devices and sequences of ints"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        quantize(values(4, 8), value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "te_toy::none: an op either has outputs, a function of prototypes, or names the arguments it mutates",
        ),
        (
            {"outputs": lambda x: x, "mutates": ("x",)},
            "te_toy::none: an op either has outputs, a function of prototypes, or names the arguments it mutates",
        ),
        ({"mutates": ("y",)}, "te_toy::none: mutates names ['y'], but the arguments are ['x']"),
    ],
    ids=["neither", "both", "unknown"],
)
def test_definition_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        custom_op("te_toy::none", **options)(lambda x: x)


# -- fakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fake_results_have_the_layout_of_real_ones(device: str) -> None:
    real = [
        *all_forms(**every_argument()),
        quantize(values(8, 12), Q),
        dequantize(Q.quantize(values(4, 8))),
    ]
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, (Tensor, QuantizedStorage)):
                return to_tensor_proto(value).replace(device=device).create_tensor()
            return torch.device(device) if isinstance(value, torch.device) else value

        given = {n: fake(v) for n, v in every_argument().items()}
        made = [
            *all_forms(**given),
            quantize(fake(values(8, 12)), Q),
            dequantize(fake(Q.quantize(values(4, 8)))),
        ]
        assert mode is not None
    for a, b in zip(made, real, strict=True):
        assert type(a) is type(b) or not isinstance(b, QuantizedStorage)
        assert to_tensor_proto(a) == to_tensor_proto(b).replace(device=device)
        assert [t.stride() for t in _buffers(a)] == [t.stride() for t in _buffers(b)]


def test_meta_tensors_give_meta_results() -> None:
    out = quantize(torch.empty(8, 12, device="meta"), Q)
    assert to_tensor_proto(out) == proto((8, 12), Q, device="meta")


def raw_call(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return torch's op under ``op`` and the flat arguments that the call gives it."""
    seen: list[tuple[Any, ...]] = []
    under = op._op
    op._op = lambda *flat: seen.append(flat) or under(*flat)
    try:
        op(*args, **kwargs)
    finally:
        op._op = under
    return under.default, seen[0]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: raw_call(quantize, values(8, 12), Q), id="plain-to-tensor"),
        pytest.param(lambda: raw_call(quantize, values(8, 12), INTERNAL), id="plain-to-storage"),
        pytest.param(lambda: raw_call(dequantize, Q.quantize(values(8, 12))), id="tensor-to-plain"),
        pytest.param(lambda: raw_call(all_forms, **every_argument()), id="all-forms"),
        pytest.param(
            lambda: raw_call(quantize_into, values(8, 12), Q.make_empty((8, 12), device="cpu")),
            id="mutating",
        ),
        pytest.param(
            lambda: raw_call(linear, values(8, 12).requires_grad_(), values(4, 12), None, Q),
            id="differentiable",
        ),
    ],
)
def test_opcheck_accepts_the_op_under_each_form(call: Any) -> None:
    op, args = call()
    results = torch.library.opcheck(op, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


# -- TE_PROTO_CHECK -----------------------------------------------------------------------------


class OtherTensor(ToyTensor):
    pass


def drop_buffer(t: Any) -> Any:
    out = t.clone()
    out.columnwise_data = None
    return out


BROKEN: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "plain-for-quantized": (
        lambda x, t: t,
        lambda x, t: t.dequantize(),
        f"quantizer of result 0 is described as {Q}, got None",
    ),
    "storage-for-tensor": (
        lambda x, t: t,
        lambda x, t: INTERNAL.quantize(x),
        f"quantizer of result 0 is described as {Q}, got {INTERNAL}",
    ),
    "other-class": (
        lambda x, t: t,
        lambda x, t: OtherTensor(t.clone().inner_tensors(), Q, t.shape, t.dtype),
        "class of result 0 is described as ToyTensor, got OtherTensor",
    ),
    "other-options": (
        lambda x, t: t,
        lambda x, t: Q.replace(note="x").quantize(x),
        f"quantizer of result 0 is described as {Q}, got {Q.replace(note='x')}",
    ),
    "buffers": (
        lambda x, t: t,
        lambda x, t: drop_buffer(t),
        "result 0 is described with the buffers ['rowwise_data', 'rowwise_scale_inv', "
        "'columnwise_data', 'columnwise_scale_inv'], got ['rowwise_data', 'rowwise_scale_inv', "
        "'columnwise_scale_inv']",
    ),
    "shape": (
        lambda x, t: plain_like(x),
        lambda x, t: x[:4].clone(),
        "shape of result 0 is described as (8, 8), got (4, 8)",
    ),
    "dtype": (
        lambda x, t: (t, plain_like(x)),
        lambda x, t: (t.clone(), x.half()),
        "dtype of result 1 is described as torch.float32, got torch.float16",
    ),
    "nominal-dtype": (
        lambda x, t: t,
        lambda x, t: t.clone().to(torch.float16),
        "dtype of result 0 is described as torch.float32, got torch.float16",
    ),
    "stride": (
        lambda x, t: plain_like(x),
        lambda x, t: x.clone().t(),
        "result 0 is described with data contiguous, torch.float32 of shape (8, 8), got "
        "torch.float32 of shape (8, 8) and strides (1, 8)",
    ),
    "device": (
        lambda x, t: plain_like(x),
        lambda x, t: torch.empty(8, 8, device="meta"),
        "device of result 0 is described as cpu, got meta",
    ),
    "alias": (
        lambda x, t: plain_like(x),
        lambda x, t: x,
        "result 0 shares the memory of data with an argument; return a new tensor",
    ),
    "alias-of-a-part": (
        lambda x, t: plain_like(x, shape=(4, 8)),
        lambda x, t: x[4:],
        "result 0 shares the memory of data with an argument; return a new tensor",
    ),
    "alias-of-a-buffer": (
        lambda x, t: t,
        lambda x, t: t.like(t.clone().inner_tensors() | {"columnwise_data": t.columnwise_data}),
        "result 0 shares the memory of columnwise_data with an argument; return a new tensor",
    ),
    "too-many": (
        lambda x, t: (plain_like(x),),
        lambda x, t: (x + 1, x + 2),
        "outputs describes 1 results, the op returned 2",
    ),
    "none": (
        lambda x, t: plain_like(x),
        lambda x, t: None,
        "outputs describes 1 results, the op returned 0",
    ),
    "no-tensor": (
        lambda x, t: plain_like(x),
        lambda x, t: 1.5,
        "result 0 is described as a tensor, got a float",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_check_catches(fault: str) -> None:
    outputs, fn, message = BROKEN[fault]
    name = f"te_toy::broken_{fault.replace('-', '_')}"
    op = custom_op(name, outputs=lambda x, t: outputs(x, t))(lambda x, t: fn(x, t))
    with pytest.raises(LayoutError, match=f"^{re.escape(f'{name}: {message}')}$"):
        op(values(8, 8), Q.quantize(values(8, 8)))


def test_check_is_off_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TE_PROTO_CHECK")
    op = custom_op("te_toy::unchecked", outputs=lambda x: x)(lambda x: x.view(x.shape))
    x = values(4, 8)
    assert op(x).data_ptr() == x.data_ptr()


# -- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [Q, INTERNAL], ids=["tensor", "storage"])
def test_gradients_are_those_of_eager_autograd(q: Any) -> None:
    def leaves() -> list[Tensor]:
        return [
            t.requires_grad_() for t in (values(8, 12), values(4, 12, seed=1), values(4, seed=2))
        ]

    grad = values(8, 4, seed=3)
    x, w, bias = leaves()
    y, xq = linear(x, w, bias, q)
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


def test_every_kind_of_argument_compiles_for_every_size() -> None:
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
