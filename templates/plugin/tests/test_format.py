# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
import torch

from te_example import ExampleQuantizer
from te_proto import TensorProto, get_recipe, to_tensor_proto
from te_proto.errors import QuantizerError, ShapeError
from te_proto.testing import assert_same_bits, count_compiles

USAGES = [flags for flags in itertools.product((True, False), repeat=2) if any(flags)]
SHAPES = [(5,), (3, 7), (2, 3, 4), (0, 4), (4, 0)]


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prototype_equals_the_real_tensor(
    shape: tuple[int, ...], rowwise: bool, columnwise: bool, internal: bool
) -> None:
    q = ExampleQuantizer(rowwise=rowwise, columnwise=columnwise, internal=internal)
    real = q.quantize(torch.randn(shape))
    proto = TensorProto(shape=shape, dtype=torch.float32, quantizer=q, device="cpu")
    assert to_tensor_proto(real) == proto
    made = proto.create_tensor()
    assert type(made) is type(real)
    for (name, a), (other, b) in zip(
        real.inner_tensors().items(), made.inner_tensors().items(), strict=True
    ):
        assert (name, a.shape, a.stride(), a.dtype) == (other, b.shape, b.stride(), b.dtype)


def test_bytes_of_a_row() -> None:
    x = torch.tensor([[-2.0, -1.0, 0.0, 0.5, 2.0]])
    t = ExampleQuantizer(columnwise=False).quantize(x)
    assert t.rowwise_data.tolist() == [[-127, -64, 0, 32, 127]]
    assert t.rowwise_scale_inv.item() == pytest.approx(2.0 / 127)


def test_error_is_half_a_step_at_most() -> None:
    x = torch.randn(16, 64)
    for plane, axis in (("rowwise", 1), ("columnwise", 0)):
        q = ExampleQuantizer(rowwise=plane == "rowwise", columnwise=plane == "columnwise")
        step = x.abs().amax(axis, keepdim=True) / 127
        assert ((q.quantize(x).dequantize() - x).abs() <= 0.501 * step).all()


def test_zeros_stay_zero() -> None:
    assert_same_bits(ExampleQuantizer().quantize(torch.zeros(3, 4)).dequantize(), torch.zeros(3, 4))


def test_compiles_to_one_graph() -> None:
    q = ExampleQuantizer()
    with count_compiles() as counted:
        compiled = torch.compile(
            lambda x: q.quantize(x).dequantize(), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for m in (32, 64, 96, 160):
            x = torch.randn(m, 64)
            assert_same_bits(compiled(x), q.quantize(x).dequantize())
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(QuantizerError, match=r"^example: option bits must be 2 to 8, got 9$"):
        ExampleQuantizer(bits=9)
    with pytest.raises(ShapeError, match=r"^example: x must have at least one axis, got a 0-d"):
        ExampleQuantizer().quantize(torch.ones(()))


def test_recipe_is_found_by_name() -> None:
    assert get_recipe("example").weight == ExampleQuantizer()
