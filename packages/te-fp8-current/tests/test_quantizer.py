# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_proto
from te_fp8_current import (
    FORMAT,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Storage,
    Float8Tensor,
)
from te_proto import TensorProto, to_tensor_proto
from te_proto.errors import DtypeError, QuantizerError, TeError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Options = list[dict[str, Any]]
    Known = Callable[[Any], dict[str, Any]]

Quantizer = Float8CurrentScalingQuantizer
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "scalar": (),
    "line": (7,),
    "matrix": (5, 9),
    "one-row": (1, 9),
    "one-column": (5, 1),
    "three-axes": (2, 3, 5),
    "four-axes": (2, 1, 3, 4),
    "no-rows": (0, 4),
    "no-columns": (4, 0),
    "no-rows-3d": (2, 0, 3),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    size: tuple[int, ...] = request.param
    return size


@pytest.fixture
def cases(options: Options) -> list[tuple[Quantizer, torch.dtype]]:
    """Every quantizer, each with one of the input dtypes in turn."""
    found = [Quantizer(**o, internal=i) for o in options for i in (False, True)]
    return list(zip(found, itertools.cycle(DTYPES), strict=False))


# -- the prototype and the real thing -------------------------------------------------------------


def test_prototype_is_the_result_in_every_fact(
    shape: tuple[int, ...],
    cases: list[tuple[Quantizer, torch.dtype]],
    known: Known,
    assert_same_planes: Same,
) -> None:
    for quantizer, dtype in cases:
        real = quantizer.quantize(hostile(shape, dtype))
        proto = TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device="cpu")
        assert known(real) == known(proto.create_tensor())
        assert to_tensor_proto(real) == proto
        held = {n: t.untyped_storage().nbytes() for n, t in real.inner_tensors().items()}
        assert proto.buffer_nbytes() == held
        assert proto.nbytes == real.nbytes == sum(held.values())
        names, context = real.__tensor_flatten__()
        assert (tuple(names), context) == (proto.inner_names(), proto.create_metadata())
        inner = {name: getattr(real, name) for name in names}
        again = type(real).__tensor_unflatten__(inner, context, real.shape, None)
        assert known(again) == known(real)
        assert_same_planes(again, real)


def test_meta_and_fake_results_are_the_result_without_its_data(
    shape: tuple[int, ...], cases: list[tuple[Quantizer, torch.dtype]], known: Known
) -> None:
    for quantizer, dtype in cases:
        proto = TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device="meta")
        meta = quantizer.quantize(torch.empty(shape, dtype=dtype, device="meta"))
        assert known(meta) == known(proto.create_tensor())
        plain = meta.dequantize()
        assert (plain.shape, plain.dtype, plain.device.type) == (shape, dtype, "meta")
        if not quantizer.internal:  # dispatch of fakes costs, and the storage has the same buffers
            with FakeTensorMode():
                fake = quantizer.quantize(torch.empty(shape, dtype=dtype))
                assert known(fake) == known(proto.replace(device="cpu").create_tensor())


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("internal", [False, True])
def test_eval_proto_predicts_a_round_trip_of_any_size(separate: bool, internal: bool) -> None:
    quantizer = Quantizer(separate_transpose=separate, internal=internal)
    x = TensorProto(shape=(2**20, 2**20), dtype=torch.float16, device="cpu")
    q, plain = te_proto.eval_proto(
        lambda t: (quantizer.quantize(t), quantizer.quantize(t).dequantize()), x
    )
    assert q == x.replace(quantizer=quantizer)
    assert q.nbytes == (2**41 if separate else 2**40) + 4
    assert plain == x


def test_no_byte_depends_on_what_memory_held(
    shape: tuple[int, ...],
    cases: list[tuple[Quantizer, torch.dtype]],
    request: pytest.FixtureRequest,
    assert_same_planes: Same,
) -> None:
    inputs = [(q, hostile(shape, dtype)) for q, dtype in cases]
    clean = [q.quantize(x) for q, x in inputs]
    request.getfixturevalue("poisoned")
    assert torch.empty(4, dtype=torch.uint8).tolist() == [0xFF] * 4
    for (quantizer, x), expected in zip(inputs, clean, strict=True):
        assert_same_planes(quantizer.quantize(x), expected)
        out = quantizer.make_empty(shape, dtype=x.dtype, device="cpu")
        quantizer.quantize_into(x, out)
        assert_same_planes(out, expected)
        assert_same_bits(out.dequantize(), expected.dequantize())


# -- quantize -------------------------------------------------------------------------------------


def test_both_usages_have_the_same_codes_and_scale(options: Options) -> None:
    x = hostile((6, 10))
    for fields in options:
        quantizer = Quantizer(**fields)
        q = quantizer.quantize(x)
        whole = quantizer.replace(rowwise=True, columnwise=True, separate_transpose=True).quantize(
            x
        )
        for name, buffer in q.inner_tensors().items():
            assert_same_bits(buffer, getattr(whole, name), what=name)
        assert_same_bits(q.dequantize(), whole.dequantize())
        assert_same_bits(whole.data_transpose, whole.fp8_data.t())


def test_expanded_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.tensor(3.5).expand(6, 4)  # the gradient of a sum
    q = Quantizer(separate_transpose=True).quantize(x)
    assert_same_planes(q, Quantizer(separate_transpose=True).quantize(x.clone()))
    assert q.fp8_data.unique().tolist() == [0x7E]
    assert q.fp8_scale_inv.tolist() == [3.5 / 448]  # 2**-7


def test_quantized_input_is_dequantized(assert_same_planes: Same) -> None:
    source = Quantizer(dtype="e5m2", columnwise=False).quantize(hostile((6, 4)))
    target = Quantizer(separate_transpose=True)
    assert_same_planes(target.quantize(source), target.quantize(source.dequantize()))


def test_gradient_passes_straight_through() -> None:
    x = hostile((6, 4), torch.float32).requires_grad_()
    weight = torch.randn(6, 4)
    q = Quantizer().quantize(x)
    assert isinstance(q, Float8Tensor)
    assert q.requires_grad
    (q.dequantize() * weight).sum().backward()
    assert_same_bits(x.grad, weight)


@pytest.mark.parametrize("shape", [(), (0, 4), (4, 0)], ids=str)
def test_gradient_has_the_shape_of_the_input(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    Quantizer(separate_transpose=True).quantize(x).dequantize().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_internal_result_is_a_storage_outside_autograd() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    q = Quantizer(internal=True).quantize(x)
    assert type(q) is Float8Storage
    assert not q.dequantize().requires_grad


@pytest.mark.parametrize(
    ("error", "fields", "x", "message"),
    [
        pytest.param(
            QuantizerError,
            {"dtype": "e2m1"},
            None,
            "fp8_current: option dtype must be one of e4m3, e5m2, got 'e2m1'",
            id="element",
        ),
        pytest.param(
            QuantizerError,
            {"force_pow_2_scales": 1},
            None,
            "fp8_current: option force_pow_2_scales must be a bool, got 1",
            id="flag",
        ),
        pytest.param(
            QuantizerError,
            {"amax_epsilon": -1.0},
            None,
            "fp8_current: option amax_epsilon must be from 0 to 3.4028234663852886e+38, got -1.0",
            id="negative-epsilon",
        ),
        pytest.param(
            QuantizerError,
            {"amax_epsilon": 1e39},
            None,
            "fp8_current: option amax_epsilon must be from 0 to 3.4028234663852886e+38, got 1e+39",
            id="epsilon-beyond-float32",
        ),
        pytest.param(
            QuantizerError,
            {"amax_epsilon": float("nan")},
            None,
            "fp8_current: option amax_epsilon must be a number, got nan",
            id="epsilon-nan",
        ),
        pytest.param(
            DtypeError,
            {},
            torch.ones(2, 2, dtype=torch.float64),
            "fp8_current: x must be one of float32, bfloat16, float16, got float64; cast it first",
            id="input-dtype",
        ),
        pytest.param(
            UsageError,
            {"rowwise": False, "columnwise": False},
            torch.ones(2, 2),
            "fp8_current: neither rowwise nor columnwise is on; turn one on with with_usage()",
            id="no-plane",
        ),
    ],
)
def test_mistake_is_named(
    error: type[TeError], fields: dict[str, Any], x: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(error) as raised:
        Quantizer(**fields).quantize(x)
    assert str(raised.value) == message


# -- values ---------------------------------------------------------------------------------------


def test_forward_and_backward_leave_the_quantizer_as_it_was(assert_same_planes: Same) -> None:
    quantizer = Quantizer(separate_transpose=True)
    before = quantizer.state()
    x = torch.randn(6, 4, requires_grad=True)
    first = quantizer.quantize(x)
    first.dequantize().sum().backward()
    with torch.no_grad():
        quantizer.quantize(x).update_usage(columnwise=False)
    assert quantizer.state() == before
    assert_same_planes(quantizer.quantize(x), first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.rowwise = False  # type: ignore[misc]


def test_threads_share_a_quantizer(assert_same_planes: Same) -> None:
    quantizer, x = Quantizer(separate_transpose=True), hostile((64, 96))
    expected, results = quantizer.quantize(x), []

    def work() -> None:
        for _ in range(4):
            leaf = x.float().requires_grad_()
            quantizer.quantize(leaf).dequantize().sum().backward()
            results.append((quantizer.quantize(x), leaf.grad))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 32  # an exception in a thread would leave fewer
    for q, grad in results:
        assert_same_planes(q, expected)
        assert grad.unique().tolist() == [1.0]


# -- the card and the recipe ----------------------------------------------------------------------


def test_card_names_the_classes() -> None:
    assert te_proto.describe("fp8_current") is FORMAT
    assert te_proto.get_quantizer("fp8_current") is Quantizer
    assert FORMAT.elements == ("e4m3", "e5m2")
    assert FORMAT.tensor == f"{Float8Tensor.__module__}:{Float8Tensor.__qualname__}"
    assert FORMAT.storage == f"{Float8Storage.__module__}:{Float8Storage.__qualname__}"


def test_recipe_is_hybrid_unless_told() -> None:
    recipe = te_proto.get_recipe("fp8_current")
    assert recipe == Float8CurrentScaling()
    assert recipe.name == "fp8_current"
    assert (recipe.input, recipe.weight) == (Quantizer(), Quantizer())
    assert recipe.grad_output == Quantizer(dtype="e5m2")
    assert Float8CurrentScaling(fp8_format="e4m3").grad_output == Quantizer()


def test_options_of_the_recipe_are_those_of_every_role() -> None:
    fields: dict[str, Any] = {
        "force_pow_2_scales": True,
        "amax_epsilon": 0.5,
        "separate_transpose": True,
    }
    recipe = Float8CurrentScaling(**fields)
    assert (recipe.input, recipe.weight) == (Quantizer(**fields), Quantizer(**fields))
    assert recipe.grad_output == Quantizer(dtype="e5m2", **fields)


def test_recipe_refuses_e5m2_alone() -> None:
    with pytest.raises(QuantizerError) as raised:
        Float8CurrentScaling(fp8_format="e5m2")
    assert str(raised.value) == ("fp8_current: fp8_format must be 'hybrid' or 'e4m3', got 'e5m2'")
