# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_toy import ToyQuantizer, ToyTensor, values
from te_toy_ops import (
    plain_like,
)

from te_proto import custom_op
from te_proto.errors import LayoutError

Q = ToyQuantizer()
INTERNAL = Q.replace(internal=True)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_PROTO_CHECK", "1")


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
