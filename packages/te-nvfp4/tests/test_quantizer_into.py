# SPDX-License-Identifier: Apache-2.0
"""``quantize_into``: the same bytes in memory that is there already, or nothing at all."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_nvfp4.quantizer import NVFP4Quantizer
from te_proto import TensorProto
from te_proto.errors import LayoutError
from te_proto.testing import hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Run = Callable[..., Any]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]


def pointers(tensor: QuantizedStorage) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.inner_tensors().values()]


@pytest.mark.parametrize("made_by", ["make_empty", "create_tensor", "quantize"])
def test_quantize_into_gives_the_bytes_of_quantize_and_keeps_the_memory(
    made_by: str, options: Options, run: Run, assert_same_planes: Same
) -> None:
    for fields, internal in itertools.product(options, (False, True)):
        quantizer = NVFP4Quantizer(**fields, internal=internal)
        x = hostile((96, 160), torch.bfloat16)
        if made_by == "make_empty":
            out = quantizer.make_empty(x.shape, dtype=x.dtype, device="cpu")
        elif made_by == "create_tensor":
            proto = TensorProto(shape=x.shape, dtype=x.dtype, quantizer=quantizer, device="cpu")
            out = proto.create_tensor()
        else:
            out = run(quantizer, hostile((96, 160), torch.bfloat16, seed=1))
        before = pointers(out)
        assert run(quantizer, x, out=out) is None
        assert pointers(out) == before
        assert_same_planes(out, run(quantizer, x))


@pytest.mark.parametrize(
    ("noop", "written"),
    [
        pytest.param(1.0, False, id="one"),
        pytest.param(0.0, True, id="zero"),
        pytest.param(2.0, True, id="two"),
        pytest.param(1.0 - 2**-24, True, id="one-ulp-below-one"),
        pytest.param(math.nan, True, id="nan"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "1-d"])
def test_noop_is_exactly_one(
    noop: float,
    written: bool,
    shape: tuple[int, ...],
    options: Options,
    run: Run,
    assert_same_planes: Same,
) -> None:
    for fields in options[::2]:
        quantizer = NVFP4Quantizer(**fields)
        old, new = hostile((64, 96), seed=1), hostile((64, 96), seed=2)
        out = run(quantizer, old)
        run(quantizer, new, out=out, noop=torch.full(shape, noop))
        assert_same_planes(out, run(quantizer, new if written else old))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"columnwise": False}, id="less-planes"),
        pytest.param({"optimize_for_gemm": True}, id="swizzled"),
        pytest.param({"with_2d_quantization": True}, id="2d"),
        pytest.param({"nvfp4_use_4over6": True}, id="4over6"),
    ],
)
def test_out_of_another_layout_is_refused_before_a_byte_is_written(
    fields: dict[str, Any], assert_same_planes: Same
) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    out = NVFP4Quantizer(**fields).quantize(x)
    before, quantizer = out.clone(), out.quantizer
    with pytest.raises(LayoutError) as raised:
        NVFP4Quantizer().quantize_into(2.5 * x, out)
    assert str(raised.value) == (
        f"nvfp4: out must be described by {NVFP4Quantizer()}, got {quantizer}; "
        "use its own quantizer, or quantize anew"
    )
    assert_same_planes(out, before)


def test_out_of_stochastic_rounding_is_written_with_a_new_draw(assert_same_planes: Same) -> None:
    q, x = NVFP4Quantizer(stochastic_rounding=True), torch.randn(64, 64)
    out = q.quantize(x, rng=torch.tensor([1, 2]))
    q.quantize_into(x, out, rng=torch.tensor([3, 4]))
    assert_same_planes(out, q.quantize(x, rng=torch.tensor([3, 4])))
    out.quantize_(x)  # a write that brings no draw rounds to nearest
    assert_same_planes(out, NVFP4Quantizer().quantize(x))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda x: x.to(torch.float16), id="other-dtype"),
        pytest.param(lambda x: x.t().contiguous().t(), id="strided"),
        pytest.param(lambda x: x.clone().requires_grad_(), id="requires-grad"),
        pytest.param(NVFP4Quantizer(columnwise=False).quantize, id="quantized"),
        pytest.param(NVFP4Quantizer(internal=True).quantize, id="storage"),
    ],
)
def test_quantize_into_takes_what_quantize_takes(
    source: Callable[[torch.Tensor], Any], assert_same_planes: Same
) -> None:
    x = source(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    out = NVFP4Quantizer().make_empty((64, 64), device="cpu")
    NVFP4Quantizer().quantize_into(x, out)
    assert (out.dtype, out.requires_grad) == (torch.float32, False)
    assert_same_planes(out, NVFP4Quantizer().quantize(x))
