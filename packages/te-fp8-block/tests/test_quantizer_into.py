# SPDX-License-Identifier: Apache-2.0
"""``quantize_into``: the same bytes in memory that is there already, or nothing at all."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_fp8_block.quantizer import Float8BlockQuantizer
from te_proto import TensorProto
from te_proto.errors import DeviceError, DtypeError, LayoutError, ShapeError, TeError
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
        quantizer = Float8BlockQuantizer(**fields, internal=internal)
        x = hostile((96, 160), torch.bfloat16)
        if made_by == "make_empty":
            out = quantizer.make_empty(x.shape, dtype=x.dtype, device="cpu")
        elif made_by == "create_tensor":
            proto = TensorProto(shape=x.shape, dtype=x.dtype, quantizer=quantizer, device="cpu")
            out = proto.create_tensor()
        else:
            out = quantizer.quantize(hostile((96, 160), torch.bfloat16, seed=1))
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
        quantizer = Float8BlockQuantizer(**fields)
        old, new = hostile((64, 96), seed=1), hostile((64, 96), seed=2)
        out = quantizer.quantize(old)
        quantizer.quantize_into(new, out, torch.full(shape, noop))
        assert_same_planes(out, quantizer.quantize(new if written else old))


@pytest.mark.parametrize(
    ("error", "noop", "message"),
    [
        pytest.param(
            DtypeError,
            torch.ones((), dtype=torch.float64),
            "got torch.float64 of shape () on cpu",
            id="dtype",
        ),
        pytest.param(
            DeviceError, torch.ones(2), "got torch.float32 of shape (2,) on cpu", id="size"
        ),
        pytest.param(
            DeviceError,
            torch.ones((), device="meta"),
            "got torch.float32 of shape () on meta",
            id="device",
        ),
    ],
)
def test_wrong_noop_is_refused_before_a_byte_is_written(
    error: type[TeError], noop: torch.Tensor, message: str, assert_same_planes: Same
) -> None:
    out = Float8BlockQuantizer().quantize(torch.ones(32, 32))
    before = out.clone()
    with pytest.raises(error) as raised:
        Float8BlockQuantizer().quantize_into(torch.zeros(32, 32), out, noop)
    assert str(raised.value) == f"fp8_block: noop must be one float32 element on cpu, {message}"
    assert_same_planes(out, before)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"columnwise": False}, id="less-planes"),
        pytest.param({"block_scaling_dim": 1}, id="block"),
        pytest.param({"dtype": "e5m2"}, id="element"),
    ],
)
@pytest.mark.parametrize("noop", [None, torch.ones(())], ids=["write", "noop"])
def test_out_of_another_layout_is_refused_before_a_byte_is_written(
    fields: dict[str, Any], noop: torch.Tensor | None, assert_same_planes: Same
) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    out = Float8BlockQuantizer(**fields).quantize(x)
    before, quantizer = out.clone(), out.quantizer
    with pytest.raises(LayoutError) as raised:
        Float8BlockQuantizer().quantize_into(2.5 * x, out, noop)
    assert str(raised.value) == (
        f"fp8_block: out must be described by {Float8BlockQuantizer()}, got {quantizer}; "
        "use its own quantizer, or quantize anew"
    )
    assert out.quantizer == quantizer
    assert_same_planes(out, before)


def test_out_of_another_shape_is_refused_though_its_bytes_are_as_many(
    assert_same_planes: Same,
) -> None:
    out = Float8BlockQuantizer().quantize(torch.ones(2, 32, 64))
    before = out.clone()
    message = r"^fp8_block: out must have the shape of x, \(64, 64\), got \(2, 32, 64\)$"
    with pytest.raises(ShapeError, match=message):
        Float8BlockQuantizer().quantize_into(torch.zeros(64, 64), out)
    assert_same_planes(out, before)


def test_plain_out_is_refused() -> None:
    out = torch.ones(32, 32)
    with pytest.raises(LayoutError) as raised:
        Float8BlockQuantizer().quantize_into(torch.zeros(32, 32), out)  # type: ignore[arg-type]
    assert str(raised.value) == (
        f"fp8_block: out must be described by {Float8BlockQuantizer()}, got Tensor; "
        "use its own quantizer, or quantize anew"
    )
    assert out.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda x: x.to(torch.float16), id="other-dtype"),
        pytest.param(lambda x: x.t().contiguous().t(), id="strided"),
        pytest.param(lambda x: x.clone().requires_grad_(), id="requires-grad"),
        pytest.param(Float8BlockQuantizer(dtype="e5m2", columnwise=False).quantize, id="quantized"),
        pytest.param(Float8BlockQuantizer(internal=True).quantize, id="storage"),
    ],
)
def test_quantize_into_takes_what_quantize_takes(
    source: Callable[[torch.Tensor], Any], assert_same_planes: Same
) -> None:
    x = source(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    out = Float8BlockQuantizer().make_empty((64, 64), device="cpu")
    Float8BlockQuantizer().quantize_into(x, out)
    assert (out.dtype, out.requires_grad) == (torch.float32, False)
    assert_same_planes(out, Float8BlockQuantizer().quantize(x))
