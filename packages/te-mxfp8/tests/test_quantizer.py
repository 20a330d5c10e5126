# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_proto
from te_mxfp8.quantizer import MXFP8Quantizer
from te_mxfp8.tensor import MXFP8Storage, MXFP8Tensor
from te_proto import TensorProto, to_tensor_proto
from te_proto.errors import DtypeError, QuantizerError, TeError, UsageError
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Options = list[dict[str, Any]]
    Cases = list[tuple[MXFP8Quantizer, torch.dtype]]
    Known = Callable[[Any], dict[str, Any]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "one-block": (32, 32),
    "ragged-tiles": (160, 288),
    "rows-only-in-product": (2, 3, 16, 64),
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
def quantizers(
    shape: tuple[int, ...], options: Options
) -> list[tuple[MXFP8Quantizer, torch.dtype]]:
    """Every quantizer that can hold ``shape``, each with one of the input dtypes in turn."""
    found = [MXFP8Quantizer(**o, internal=i) for o in options for i in (False, True)]
    m, k = math.prod(shape[:-1]), shape[-1]
    fits = [q for q in found if m % q.alignment()[0] == 0 and k % q.alignment()[1] == 0]
    assert fits
    return list(zip(fits, itertools.cycle(DTYPES), strict=False))


# -- the prototype and the real thing -------------------------------------------------------------


def test_prototype_is_the_result_in_every_fact(
    shape: tuple[int, ...], quantizers: Cases, known: Known, assert_same_planes: Same
) -> None:
    for quantizer, dtype in quantizers:
        real = quantizer.quantize(hostile(shape, dtype))
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


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("internal", [False, True])
def test_eval_proto_predicts_a_round_trip(rowwise: bool, internal: bool) -> None:
    quantizer = MXFP8Quantizer(rowwise=rowwise, internal=internal)
    x = TensorProto(shape=(4, 32, 64), dtype=torch.float16, device="cpu")
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
    cases = [(q, hostile(shape, dtype)) for q, dtype in quantizers]
    clean = [q.quantize(x) for q, x in cases]
    request.getfixturevalue("poisoned")
    assert torch.empty(4, dtype=torch.uint8).tolist() == [0xFF] * 4
    for (quantizer, x), expected in zip(cases, clean, strict=True):
        assert_same_planes(quantizer.quantize(x), expected)
        out = quantizer.make_empty(shape, dtype=x.dtype, device="cpu")
        quantizer.quantize_into(x, out)
        assert_same_planes(out, expected)
        assert_same_bits(out.dequantize(), expected.dequantize())


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("rowwise_scale_inv", (slice(160, None), slice(None))),
        ("rowwise_scale_inv", (slice(None), slice(9, None))),
        ("columnwise_scale_inv", (slice(5, None), slice(None))),
        ("columnwise_scale_inv", (slice(None), slice(288, None))),
    ],
    ids=["rows", "row-blocks", "column-blocks", "columns"],
)
@pytest.mark.usefixtures("poisoned")
def test_padding_of_compact_scales_is_zero(name: str, index: tuple[slice, slice]) -> None:
    q = MXFP8Quantizer().quantize(torch.ones(160, 288))
    padding = getattr(q, name)[index]
    assert padding.numel() > 0
    assert padding.unique().tolist() == [0]


# -- quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat_interleave(2, 1)[:, ::2], id="every-second"),
        pytest.param(
            lambda x: torch.cat([x.new_ones(3), x.flatten()])[3:].view(64, 96), id="offset"
        ),
        pytest.param(lambda x: x.flip(0).as_strided((64, 96), (96, 1)).flip(0), id="flipped"),
    ],
)
def test_strides_of_the_input_do_not_matter(
    make: Callable[[torch.Tensor], torch.Tensor], options: Options, assert_same_planes: Same
) -> None:
    x = hostile((64, 96), torch.float32)
    same = make(x)
    assert torch.equal(same, x)
    for fields in options:
        quantizer = MXFP8Quantizer(**fields)
        assert_same_planes(quantizer.quantize(same), quantizer.quantize(x))


def test_expanded_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.tensor(3.25).expand(64, 64)  # the gradient of a sum
    q = MXFP8Quantizer().quantize(x)
    assert_same_planes(q, MXFP8Quantizer().quantize(x.clone()))
    assert q.rowwise_data.unique().tolist() == [0x7D]  # 3.25 / 2**-7 is 416, code 0x7d
    assert q.rowwise_scale_inv[:64, :2].unique().tolist() == [120]


def test_channels_last_input_is_that_of_a_copy(assert_same_planes: Same) -> None:
    x = torch.randn(2, 4, 8, 32).to(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    q = MXFP8Quantizer().quantize(x)
    assert q.stride() == (1024, 256, 32, 1)
    assert_same_planes(q, MXFP8Quantizer().quantize(x.contiguous()))


def test_quantized_input_is_dequantized(assert_same_planes: Same) -> None:
    source = MXFP8Quantizer(dtype="e5m2", columnwise=False).quantize(hostile((64, 64)))
    target = MXFP8Quantizer(optimize_for_gemm=True)
    assert_same_planes(target.quantize(source), target.quantize(source.dequantize()))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0, 32)], ids=str)
def test_gradient_of_an_empty_tensor_has_its_shape(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    MXFP8Quantizer().quantize(x).dequantize().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_gradient_passes_straight_through() -> None:
    x = hostile((64, 64), torch.float32).requires_grad_()
    weight = torch.randn(64, 64)
    q = MXFP8Quantizer().quantize(x)
    assert isinstance(q, MXFP8Tensor)
    assert q.requires_grad
    (q.dequantize() * weight).sum().backward()
    assert_same_bits(x.grad, weight)


def test_internal_result_is_a_storage_outside_autograd() -> None:
    x = torch.ones(32, 32, requires_grad=True)
    q = MXFP8Quantizer(internal=True).quantize(x)
    assert type(q) is MXFP8Storage
    assert not q.dequantize().requires_grad


@pytest.mark.parametrize(
    ("error", "fields", "x", "message"),
    [
        pytest.param(
            QuantizerError,
            {"dtype": "e2m1"},
            None,
            "mxfp8: option dtype must be one of e4m3, e5m2, got 'e2m1'",
            id="element",
        ),
        pytest.param(
            QuantizerError,
            {"with_2d_quantization": 1},
            None,
            "mxfp8: option with_2d_quantization must be a bool, got 1",
            id="flag",
        ),
        pytest.param(
            DtypeError,
            {},
            torch.ones(32, 32, dtype=torch.float64),
            "mxfp8: x must be one of float32, bfloat16, float16, got float64; cast it first",
            id="input-dtype",
        ),
        pytest.param(
            UsageError,
            {"rowwise": False, "columnwise": False},
            torch.ones(32, 32),
            "mxfp8: neither rowwise nor columnwise is on; turn one on with with_usage()",
            id="no-plane",
        ),
    ],
)
def test_mistake_is_named(
    error: type[TeError], fields: dict[str, Any], x: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(error) as raised:
        MXFP8Quantizer(**fields).quantize(x)
    assert str(raised.value) == message


# -- values ---------------------------------------------------------------------------------------


def test_forward_and_backward_leave_the_quantizer_as_it_was(assert_same_planes: Same) -> None:
    quantizer = MXFP8Quantizer()
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
    quantizer, x = MXFP8Quantizer(), hostile((64, 96))
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


def test_first_call_of_a_process_may_come_from_many_threads() -> None:
    code = (
        "import threading, te_proto\n"
        "gate, sums = threading.Barrier(8), []\n"
        "def work():\n"
        "    gate.wait()\n"
        "    q = te_proto.get_quantizer('mxfp8')()\n"
        "    import torch\n"
        "    sums.append(float(q.quantize(torch.ones(32, 32)).dequantize().sum()))\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\n"
        "print(sums)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str([1024.0] * 8)
