# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_toy import (
    ToyQuantizer,
    ToyTensor,
    codes_of,
    pointers,
    quantized,
    values,
)
from torch import Tensor
from torch.nn import Parameter

import te_proto.tensor
from te_proto import fallback
from te_proto.errors import FallbackError
from te_proto.tensor import FallbackWarning

Q = ToyQuantizer()


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
            out = [q + 1, q + 2]
        assert [str(w.message) for w in caught] == [message]
        assert [type(t) for t in out] == [Tensor, Tensor]
        assert torch.equal(out[1], q.dequantize() + 2)
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
    with fallback("allow"):
        with fallback("error"), pytest.raises(FallbackError):
            q.abs()
        q.abs()  # allowed again
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
