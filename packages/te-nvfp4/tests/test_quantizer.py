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
from te_proto.errors import DtypeError, QuantizerError, TeError, UsageError
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


# -- what is refused ------------------------------------------------------------------------------

REFUSED = [
    pytest.param({"dtype": "e4m3"}, "option dtype must be one of e2m1, got 'e4m3'", id="element"),
    pytest.param({"with_rht": 1}, "option with_rht must be a bool, got 1", id="flag"),
    pytest.param(
        {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 300},
        "option nvfp4_e4m3_max must be one of 256, 448, got 300",
        id="e4m3-max",
    ),
    pytest.param(
        {"nvfp4_e4m3_max": 300},
        "option nvfp4_e4m3_max must be one of 256, 448, got 300",
        id="e4m3-max-unused",
    ),
    pytest.param(
        {"nvfp4_4over6_err_mode": "max"},
        "option nvfp4_4over6_err_mode must be one of MAE, MSE, got 'MAX'",
        id="error-mode",
    ),
    pytest.param(
        {"with_rht": True},
        "option with_rht needs with_post_rht_amax=True, as blocks are scaled by the transformed "
        "amax, got True; set both",
        id="rht-without-its-amax",
    ),
    pytest.param(
        {"nvfp4_use_4over6": True, **RHT},
        "option nvfp4_use_4over6 cannot go with with_rht=True, as no kernel chooses the scale of a "
        "transformed block, got True; turn one of them off",
        id="4over6-rht",
    ),
    pytest.param(
        {"nvfp4_use_4over6": True, "stochastic_rounding": True},
        "option nvfp4_use_4over6 cannot go with stochastic_rounding=True, as the choice is by the "
        "error of codes rounded to nearest, got True; turn one of them off",
        id="4over6-sr",
    ),
    pytest.param(
        {"nvfp4_use_4over6": True, "optimize_for_gemm": True},
        "option nvfp4_use_4over6 cannot go with optimize_for_gemm=True, as its kernel writes "
        "compact scales alone, got True; turn one of them off",
        id="4over6-swizzled",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, **RHT},
        "option row_scaled_nvfp4 cannot go with with_rht=True, as rows are scaled as they are, got "
        "True; turn one of them off",
        id="row-scaled-rht",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, "with_2d_quantization": True},
        "option row_scaled_nvfp4 cannot go with with_2d_quantization=True, as a block of 16 rows "
        "would have 16 amaxes, got True; turn one of them off",
        id="row-scaled-2d",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, "stochastic_rounding": True},
        "option row_scaled_nvfp4 cannot go with stochastic_rounding=True, as its kernel rounds to "
        "nearest alone, got True; turn one of them off",
        id="row-scaled-sr",
    ),
    pytest.param(
        {"row_scaled_nvfp4": True, "with_amax_reduction": True},
        "option row_scaled_nvfp4 cannot go with with_amax_reduction=True, as ranks hold different "
        "rows, got True; turn one of them off",
        id="row-scaled-reduction",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_option_that_no_kernel_has_is_refused_when_it_is_built(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantizerError) as raised:
        NVFP4Quantizer(**fields)
    assert str(raised.value) == f"nvfp4: {message}"
    base = NVFP4Quantizer()
    with pytest.raises(QuantizerError):
        base.replace(**fields)


BF16 = torch.ones(32, 32, dtype=torch.bfloat16)
CALLS = [
    pytest.param(
        DtypeError,
        {},
        torch.ones(32, 32, dtype=torch.float64),
        "x must be one of float32, bfloat16, float16, got float64; cast it first",
        id="input-dtype",
    ),
    pytest.param(
        DtypeError,
        {**RHT, "columnwise": False},
        BF16.float(),
        "x must be bfloat16 for with_rht, got float32; cast it first, or turn that option off",
        id="rht-of-float32",
    ),
    pytest.param(
        DtypeError,
        {"row_scaled_nvfp4": True},
        BF16.half(),
        "x must be bfloat16 for row_scaled_nvfp4 of both planes, got float16; cast it first, or "
        "turn that option off",
        id="row-scaled-columns-of-float16",
    ),
    pytest.param(
        UsageError,
        {"rowwise": False, "columnwise": False},
        BF16,
        "neither rowwise nor columnwise is on; turn one on with with_usage()",
        id="no-plane",
    ),
    pytest.param(
        UsageError,
        {"row_scaled_nvfp4": True, "rowwise": False},
        BF16,
        "row_scaled_nvfp4 must be quantized with the rowwise usage on, got columnwise; turn it on "
        "with with_usage()",
        id="row-scaled-columnwise",
    ),
    pytest.param(
        UsageError,
        {"row_scaled_nvfp4": True, "nvfp4_use_4over6": True},
        BF16,
        "row_scaled_nvfp4 with nvfp4_use_4over6 must be quantized with the columnwise usage off, "
        "got rowwise+columnwise; turn it off with with_usage()",
        id="row-scaled-4over6-columnwise",
    ),
    pytest.param(
        UsageError,
        {"nvfp4_use_4over6": True, "with_2d_quantization": True, "rowwise": False},
        BF16,
        "nvfp4_use_4over6 with with_2d_quantization must be quantized with the rowwise usage on, "
        "got columnwise; turn it on with with_usage()",
        id="4over6-2d-columnwise",
    ),
]


@pytest.mark.parametrize(("error", "fields", "x", "message"), CALLS)
@pytest.mark.parametrize("into", [False, True], ids=["quantize", "quantize_into"])
def test_call_that_no_kernel_has_is_refused(
    error: type[TeError], fields: dict[str, Any], x: torch.Tensor, message: str, into: bool
) -> None:
    q = NVFP4Quantizer(**fields)
    out = q.make_empty((32, 32), device="cpu") if into else None
    with pytest.raises(error) as raised:
        q.quantize(x) if out is None else q.quantize_into(x, out)
    assert str(raised.value) == f"nvfp4: {message}"


@pytest.mark.parametrize(
    ("rng", "given"),
    [
        pytest.param(torch.tensor([1, 2, 3]), "int64 of shape (3,) on cpu", id="shape"),
        pytest.param(torch.tensor([1.0, 2.0]), "float32 of shape (2,) on cpu", id="dtype"),
        pytest.param(
            torch.zeros(2, dtype=torch.int64, device="meta"),
            "int64 of shape (2,) on meta",
            id="device",
        ),
    ],
)
def test_seed_and_offset_are_two_int64_beside_the_input(rng: torch.Tensor, given: str) -> None:
    q = NVFP4Quantizer(stochastic_rounding=True)
    message = f"nvfp4: rng must be int64 of shape (2,), seed and offset, on cpu, got {given}"
    with pytest.raises(UsageError) as raised:
        q.quantize(BF16, rng=rng)
    assert str(raised.value) == message
    with pytest.raises(UsageError) as raised:
        q.quantize_into(BF16, q.make_empty((32, 32), device="cpu"), rng=rng)
    assert str(raised.value) == message


def test_seed_is_asked_for_by_stochastic_rounding_alone() -> None:
    q = NVFP4Quantizer(stochastic_rounding=True)
    with pytest.raises(UsageError) as raised:
        q.quantize(BF16)
    assert str(raised.value) == f"nvfp4: {q} needs rng with the call, got None"
    rng = torch.tensor([1, 2])
    with pytest.raises(UsageError) as raised:
        NVFP4Quantizer().quantize(BF16, rng=rng)
    assert str(raised.value) == f"nvfp4: {NVFP4Quantizer()} takes no rng with the call, got {rng}"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        pytest.param({}, (), id="none"),
        pytest.param({"stochastic_rounding": True}, ("rng",), id="rng"),
        pytest.param({"with_amax_reduction": True}, ("group",), id="group"),
        pytest.param(
            {"with_amax_reduction": True, "stochastic_rounding": True}, ("group", "rng"), id="both"
        ),
    ],
)
def test_call_arguments_stay_with_the_call(fields: dict[str, bool], names: tuple[str, ...]) -> None:
    q = NVFP4Quantizer(**fields)
    assert q.call_arguments() == names
    assert q.at_rest() == NVFP4Quantizer()
    assert q.at_rest().call_arguments() == ()


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
