# SPDX-License-Identifier: Apache-2.0
"""``quantize_into``: the same bytes in memory that is there already, or nothing at all."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_proto import TensorProto
from te_proto.errors import LayoutError, ShapeError
from te_proto.testing import hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]


def pointers(tensor: QuantizedStorage) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.inner_tensors().values()]


@pytest.mark.parametrize("made_by", ["make_empty", "create_tensor", "quantize"])
def test_quantize_into_gives_the_bytes_of_quantize_and_keeps_the_memory(
    made_by: str, options: Options, assert_same_planes: Same
) -> None:
    for fields, internal in itertools.product(options, (False, True)):
        quantizer = Quantizer(**fields, internal=internal)
        x = hostile((2, 3, 5), torch.bfloat16)
        if made_by == "make_empty":
            out = quantizer.make_empty(x.shape, dtype=x.dtype, device="cpu")
        elif made_by == "create_tensor":
            proto = TensorProto(shape=x.shape, dtype=x.dtype, quantizer=quantizer, device="cpu")
            out = proto.create_tensor()
        else:
            out = quantizer.quantize(hostile((2, 3, 5), torch.bfloat16, seed=1))
        before = pointers(out)
        assert quantizer.quantize_into(x, out) is None
        assert pointers(out) == before
        assert_same_planes(out, quantizer.quantize(x))


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
    noop: float, written: bool, shape: tuple[int, ...], options: Options, assert_same_planes: Same
) -> None:
    for fields in options:
        quantizer = Quantizer(**fields)
        old, new = hostile((6, 10), seed=1), 2.0 * hostile((6, 10), seed=2)
        out = quantizer.quantize(old)
        quantizer.quantize_into(new, out, torch.full(shape, noop))
        assert_same_planes(out, quantizer.quantize(new if written else old))


@pytest.mark.parametrize("shape", [(), (0, 4), (4, 0)], ids=str)
def test_scalars_and_empty_tensors_have_a_scale_to_write(
    shape: tuple[int, ...], assert_same_planes: Same
) -> None:
    quantizer = Quantizer(separate_transpose=True)
    out = quantizer.make_empty(shape, device="cpu")
    out.fp8_scale_inv.fill_(7.0)
    quantizer.quantize_into(torch.zeros(shape), out, torch.ones(()))
    assert out.fp8_scale_inv.tolist() == [7.0]
    quantizer.quantize_into(torch.zeros(shape), out)
    assert out.fp8_scale_inv.tolist() == [1.0]
    assert_same_planes(out, quantizer.quantize(torch.zeros(shape)))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"separate_transpose": True}, id="transpose"),
        pytest.param({"force_pow_2_scales": True}, id="scale"),
        pytest.param({"dtype": "e5m2"}, id="element"),
        pytest.param({"columnwise": False}, id="usage"),
    ],
)
def test_out_of_another_quantizer_is_refused_before_a_byte_is_written(
    fields: dict[str, Any], assert_same_planes: Same
) -> None:
    out = Quantizer(**fields).quantize(torch.ones(4, 6))
    before, quantizer = out.clone(), out.quantizer
    with pytest.raises(LayoutError) as raised:
        Quantizer().quantize_into(torch.zeros(4, 6), out)
    assert str(raised.value) == (
        f"fp8_current: out must be described by {Quantizer()}, got {quantizer}; "
        "use its own quantizer, or quantize anew"
    )
    assert_same_planes(out, before)


def test_out_of_another_shape_is_refused_though_its_bytes_are_as_many(
    assert_same_planes: Same,
) -> None:
    out = Quantizer().quantize(torch.ones(2, 3, 4))
    before = out.clone()
    message = r"^fp8_current: out must have the shape of x, \(6, 4\), got \(2, 3, 4\)$"
    with pytest.raises(ShapeError, match=message):
        Quantizer().quantize_into(torch.zeros(6, 4), out)
    assert_same_planes(out, before)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda x: x.to(torch.float16), id="other-dtype"),
        pytest.param(lambda x: x.t().contiguous().t(), id="strided"),
        pytest.param(lambda x: x.clone().requires_grad_(), id="requires-grad"),
        pytest.param(Quantizer(dtype="e5m2", columnwise=False).quantize, id="quantized"),
        pytest.param(Quantizer(internal=True).quantize, id="storage"),
    ],
)
def test_quantize_into_takes_what_quantize_takes(
    source: Callable[[torch.Tensor], Any], assert_same_planes: Same
) -> None:
    x = source(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    quantizer = Quantizer(separate_transpose=True)
    out = quantizer.make_empty((6, 4), device="cpu")
    quantizer.quantize_into(x, out)
    assert (out.dtype, out.requires_grad) == (torch.float32, False)
    assert_same_planes(out, quantizer.quantize(x))
