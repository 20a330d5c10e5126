# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_proto
from te_nvfp4.quantizer import NVFP4Quantizer
from te_nvfp4.tensor import NVFP4Storage, NVFP4Tensor
from te_proto import TensorProto, to_tensor_proto
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Options = list[dict[str, Any]]
    Dtypes = Callable[[dict[str, Any]], tuple[torch.dtype, ...]]
    Run = Callable[..., Any]
    Known = Callable[[Any], dict[str, Any]]
    Cases = list[tuple[NVFP4Quantizer, torch.dtype]]

RHT = {"with_rht": True, "with_post_rht_amax": True}
SHAPES = {
    "one-block": (32, 32),
    "ragged-tiles": (160, 288),
    "rows-only-in-product": (2, 4, 8, 64),
    "no-rows": (0, 64),
    "no-columns": (64, 0),
    "no-rows-3d": (0, 0, 32),
    "five-rows": (5, 64),
    "line": (96,),
    "five-columns": (64, 5),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    size: tuple[int, ...] = request.param
    return size


@pytest.fixture
def quantizers(shape: tuple[int, ...], options: Options, dtypes: Dtypes) -> Cases:
    """Every quantizer that can hold ``shape``, each with one of its input dtypes in turn."""
    m, k = math.prod(shape[:-1]), shape[-1]
    found: Cases = []
    for turn, (fields, internal) in enumerate(itertools.product(options, (False, True))):
        q = NVFP4Quantizer(**fields, internal=internal)
        if m % q.alignment()[0] == 0 and k % q.alignment()[1] == 0:
            takes = dtypes(fields)
            found.append((q, takes[turn % len(takes)]))
    assert found
    return found


# -- the prototype and the real thing -------------------------------------------------------------


def test_prototype_is_the_result_in_every_fact(
    shape: tuple[int, ...], quantizers: Cases, run: Run, known: Known, assert_same_planes: Same
) -> None:
    for quantizer, dtype in quantizers:
        real = run(quantizer, hostile(shape, dtype))
        proto = TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device="cpu")
        assert known(real) == known(proto.create_tensor())
        assert to_tensor_proto(real) == proto.at_rest()
        specs = proto.inner_specs()
        assert [(n, s.shape, s.dtype) for n, s in specs.items()] == [
            (n, tuple(t.shape), t.dtype) for n, t in real.inner_tensors().items()
        ]
        held = {n: t.nbytes for n, t in real.inner_tensors().items()}
        assert proto.buffer_nbytes() == held
        assert proto.nbytes == real.nbytes == sum(held.values())
        names, context = real.__tensor_flatten__()
        assert (tuple(names), context) == (proto.inner_names(), proto.create_metadata())
        inner = {name: getattr(real, name) for name in names}
        again = type(real).__tensor_unflatten__(inner, context, real.shape, None)
        assert known(again) == known(real)
        assert_same_planes(again, real)


def test_meta_and_fake_results_are_the_result_without_its_data(
    shape: tuple[int, ...], quantizers: Cases, run: Run, known: Known
) -> None:
    for quantizer, dtype in quantizers:
        proto = TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device="meta")
        if not quantizer.stochastic_rounding:  # a seed on meta is no number
            meta = quantizer.quantize(torch.empty(shape, dtype=dtype, device="meta"))
            assert known(meta) == known(proto.create_tensor())
            plain = meta.dequantize()
            assert (plain.shape, plain.dtype, plain.device.type) == (shape, dtype, "meta")
        if not quantizer.internal:  # dispatch of fakes costs, and the storage has the same buffers
            with FakeTensorMode():
                fake = run(quantizer, torch.empty(shape, dtype=dtype))
                assert known(fake) == known(proto.replace(device="cpu").create_tensor())


@pytest.mark.parametrize("internal", [False, True])
def test_eval_proto_predicts_a_round_trip(internal: bool, run: Run) -> None:
    for fields in ({}, RHT, {"stochastic_rounding": True}, {"row_scaled_nvfp4": True}):
        quantizer = NVFP4Quantizer(**fields, internal=internal)
        x = TensorProto(shape=(4, 32, 64), dtype=torch.bfloat16, device="cpu")

        def there_and_back(t: Any, quantizer: NVFP4Quantizer = quantizer) -> tuple[Any, Any]:
            q = run(quantizer, t)
            return q, q.dequantize()

        q, plain = te_proto.eval_proto(there_and_back, x)
        assert q == x.replace(quantizer=quantizer).at_rest()
        assert plain == x


def test_no_byte_depends_on_what_memory_held(
    shape: tuple[int, ...],
    quantizers: Cases,
    request: pytest.FixtureRequest,
    run: Run,
    assert_same_planes: Same,
) -> None:
    cases = [(q, hostile(shape, dtype)) for q, dtype in quantizers[::3]]
    clean = [run(q, x) for q, x in cases]
    request.getfixturevalue("poisoned")
    assert torch.empty(4, dtype=torch.uint8).tolist() == [0xFF] * 4
    for (quantizer, x), expected in zip(cases, clean, strict=True):
        assert_same_planes(run(quantizer, x), expected)
        out = quantizer.make_empty(shape, dtype=x.dtype, device="cpu")
        run(quantizer, x, out=out)
        assert_same_planes(out, expected)
        assert_same_bits(out.dequantize(), expected.dequantize())


# -- quantize -------------------------------------------------------------------------------------


def test_expanded_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.tensor(3.25).expand(64, 64)  # the gradient of a sum
    q = NVFP4Quantizer().quantize(x)
    assert_same_planes(q, NVFP4Quantizer().quantize(x.clone()))
    assert q.rowwise_data.unique().tolist() == [0x77]
    assert q.rowwise_scale_inv[:64, :4].unique().tolist() == [0x7E]
    assert q.amax_rowwise.tolist() == [3.25]


def test_channels_last_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.randn(2, 4, 8, 32).to(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    q = NVFP4Quantizer().quantize(x)
    assert q.stride() == (1024, 256, 32, 1)
    assert_same_planes(q, NVFP4Quantizer().quantize(x.contiguous()))


def test_quantized_input_is_dequantized(assert_same_planes: Same) -> None:
    source = NVFP4Quantizer(columnwise=False).quantize(hostile((64, 64)))
    target = NVFP4Quantizer(optimize_for_gemm=True)
    assert_same_planes(target.quantize(source), target.quantize(source.dequantize()))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0, 32)], ids=str)
def test_gradient_of_an_empty_tensor_has_its_shape(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    NVFP4Quantizer().quantize(x).dequantize().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_gradient_passes_straight_through() -> None:
    x = hostile((64, 64), torch.float32).requires_grad_()
    weight = torch.randn(64, 64)
    q = NVFP4Quantizer().quantize(x)
    assert isinstance(q, NVFP4Tensor)
    assert q.requires_grad
    (q.dequantize() * weight).sum().backward()
    assert_same_bits(x.grad, weight)


def test_internal_result_is_a_storage_outside_autograd() -> None:
    x = torch.ones(32, 32, requires_grad=True)
    q = NVFP4Quantizer(internal=True).quantize(x)
    assert type(q) is NVFP4Storage
    assert not q.dequantize().requires_grad


# -- values ---------------------------------------------------------------------------------------


def test_equal_options_are_equal_values_however_they_were_written() -> None:
    assert NVFP4Quantizer(nvfp4_e4m3_max=256) == NVFP4Quantizer()
    assert NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448
    chooses = NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="mse")
    assert (chooses.nvfp4_e4m3_max, chooses.nvfp4_4over6_err_mode) == (256, "MSE")
    assert chooses == chooses.replace(nvfp4_4over6_err_mode="Mse")
    assert NVFP4Quantizer.from_state(chooses.state()) == chooses


def test_same_seed_same_bytes_and_each_other_seed_others(
    assert_same_planes: Same,
) -> None:
    q, x = NVFP4Quantizer(stochastic_rounding=True), torch.randn(64, 64)
    made = [q.quantize(x, rng=torch.tensor(rng)) for rng in ([1, 0], [1, 0], [2, 0], [1, 1])]
    assert_same_planes(made[0], made[1])
    for other in made[2:]:
        for plane in ("rowwise_data", "columnwise_data"):
            assert not torch.equal(getattr(made[0], plane), getattr(other, plane))
        for scale in ("rowwise_scale_inv", "columnwise_scale_inv", "amax_rowwise"):
            assert_same_bits(getattr(made[0], scale), getattr(other, scale))


def test_dropped_plane_does_not_change_the_draws_of_the_other(assert_same_planes: Same) -> None:
    q, x = NVFP4Quantizer(stochastic_rounding=True), torch.randn(64, 64)
    rng = torch.tensor([3, 4])
    both = q.quantize(x, rng=rng)
    for usage in ({"rowwise": False}, {"columnwise": False}):
        assert_same_planes(q.with_usage(**usage).quantize(x, rng=rng), both.with_usage(**usage))


def test_forward_and_backward_leave_the_quantizer_as_it_was(assert_same_planes: Same) -> None:
    quantizer = NVFP4Quantizer()
    before = quantizer.state()
    x = torch.randn(64, 64, requires_grad=True)
    first = quantizer.quantize(x)
    first.dequantize().sum().backward()
    with torch.no_grad():
        quantizer.quantize(x).update_usage(columnwise=False)
    assert quantizer.state() == before
    assert_same_planes(quantizer.quantize(x), first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.rowwise = False  # type: ignore[misc]


def test_threads_share_a_quantizer(run: Run, assert_same_planes: Same) -> None:
    quantizer, x = NVFP4Quantizer(stochastic_rounding=True), hostile((64, 96))
    expected, results = run(quantizer, x), []

    def work() -> None:
        for _ in range(4):
            leaf = x.float().requires_grad_()
            run(quantizer, leaf).dequantize().sum().backward()
            results.append((run(quantizer, x), leaf.grad))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 32  # an exception in a thread would leave fewer
    for q, grad in results:
        assert_same_planes(q, expected)
        assert grad.unique().tolist() == [1.0]
