# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_toy import (
    ToyQuantizer,
    ToyStorage,
    ToyTensor,
    codes_of,
    pointers,
    quantized,
    values,
)
from torch import Tensor

from te_proto import to_tensor_proto
from te_proto.errors import DtypeError, LayoutError, ShapeError, UsageError

Q = ToyQuantizer()
ROW = Q.with_usage(columnwise=False)


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
import os, threading
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
print(len(found), len(set(found)), found[0][1], flush=True)
os._exit(0)  # torch 2.12 itself may abort at exit, after backward in several threads
"""
    assert fresh(code) == "8 1 True"


def test_with_usage_passes_the_gradient_straight_through() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    q = ToyQuantizer().quantize(x).with_usage(columnwise=False)
    assert q.requires_grad
    (q.dequantize() * 3.0).sum().backward()
    assert x.grad.unique().tolist() == [3.0]
    with torch.no_grad():
        assert not ToyQuantizer().quantize(x).with_usage(columnwise=False).requires_grad


def test_a_tensor_without_planes_keeps_its_device() -> None:
    for internal in (False, True):
        held = ToyQuantizer(internal=internal).make_empty((8, 8), device="meta")
        assert held.with_usage(rowwise=False, columnwise=False).device == torch.device("meta")


def test_module_half_is_refused_and_module_to_changes_the_nominal_dtype() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(ToyQuantizer().quantize(torch.ones(8, 8)))
    message = (
        "toy: data must be set to a tensor of torch.float32 on cpu, got torch.float16 on cpu; "
        "use .to() on the tensor"
    )
    with pytest.raises(DtypeError, match=f"^{re.escape(message)}$"):
        module.half()
    assert type(module.weight) is type(module.to(torch.float16).weight)
    assert module.weight.dtype == torch.float16
