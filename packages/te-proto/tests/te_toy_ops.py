# SPDX-License-Identifier: Apache-2.0
"""Custom ops over the toy format, one for each form, and how they are compared."""

from __future__ import annotations

from typing import Any

import torch
from te_toy import ToyQuantizer, values
from torch import Tensor

from te_proto import QuantizedStorage, TensorProto, custom_op, to_tensor_proto

Q = ToyQuantizer()
INTERNAL = Q.replace(internal=True)


def plain_like(p: TensorProto, **changes: Any) -> TensorProto:
    return p.replace(**{"quantizer": None, "requires_grad": False} | changes)


# -- ops ---------------------------------------------------------------------


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
    for x, y in zip(buffers_of(a), buffers_of(b), strict=True):
        assert x.stride() == y.stride()
        assert torch.equal(x, y)


def buffers_of(t: Any) -> list[Tensor]:
    return list(t.inner_tensors().values()) if isinstance(t, QuantizedStorage) else [t]
