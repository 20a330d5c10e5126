# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from te_toy import Rounding, ToyQuantizer, ToyStorage, ToyTensor, codes_of, values
from torch import Tensor
from torch.nn import Module, Parameter

import te_proto.tensor
from te_proto import fallback, to_tensor_proto
from te_proto.errors import FallbackError, LayoutError, ShapeError, UsageError
from te_proto.tensor import FallbackWarning

Q = ToyQuantizer()
ROW = Q.with_usage(columnwise=False)


def quantized(*shape: int, quantizer: Any = Q, **kwargs: Any) -> Any:
    return quantizer.quantize(values(*shape, **kwargs))


def pointers(q: Any) -> list[int]:
    return [t.data_ptr() for t in q.inner_tensors().values()]


class Layer(Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = Parameter(quantized(8, 8, seed=seed))
        self.bias = Parameter(values(8))


# -- what torch sees ----------------------------------------------------------------------------


def test_tensor_has_the_logical_shape_and_nominal_dtype() -> None:
    q = quantized(2, 4, 8, dtype=torch.bfloat16)
    assert isinstance(q, Tensor)
    assert (q.shape, q.dtype, q.ndim, q.stride()) == ((2, 4, 8), torch.bfloat16, 3, (32, 8, 1))
    assert (q.numel(), q.element_size(), q.is_contiguous()) == (64, 2, True)
    assert torch.is_floating_point(q)


def test_repr_shows_no_values() -> None:
    q = quantized(4, 8, quantizer=ROW)
    assert (
        repr(q)
        == str(q)
        == (
            f"ToyTensor(shape=(4, 8), dtype=float32, device=cpu, quantizer={ROW}, "
            "rowwise_data=int8[4, 8], rowwise_scale_inv=float32[4, 2])"
        )
    )
    repr(quantized(4, 8).to("meta"))


# -- .data --------------------------------------------------------------------------------------


def test_data_shares_the_buffers_outside_autograd() -> None:
    q = quantized(4, 8).requires_grad_()
    assert pointers(q.data) == pointers(q)
    assert not q.data.requires_grad


def test_setting_data_to_a_tensor_of_the_format_takes_its_buffers() -> None:
    q, other = quantized(8, 8), quantized(8, 8, quantizer=ROW.replace(block=0), seed=1)
    q.data = other
    assert pointers(q) == pointers(other)
    assert q.quantizer == other.quantizer
    assert q.columnwise_data is None


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: values(8, 8, seed=1), id="plain"),
        pytest.param(lambda: values(8, 8, seed=1).requires_grad_(), id="plain-with-grad"),
        pytest.param(lambda: quantized(8, 8, seed=1).to(torch.float16), id="other-dtype"),
    ],
)
def test_setting_data_to_another_tensor_quantizes_into_the_buffers(value: Any) -> None:
    q, given = quantized(8, 8), value()
    at = pointers(q)
    q.data = given
    assert pointers(q) == at
    assert codes_of(q) == codes_of(Q.quantize(given.detach()))
    assert (q.dtype, q.requires_grad) == (torch.float32, False)


def test_setting_data_to_another_shape_is_refused() -> None:
    message = "toy: data must be set to a tensor of shape (8, 8), got (4, 8)"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        quantized(8, 8).data = values(4, 8)


def test_quantize_into_itself_keeps_memory_and_obeys_noop() -> None:
    q = quantized(8, 8)
    at, before = pointers(q), codes_of(q)
    assert q.quantize_(values(8, 8, seed=1), noop=torch.ones(1)) is q
    assert codes_of(q) == before
    q.quantize_(values(8, 8, seed=1))
    assert pointers(q) == at
    assert codes_of(q) == codes_of(quantized(8, 8, seed=1))


# -- fallback -----------------------------------------------------------------------------------


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_proto.tensor, "_WARNED", set())


def test_the_policy_begins_with_warn(fresh: Callable[..., str]) -> None:
    code = (
        "import torch, te_toy, warnings\n"
        "with warnings.catch_warnings(record=True) as w:\n"
        "    q = te_toy.ToyQuantizer().quantize(torch.ones(4, 8)); q + 1; q + 1; q * 2\n"
        "print(len(w), {x.category.__name__ for x in w})"
    )
    assert fresh(code) == "2 {'FallbackWarning'}"


@pytest.mark.usefixtures("unwarned")
def test_warning_comes_once_per_op_and_format_and_says_everything() -> None:
    q = quantized(4, 8, dtype=torch.bfloat16)
    message = (
        "toy: aten.add.Tensor has no quantized form and dequantizes its ToyTensor: 128 bytes "
        "become 64 of bfloat16; call .dequantize() first, or te_proto.fallback('allow')"
    )
    with fallback("warn"):
        with pytest.warns(FallbackWarning) as caught:
            out = q + 1
            assert torch.equal(q + 2, q.dequantize() + 2)
        assert [str(w.message) for w in caught] == [message]
        assert type(out) is Tensor
        with pytest.warns(FallbackWarning, match=r"^toy: aten.mul.Tensor has no quantized form"):
            assert torch.equal(q * 2, q.dequantize() * 2)


def test_error_policy_raises_before_anything_runs() -> None:
    q = quantized(4, 8)
    before = codes_of(q)
    message = (
        "toy: aten.add_.Tensor has no quantized form and dequantizes its ToyTensor: 128 bytes "
        "become 128 of float32; call .dequantize() first, or te_proto.fallback('allow')"
    )
    with fallback("error"), pytest.raises(FallbackError, match=f"^{re.escape(message)}$"):
        q.add_(1.0)
    assert codes_of(q) == before


@pytest.mark.usefixtures("unwarned")
def test_allow_policy_is_silent() -> None:
    q = quantized(4, 8)
    with fallback("allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(q.abs(), q.dequantize().abs())


def test_context_manager_restores_the_policy_also_after_an_error() -> None:
    q = quantized(4, 8)
    with pytest.raises(ZeroDivisionError), fallback("allow"):
        with fallback("error"), pytest.raises(FallbackError):
            q.abs()
        q.abs()  # allowed again
        raise ZeroDivisionError
    with pytest.raises(FallbackError):
        q.abs()  # what conftest.py sets


def test_policy_may_be_set_for_good() -> None:
    with fallback("error"):
        fallback("allow")
        quantized(4, 8).abs()


def test_unknown_policy_is_refused_and_changes_nothing() -> None:
    message = "fallback: policy must be 'error', 'warn' or 'allow', got 'ignore'"
    with pytest.raises(ValueError, match=f"^{message}$"):
        fallback("ignore")  # type: ignore[arg-type]
    with pytest.raises(FallbackError):
        quantized(4, 8).abs()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda q: q.add_(1.0), lambda x: x + 1.0, id="add_"),
        pytest.param(
            lambda q: q.mul_(values(8, 8, seed=1)), lambda x: x * values(8, 8, seed=1), id="mul_"
        ),
        pytest.param(lambda q: q.zero_(), torch.zeros_like, id="zero_"),
        pytest.param(lambda q: q.fill_(3.0), lambda x: torch.full_like(x, 3.0), id="fill_"),
        pytest.param(lambda q: torch.add(q, 1.0, out=q), lambda x: x + 1.0, id="out"),
        pytest.param(lambda q: torch._foreach_add_([q], 1.0), lambda x: x + 1.0, id="foreach"),
        pytest.param(
            lambda q: torch._foreach_lerp_([q], [values(8, 8, seed=1)], 0.5),
            lambda x: torch.lerp(x, values(8, 8, seed=1), 0.5),
            id="foreach_lerp",
        ),
        pytest.param(lambda q: torch.neg(q, out=q), torch.neg, id="neg-out"),
        pytest.param(
            lambda q: q.masked_fill_(values(8, 8) > 0, 0.0),
            lambda x: x.masked_fill(values(8, 8) > 0, 0.0),
            id="masked_fill_",
        ),
    ],
)
def test_op_that_writes_requantizes_in_place(change: Any, expected: Any) -> None:
    q = quantized(8, 8)
    at, want = pointers(q), expected(q.dequantize())
    with fallback("allow"):
        out = change(q)
    assert pointers(q) == at
    assert codes_of(q) == codes_of(Q.quantize(want))
    assert out is None or (out[0] if isinstance(out, (list, tuple)) else out) is q


def test_op_that_writes_into_a_plain_tensor_leaves_the_quantized_one() -> None:
    q, out = quantized(8, 8), torch.empty(8, 8)
    before = codes_of(q)
    with fallback("allow"):
        assert torch.add(q, 1.0, out=out) is out
    assert torch.equal(out, q.dequantize() + 1)
    assert codes_of(q) == before


def test_foreach_op_over_quantized_and_plain_tensors_writes_each() -> None:
    q, x = quantized(8, 8), values(8, 8, seed=1)
    want = q.dequantize() * 2, x * 2
    with fallback("allow"):
        torch._foreach_mul_([q, x], 2.0)
    assert codes_of(q) == codes_of(Q.quantize(want[0]))
    assert torch.equal(x, want[1])


def test_matmul_and_linear_give_what_the_dequantized_tensor_gives() -> None:
    w, x = quantized(12, 8), values(3, 8)
    with fallback("allow"):
        assert torch.equal(x @ w.t(), x @ w.t().dequantize())
        assert torch.allclose(torch.nn.functional.linear(x, w), x @ w.dequantize().t(), atol=1e-1)


# -- autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_passes_straight_through_quantize_and_dequantize(dtype: torch.dtype) -> None:
    x = values(4, 8, dtype=dtype).requires_grad_()
    grad = values(4, 8, seed=1)
    q = Q.quantize(x)
    assert q.requires_grad
    assert q.grad_fn is not None
    q.dequantize(torch.float32).backward(grad)
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, grad.to(dtype))


def test_quantized_leaf_takes_a_plain_gradient_of_its_nominal_dtype() -> None:
    q = quantized(4, 8, dtype=torch.float16).requires_grad_()
    assert q.is_leaf
    (q.dequantize(torch.float32) * 3).sum().backward()
    assert type(q.grad) is Tensor
    assert q.grad.dtype == torch.float16
    assert torch.equal(q.grad, torch.full((4, 8), 3.0, dtype=torch.float16))


def test_gradient_of_a_chain_of_quantizers_is_the_identity() -> None:
    x = values(8, 8).requires_grad_()
    ROW.quantize(Q.replace(block=0).quantize(x)).dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones(8, 8))


def test_gradient_reaches_through_views_and_transposes() -> None:
    x = values(8, 12).requires_grad_()
    grad = values(12, 8, seed=1)
    Q.quantize(x).t().dequantize().backward(grad)
    assert torch.equal(x.grad, grad.t())
    x.grad = None
    Q.quantize(x)[4:8].dequantize().backward(grad[:4, :].repeat(1, 2)[:, :12])
    assert torch.equal(x.grad[4:8], grad[:4, :].repeat(1, 2)[:, :12])
    assert torch.equal(x.grad[:4], torch.zeros(4, 12))


@pytest.mark.parametrize(
    "expand",
    [
        pytest.param(lambda y: y.sum(), id="expanded"),
        pytest.param(lambda y: (y.t() * values(8, 4, seed=1)).sum(), id="transposed"),
    ],
)
def test_non_contiguous_gradient_is_taken(expand: Any) -> None:
    x = values(4, 8).requires_grad_()
    expand(Q.quantize(x).dequantize()).backward()
    plain = values(4, 8).requires_grad_()
    expand(plain * 1).backward()
    assert torch.equal(x.grad, plain.grad)


def test_no_grad_and_detached_input_give_no_graph() -> None:
    x = values(4, 8).requires_grad_()
    with torch.no_grad():
        assert not Q.quantize(x).requires_grad
    assert not Q.quantize(x.detach()).requires_grad
    q = quantized(4, 8).requires_grad_()
    with torch.no_grad():
        assert not q.dequantize().requires_grad
    assert q.dequantize().requires_grad


def test_requires_grad_flag_survives_detach_and_flatten() -> None:
    q = quantized(4, 8).requires_grad_()
    assert not q.detach().requires_grad
    assert q.detach().requires_grad_().requires_grad
    assert to_tensor_proto(q).requires_grad
    assert to_tensor_proto(q).create_tensor().requires_grad


def test_inference_mode_quantizes_views_and_dequantizes() -> None:
    with torch.inference_mode():
        q = quantized(8, 8)
        assert q.is_inference()
        out = q.t().dequantize()
    assert torch.equal(out, quantized(8, 8).t().dequantize())


def test_internal_quantizer_has_no_autograd() -> None:
    x = values(4, 8).requires_grad_()
    s = Q.replace(internal=True).quantize(x)
    assert type(s) is ToyStorage
    assert not any(t.requires_grad for t in s.inner_tensors().values())
    assert not s.dequantize().requires_grad


def test_quantized_tensor_is_saved_for_backward_by_an_autograd_function() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Any) -> Tensor:
            ctx.save_for_backward(w)
            return x * w.dequantize()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (w,) = ctx.saved_tensors
            assert type(w) is ToyTensor
            return grad * w.dequantize(), None

    x, w = values(4, 8).requires_grad_(), quantized(4, 8, seed=1)
    Scale.apply(x, w).sum().backward()
    assert torch.equal(x.grad, w.dequantize())


# -- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_optimizer_step_requantizes_the_parameter_and_keeps_plain_moments(optimizer: Any) -> None:
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    w = Parameter(quantized(8, 8))
    reference = Parameter(w.dequantize().detach().clone())
    at = pointers(w)
    ours, plain = optimizer([w], lr=0.1, **options), optimizer([reference], lr=0.1, **options)
    grad = values(8, 8, seed=1)
    w.grad, reference.grad = grad.clone(), grad.clone()
    with fallback("allow"):
        ours.step()
    plain.step()
    assert isinstance(w, ToyTensor)
    assert pointers(w) == at
    moments = [t for t in ours.state[w].values() if isinstance(t, Tensor) and t.dim()]
    assert moments
    assert all(type(t) is Tensor for t in moments)
    # AdamW writes the parameter twice, each write rounds to a code
    assert (w.dequantize() - reference).abs().max() <= reference.abs().max() / 127


# -- copies -------------------------------------------------------------------------------------


def test_deepcopy_has_memory_of_its_own_and_keeps_everything_else() -> None:
    q = quantized(8, 8, dtype=torch.float16).requires_grad_()
    q.grad = values(8, 8, seed=1).half()
    q.tag = {"name": ["w"]}
    out = copy.deepcopy(q)
    assert to_tensor_proto(out) == to_tensor_proto(q)
    assert out.is_leaf
    assert codes_of(out) == codes_of(q)
    assert not set(pointers(out)) & set(pointers(q))
    assert torch.equal(out.grad, q.grad)
    assert out.grad is not q.grad
    assert out.tag == q.tag
    assert out.tag["name"] is not q.tag["name"]


def test_deepcopy_of_a_module_keeps_parameters_and_ties() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Layer()
            self.b = Layer()
            self.b.weight = self.a.weight
            self.a.weight.note = "first"

    out = copy.deepcopy(Tied())
    assert out.a.weight is out.b.weight
    assert isinstance(out.a.weight, ToyTensor)
    assert isinstance(out.a.weight, Parameter)
    assert out.a.weight.requires_grad
    assert out.a.weight.note == "first"
    assert len(list(out.parameters())) == 3


def test_copy_shares_the_buffers_and_attributes() -> None:
    q = quantized(8, 8)
    q.tag = ["x"]
    out = copy.copy(q)
    assert pointers(out) == pointers(q)
    assert to_tensor_proto(out) == to_tensor_proto(q)
    assert out.tag is q.tag
    assert isinstance(copy.copy(Parameter(q)), Parameter)


# -- modules ------------------------------------------------------------------------------------


def test_parameter_is_a_quantized_leaf() -> None:
    layer = Layer()
    assert isinstance(layer.weight, ToyTensor)
    assert [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.weight.is_leaf
    assert layer.weight.requires_grad
    assert not Parameter(quantized(4, 8), requires_grad=False).requires_grad


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("meta"), lambda m: m.to(device="meta", dtype=torch.float32)],
    ids=["device", "device-and-dtype"],
)
def test_module_to_device_moves_every_inner_tensor(move: Any) -> None:
    layer = Layer()
    weight = layer.weight
    move(layer)
    assert layer.weight is weight  # an optimizer keeps its hold on it
    assert isinstance(layer.weight, ToyTensor)
    assert {str(t.device) for t in (weight, *weight.inner_tensors().values())} == {"meta"}
    assert weight.requires_grad


def test_module_to_dtype_changes_only_the_nominal_dtype() -> None:
    layer = Layer()
    before = codes_of(layer.weight)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert isinstance(layer.weight, ToyTensor)
    assert codes_of(layer.weight) == before


def test_state_dict_holds_the_quantized_tensor_under_the_modules_own_names() -> None:
    layer = Layer()
    state = layer.state_dict()
    assert list(state) == ["weight", "bias"]
    assert type(state["weight"]) is ToyTensor
    assert pointers(state["weight"]) == pointers(layer.weight)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: quantized(8, 8, seed=1), id="quantized"),
        pytest.param(lambda: values(8, 8, seed=1).bfloat16(), id="bfloat16"),
        pytest.param(lambda: quantized(8, 8, seed=1, quantizer=ROW), id="fewer-planes"),
        pytest.param(
            lambda: quantized(8, 8, seed=1, quantizer=Q.replace(rounding=Rounding.ZERO)),
            id="rounding",
        ),
    ],
)
def test_load_state_dict_keeps_the_memory_and_leaves_no_stale_plane(source: Any) -> None:
    layer, given = Layer(), source()
    at = pointers(layer.weight)
    layer.load_state_dict({"weight": given, "bias": values(8)})
    assert pointers(layer.weight) == at
    plain = given.dequantize() if isinstance(given, ToyTensor) else given
    same = isinstance(given, ToyTensor) and given.quantizer == Q
    assert codes_of(layer.weight) == codes_of(given if same else Q.quantize(plain.float()))


def test_load_state_dict_with_assign_takes_the_tensor() -> None:
    layer, given = Layer(), quantized(8, 8, seed=1)
    layer.load_state_dict({"weight": given, "bias": values(8)}, assign=True)
    assert pointers(layer.weight) == pointers(given)
    assert isinstance(layer.weight, Parameter)


def test_swap_tensors_swaps_everything() -> None:
    a, b = quantized(8, 8, seed=1), quantized(4, 8, quantizer=ROW, seed=2)
    want = [(to_tensor_proto(t), codes_of(t)) for t in (b, a)]
    torch.utils.swap_tensors(a, b)
    assert [(to_tensor_proto(t), codes_of(t)) for t in (a, b)] == want


# -- checkpoints --------------------------------------------------------------------------------

LOAD = """
q, s = torch.load("q.pt", weights_only=True)
assert type(q).__name__ == "ToyTensor" and type(s).__name__ == "ToyStorage"
print(q.dtype, q.requires_grad, isinstance(q, torch.nn.Parameter), q.quantizer.note, s.shape)
print([t.tolist() for t in q.inner_tensors().values()] == torch.load("codes.pt"))
"""


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import torch\nimport te_proto", id="core-after-torch"),
        pytest.param("import te_proto\nimport torch", id="core-before-torch"),
        pytest.param("import torch\nimport te_toy", id="plugin"),
    ],
)
def test_weights_only_load_needs_no_more_than_the_core(
    imports: str, fresh: Callable[..., str], tmp_path: Path
) -> None:
    q = Parameter(ROW.replace(note="saved").quantize(values(4, 8, dtype=torch.bfloat16)))
    torch.save([q, Q.replace(internal=True).quantize(values(4, 8))], tmp_path / "q.pt")
    torch.save(list(codes_of(q).values()), tmp_path / "codes.pt")
    assert fresh(f"{imports}\n{LOAD}") == (
        "torch.bfloat16 True True saved torch.Size([4, 8])\nTrue"
    )


def test_load_without_the_plugin_says_what_to_install(
    fresh: Callable[..., str], tmp_path: Path
) -> None:
    torch.save(quantized(4, 8), tmp_path / "q.pt")
    code = (
        "import sys, torch, te_proto\n"
        "sys.path = [p for p in sys.path if not p.endswith(('site', 'tests'))]\n"
        "try: torch.load('q.pt', weights_only=True)\n"
        "except Exception as e: print(e)"
    )
    assert (
        "no installed format provides the class 'te_toy:ToyTensor'; install it with: pip install te-toy"
    ) in fresh(code)


def test_state_dict_round_trip_through_a_file(tmp_path: Path) -> None:
    torch.save(Layer().state_dict(), tmp_path / "state.pt")
    other = Layer(seed=5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert codes_of(other.weight) == codes_of(Layer().weight)


# -- usages under torch -------------------------------------------------------------------------


def test_constructor_checks_the_layout() -> None:
    with pytest.raises(
        LayoutError, match=r"^toy: a tensor of shape \(8, 8\) needs the inner tensors"
    ):
        ToyTensor({}, Q, (8, 8), torch.float32)


def test_plane_cannot_be_dropped_in_place_inside_a_graph() -> None:
    def drop(x: Tensor) -> Tensor:
        q = Q.quantize(x)
        q.update_usage(columnwise=False)
        return q.dequantize()

    message = "toy: a compiled graph cannot see a plane dropped in place; use with_usage()"
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        torch.compile(drop, backend="aot_eager", fullgraph=True)(values(8, 8))
    assert "UsageError" in f"{type(caught.value)} {caught.value}" or isinstance(
        caught.value, UsageError
    )


# -- threads ------------------------------------------------------------------------------------


def test_first_calls_from_eight_threads_agree(fresh: Callable[..., str]) -> None:
    code = """
import threading
import torch, te_proto
torch.manual_seed(0)
x, found, barrier = torch.randn(64, 64), [], threading.Barrier(8)

def work():
    barrier.wait()
    from te_toy import ToyQuantizer, codes_of
    a = x.clone().requires_grad_()
    q = ToyQuantizer().quantize(a)
    q.dequantize().sum().backward()
    with te_proto.fallback("allow"):
        q.detach().abs()
    found.append((str(codes_of(q)), bool((a.grad == 1).all())))

threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
print(len(found), len(set(found)), found[0][1])
"""
    assert fresh(code) == "8 1 True"
