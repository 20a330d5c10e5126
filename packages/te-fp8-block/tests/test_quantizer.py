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
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor
from te_proto import TensorProto, to_tensor_proto
from te_proto.errors import DtypeError, QuantizerError, TeError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Options = list[dict[str, Any]]
    Cases = list[tuple[Float8BlockQuantizer, torch.dtype]]
    Known = Callable[[Any], dict[str, Any]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "scalar": (),
    "line": (311,),
    "one-row": (1, 311),
    "one-column": (311, 1),
    "one-row-in-3d": (1, 1, 130),
    "one-block": (128, 128),
    "ragged": (130, 300),
    "three-axes": (2, 5, 130),
    "four-axes": (2, 3, 4, 7),
    "no-rows": (0, 130),
    "no-columns": (130, 0),
    "no-rows-3d": (0, 3, 5),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    size: tuple[int, ...] = request.param
    return size


@pytest.fixture
def quantizers(options: Options) -> Cases:
    """Every quantizer, each with one of the input dtypes in turn."""
    found = [Float8BlockQuantizer(**o, internal=i) for i in (False, True) for o in options]
    return list(zip(found, itertools.cycle(DTYPES), strict=False))


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return hostile(shape, dtype, block=(1, 128))


# -- the prototype and the real thing -------------------------------------------------------------


def test_prototype_is_the_result_in_every_fact(
    shape: tuple[int, ...], quantizers: Cases, known: Known, assert_same_planes: Same
) -> None:
    for quantizer, dtype in quantizers:
        real = quantizer.quantize(values(shape, dtype))
        proto = TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device="cpu")
        assert known(real) == known(proto.create_tensor())
        assert to_tensor_proto(real) == proto
        specs = proto.inner_specs()
        assert [(n, s.shape, s.dtype) for n, s in specs.items()] == [
            (n, tuple(t.shape), t.dtype) for n, t in real.inner_tensors().items()
        ]
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
    shape: tuple[int, ...], quantizers: Cases, known: Known
) -> None:
    for quantizer, dtype in quantizers:
        proto = TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device="meta")
        meta = quantizer.quantize(torch.empty(shape, dtype=dtype, device="meta"))
        assert known(meta) == known(proto.create_tensor())
        plain = meta.dequantize()
        assert (plain.shape, plain.dtype, plain.device.type) == (shape, dtype, "meta")
        if not quantizer.internal:  # dispatch of fakes costs, and the storage has the same buffers
            with FakeTensorMode():
                fake = quantizer.quantize(torch.empty(shape, dtype=dtype))
                assert known(fake) == known(proto.replace(device="cpu").create_tensor())


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("internal", [False, True])
def test_eval_proto_predicts_a_round_trip(dim: int, internal: bool) -> None:
    quantizer = Float8BlockQuantizer(block_scaling_dim=dim, internal=internal, rowwise=False)
    x = TensorProto(shape=(4, 33, 65), dtype=torch.float16, device="cpu")
    q, plain = te_proto.eval_proto(
        lambda t: (quantizer.quantize(t), quantizer.quantize(t).dequantize()), x
    )
    assert q == x.replace(quantizer=quantizer)
    assert plain == x


def test_no_byte_depends_on_what_memory_held(
    shape: tuple[int, ...],
    quantizers: Cases,
    request: pytest.FixtureRequest,
    assert_same_planes: Same,
) -> None:
    cases = [(q, values(shape, dtype)) for q, dtype in quantizers]
    clean = [q.quantize(x) for q, x in cases]
    request.getfixturevalue("poisoned")
    assert torch.empty(4, dtype=torch.uint8).tolist() == [0xFF] * 4
    for (quantizer, x), expected in zip(cases, clean, strict=True):
        assert_same_planes(quantizer.quantize(x), expected)
        out = quantizer.make_empty(shape, dtype=x.dtype, device="cpu")
        quantizer.quantize_into(x, out)
        assert_same_planes(out, expected)
        assert_same_bits(out.dequantize(), expected.dequantize())


# -- quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat_interleave(2, 1)[:, ::2], id="every-second"),
        pytest.param(
            lambda x: torch.cat([x.new_ones(3), x.flatten()])[3:].view(130, 150), id="offset"
        ),
        pytest.param(lambda x: x.flip(0).as_strided((130, 150), (150, 1)).flip(0), id="flipped"),
    ],
)
def test_strides_of_the_input_do_not_matter(
    make: Callable[[torch.Tensor], torch.Tensor], options: Options, assert_same_planes: Same
) -> None:
    x = hostile((130, 150), torch.float32)
    same = make(x)
    assert torch.equal(same, x)
    for fields in options:
        quantizer = Float8BlockQuantizer(**fields)
        assert_same_planes(quantizer.quantize(same), quantizer.quantize(x))


def test_expanded_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.tensor(3.25).expand(64, 70)  # the gradient of a sum
    q = Float8BlockQuantizer().quantize(x)
    assert_same_planes(q, Float8BlockQuantizer().quantize(x.clone()))
    assert q.rowwise_data.unique().tolist() == [0x7D]  # 448 / 3.25 is above 128: 416, code 0x7d
    assert q.rowwise_scale_inv.tolist() == [[2.0**-7, 0.0, 0.0, 0.0]]
    assert all(t.is_contiguous() for t in q.inner_tensors().values())


def test_channels_last_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.randn(2, 4, 8, 32).to(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    for dim in (1, 2):
        q = Float8BlockQuantizer(block_scaling_dim=dim).quantize(x)
        assert q.stride() == (1024, 256, 32, 1)
        assert_same_planes(q, Float8BlockQuantizer(block_scaling_dim=dim).quantize(x.contiguous()))


def test_quantized_input_is_dequantized(assert_same_planes: Same) -> None:
    source = Float8BlockQuantizer(dtype="e5m2", columnwise=False).quantize(hostile((64, 64)))
    target = Float8BlockQuantizer(block_scaling_dim=1)
    assert_same_planes(target.quantize(source), target.quantize(source.dequantize()))


def test_optimize_for_gemm_changes_no_byte(options: Options, assert_same_planes: Same) -> None:
    x = hostile((130, 300))
    for fields in options:
        found = [
            Float8BlockQuantizer(**fields | {"optimize_for_gemm": on}).quantize(x)
            for on in (False, True)
        ]
        assert_same_planes(*found)


def test_rowwise_plane_is_read_if_it_is_held(options: Options) -> None:
    x = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))
    for fields in options:
        quantizer = Float8BlockQuantizer(**fields)
        q = quantizer.quantize(x)
        kept = quantizer.with_usage(columnwise=not quantizer.rowwise)
        assert_same_bits(q.dequantize(), kept.quantize(x).dequantize())
        # 3 or 2 bits of mantissa, a scale at most twice too small, subnormal codes
        bound = 2.0**-4 if quantizer.dtype == "e4m3" else 2.0**-3
        torch.testing.assert_close(q.dequantize(), x, rtol=bound, atol=2.0**-9)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 3, 5)], ids=str)
def test_gradient_of_an_empty_tensor_has_its_shape(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    Float8BlockQuantizer().quantize(x).dequantize().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_gradient_passes_straight_through() -> None:
    x = hostile((64, 70), torch.float32).requires_grad_()
    weight = torch.randn(64, 70)
    q = Float8BlockQuantizer().quantize(x)
    assert isinstance(q, Float8BlockwiseTensor)
    assert q.requires_grad
    (q.dequantize() * weight).sum().backward()
    assert_same_bits(x.grad, weight)


def test_internal_result_is_a_storage_outside_autograd() -> None:
    x = torch.ones(32, 33, requires_grad=True)
    q = Float8BlockQuantizer(internal=True).quantize(x)
    assert type(q) is Float8BlockwiseStorage
    assert not q.dequantize().requires_grad


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"dtype": "e2m1"},
            "fp8_block: option dtype must be one of e4m3, e5m2, got 'e2m1'",
            id="element",
        ),
        pytest.param(
            {"block_len": 64}, "fp8_block: option block_len must be 128, got 64", id="block_len"
        ),
        pytest.param(
            {"block_scaling_dim": 0},
            "fp8_block: option block_scaling_dim must be 1 or 2, got 0",
            id="dim-0",
        ),
        pytest.param(
            {"block_scaling_dim": 3},
            "fp8_block: option block_scaling_dim must be 1 or 2, got 3",
            id="dim-3",
        ),
        pytest.param(
            {"force_pow_2_scales": 1},
            "fp8_block: option force_pow_2_scales must be a bool, got 1",
            id="flag",
        ),
        pytest.param(
            {"amax_epsilon": -1e-6},
            "fp8_block: option amax_epsilon must be a float32 of at least 0, got -1e-06",
            id="negative",
        ),
        pytest.param(
            {"amax_epsilon": math.inf},
            "fp8_block: option amax_epsilon must be a float32 of at least 0, got inf",
            id="infinite",
        ),
        pytest.param(
            {"amax_epsilon": 3.5e38},
            "fp8_block: option amax_epsilon must be a float32 of at least 0, got 3.5e+38",
            id="beyond-float32",
        ),
        pytest.param(
            {"amax_epsilon": math.nan},
            "fp8_block: option amax_epsilon must be a number, got nan",
            id="nan",
        ),
    ],
)
def test_option_that_the_format_does_not_have_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantizerError) as raised:
        Float8BlockQuantizer(**fields)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("error", "fields", "x", "message"),
    [
        pytest.param(
            DtypeError,
            {},
            torch.ones(32, 32, dtype=torch.float64),
            "fp8_block: x must be one of float32, bfloat16, float16, got float64; cast it first",
            id="input-dtype",
        ),
        pytest.param(
            UsageError,
            {"rowwise": False, "columnwise": False},
            torch.ones(32, 32),
            "fp8_block: neither rowwise nor columnwise is on; turn one on with with_usage()",
            id="no-plane",
        ),
    ],
)
def test_mistake_is_named(
    error: type[TeError], fields: dict[str, Any], x: torch.Tensor, message: str
) -> None:
    with pytest.raises(error) as raised:
        Float8BlockQuantizer(**fields).quantize(x)
    assert str(raised.value) == message


def test_amax_is_reduced_over_no_group() -> None:
    quantizer = Float8BlockQuantizer()
    with pytest.raises(UsageError) as raised:
        quantizer.quantize(torch.ones(4, 4), group="0")
    assert str(raised.value) == f"fp8_block: {quantizer} takes no group with the call, got 0"


# -- values ---------------------------------------------------------------------------------------


def test_forward_and_backward_leave_the_quantizer_as_it_was(assert_same_planes: Same) -> None:
    quantizer = Float8BlockQuantizer()
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


def test_threads_share_a_quantizer(assert_same_planes: Same) -> None:
    quantizer, x = Float8BlockQuantizer(), hostile((64, 96))
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
