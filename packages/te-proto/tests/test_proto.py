# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import itertools
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from te_toy import ToyQuantizer, codes_of, proto, values
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from te_proto import BufferSpec, Quantizer, TensorProto, eval_proto, to_tensor_proto
from te_proto.errors import DeviceError, LayoutError, ShapeError, UsageError
from te_proto.testing import assert_same_metadata, count_compiles, new_quantizer_in_graph

USAGES = [(True, True), (True, False), (False, True)]
QUANTIZERS = {
    f"{'row' if row else ''}{'column' if column else ''}"
    f"{'-internal' if internal else ''}{'-gemm' if gemm else ''}-{block}": ToyQuantizer(
        rowwise=row, columnwise=column, internal=internal, optimize_for_gemm=gemm, block=block
    )
    for (row, column), internal, gemm, block in itertools.product(
        USAGES, (False, True), (False, True), (0, 4)
    )
}
SHAPES = [(), (8,), (1, 4), (8, 12), (7, 13), (2, 4, 8), (2, 1, 2, 4), (0, 8), (8, 0), (3, 0, 5)]


def make(shape: Any, quantizer: Quantizer, device: Any, dtype: Any = torch.bfloat16) -> Any:
    return TensorProto(shape=shape, dtype=dtype, quantizer=quantizer, device=device).create_tensor()


def fits(quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
    try:
        quantizer.check_shape(shape)
    except ShapeError:
        return False
    return True


def assert_same_layout(made: Any, real: Any, device: str) -> None:
    """All that can be known without data, of the outer tensor and of each inner one."""
    assert type(made) is type(real)
    assert made.quantizer == real.quantizer
    assert (tuple(made.shape), made.dtype, str(made.device)) == (
        tuple(real.shape),
        real.dtype,
        device,
    )
    if isinstance(real, torch.Tensor):
        assert made.stride() == real.stride()
        assert made.requires_grad == real.requires_grad
    assert list(made.inner_tensors()) == list(real.inner_tensors())
    for (name, a), b in zip(
        made.inner_tensors().items(), real.inner_tensors().values(), strict=True
    ):
        assert_same_metadata(a, b, what=name, ignore=("class", "device"))
        assert a.storage_offset() == b.storage_offset() == 0
        assert str(a.device) == device


# -- prototype equals the real tensor -----------------------------------------------------------


@pytest.mark.parametrize("q", QUANTIZERS.values(), ids=QUANTIZERS)
@pytest.mark.parametrize(
    ("mode", "device"),
    [
        pytest.param(nullcontext, "cpu", id="eager"),
        pytest.param(nullcontext, "meta", id="meta"),
        pytest.param(FakeTensorMode, "cpu", id="fake"),
        pytest.param(FakeTensorMode, "cuda:0", id="fake-cuda"),
    ],
)
def test_created_tensor_has_the_layout_of_a_quantized_one(q: Any, mode: Any, device: str) -> None:
    tried = [shape for shape in SHAPES if fits(q, shape)]
    assert len(tried) >= (10 if q.block == 0 else 4)
    for shape in tried:
        real = q.quantize(values(*shape, dtype=torch.bfloat16))
        want = to_tensor_proto(real)
        assert want == proto(shape, q, dtype=torch.bfloat16)
        with mode():
            made = want.replace(device=device).create_tensor()
        assert_same_layout(made, real, device)
        assert to_tensor_proto(made) == want.replace(device=device)
        # and what can be asked without making it
        specs = want.replace(device=None).inner_specs()
        assert specs == {
            n: BufferSpec(tuple(t.shape), t.dtype) for n, t in real.inner_tensors().items()
        }
        assert want.inner_names() == tuple(real.inner_tensors())
        assert want.nbytes == real.nbytes
        assert want.buffer_nbytes() == {n: t.nbytes for n, t in real.inner_tensors().items()}
        assert want.create_metadata() == real.__tensor_flatten__()[1]


@pytest.mark.parametrize(
    "q",
    [q for q in QUANTIZERS.values() if not q.block],
    ids=[n for n in QUANTIZERS if n[-1] == "0"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_tensor_created_in_a_graph_has_the_layout_of_a_quantized_one(q: Any, dynamic: bool) -> None:
    with count_compiles() as counts:
        compiled = torch.compile(
            lambda x: make(x.shape, q, x.device),
            backend="aot_eager",
            fullgraph=True,
            dynamic=dynamic,
        )
        for shape in [(8, 12), (15, 7)]:
            real = q.quantize(values(*shape, dtype=torch.bfloat16))
            assert_same_layout(compiled(torch.empty(shape)), real, "cpu")
        assert counts.graphs == (1 if dynamic else 2)
    assert counts.breaks == 0


@pytest.mark.parametrize("shape", [(), (7,), (2, 4, 4, 8), (4, 0), (0, 8)], ids=str)
def test_any_rank_is_created_in_a_graph(shape: tuple[int, ...]) -> None:
    with count_compiles() as counts:
        for internal in (False, True):
            q = ToyQuantizer(block=0, internal=internal)
            compiled = torch.compile(
                lambda x, q=q: make(x.shape, q, x.device), backend="aot_eager", fullgraph=True
            )
            real = q.quantize(values(*shape, dtype=torch.bfloat16))
            assert_same_layout(compiled(torch.empty(shape)), real, "cpu")
        assert counts.graphs == 2


@pytest.mark.parametrize("requires_grad", [False, True])
def test_requires_grad_is_the_prototypes_and_never_a_storages(requires_grad: bool) -> None:
    made = proto((8, 8), ToyQuantizer(), requires_grad=requires_grad).create_tensor()
    assert made.requires_grad is requires_grad
    assert to_tensor_proto(made).requires_grad is requires_grad
    assert made.is_leaf
    storage = proto(
        (8, 8), ToyQuantizer(internal=True), requires_grad=requires_grad
    ).create_tensor()
    assert to_tensor_proto(storage).requires_grad is False


def test_created_tensor_can_be_quantized_into() -> None:
    for internal in (False, True):
        q = ToyQuantizer(internal=internal)
        made = proto((8, 8), q).create_tensor()
        q.quantize_into(values(8, 8), made)
        assert codes_of(made) == codes_of(q.quantize(values(8, 8)))


@new_quantizer_in_graph
def test_a_leaf_that_requires_grad_cannot_be_made_in_a_graph_and_the_error_says_so() -> None:
    compiled = torch.compile(
        lambda x: proto(x.shape, ToyQuantizer(), requires_grad=True).create_tensor(),
        backend="aot_eager",
        fullgraph=True,
    )
    message = (
        "a leaf that requires grad, of shape (8, 8), cannot be made in a compiled graph; make it "
        "outside, or make it without and call requires_grad_() on the graph's result"
    )
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(torch.empty(8, 8))


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(70000, 70000), (2**20, 2**12 + 32), (2**33, 4)], ids=str)
def test_sizes_beyond_32_bits_are_exact_and_allocate_nothing(shape: tuple[int, int]) -> None:
    m, k = shape
    p = proto(shape, ToyQuantizer(), device=None)
    assert p.numel == m * k
    assert p.inner_specs() == {
        "rowwise_data": ((m, k), torch.int8),
        "rowwise_scale_inv": ((m, k // 4), torch.float32),
        "columnwise_data": ((m, k), torch.int8),
        "columnwise_scale_inv": ((m // 4, k), torch.float32),
    }
    assert p.buffer_nbytes() == {
        "rowwise_data": m * k,
        "rowwise_scale_inv": m * k,
        "columnwise_data": m * k,
        "columnwise_scale_inv": m * k,
    }
    assert p.nbytes == 4 * m * k
    meta = p.replace(device="meta").create_tensor()
    assert meta.numel() == m * k
    assert meta.nbytes == p.nbytes


@pytest.mark.parametrize(("q", "nbytes"), [(None, 2 * 8 * 12), (ToyQuantizer(), 2 * 96 + 4 * 48)])
def test_nbytes_counts_every_buffer(q: Any, nbytes: int) -> None:
    assert proto((8, 12), q, dtype=torch.bfloat16).nbytes == nbytes


@new_quantizer_in_graph
def test_sizes_may_be_symbolic() -> None:
    def sizes(x: torch.Tensor) -> torch.Tensor:
        p = to_tensor_proto(ToyQuantizer().quantize(x))
        return x + p.nbytes + p.numel

    with count_compiles() as counts:
        compiled = torch.compile(sizes, backend="aot_eager", fullgraph=True, dynamic=True)
        for m in (8, 12, 32):
            assert torch.equal(compiled(torch.zeros(m, 20)), torch.full((m, 20), 5.0 * m * 20))
        assert counts.graphs == 1


def test_a_shape_that_the_format_cannot_hold_is_refused_by_every_question() -> None:
    p = proto((8, 7), ToyQuantizer())
    for ask in (
        p.inner_specs,
        p.inner_names,
        p.create_inner_tensors,
        p.create_tensor,
        p.buffer_nbytes,
    ):
        with pytest.raises(
            ShapeError, match=r"^toy: K must be a multiple of 4, got 7 in \(8, 7\)$"
        ):
            ask()


# -- making -------------------------------------------------------------------------------------


def test_making_needs_a_device_and_there_is_no_default() -> None:
    message = "a prototype of shape (8, 8) needs a device to be made; pass device='cuda' or 'cpu'"
    for q in (None, ToyQuantizer()):
        with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
            proto((8, 8), q, device=None).create_tensor()


def test_assemble_takes_a_list_or_a_mapping() -> None:
    p = proto((8, 8), ToyQuantizer())
    inner = p.create_inner_tensors()
    for given in (inner, dict(zip(p.inner_names(), inner, strict=True))):
        assert list(p.assemble(given).inner_tensors().values()) == inner


@pytest.mark.parametrize("q", [None, ToyQuantizer()])
def test_assemble_of_more_or_fewer_inner_tensors_is_refused(q: Any) -> None:
    p = proto((8, 8), q)
    inner = p.create_inner_tensors()
    for given in (inner[1:], [*inner, inner[0]]):
        message = (
            f"a prototype of shape (8, 8) is made of {list(p.inner_names())}, "
            f"got {len(given)} inner tensors"
        )
        with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
            p.assemble(given)


@pytest.mark.parametrize(
    "data",
    [torch.empty(8, 4), torch.empty(4, 8, dtype=torch.float16), torch.empty(8, 4).t()],
    ids=["shape", "dtype", "stride"],
)
def test_assemble_of_a_plain_tensor_of_another_layout_is_refused(data: torch.Tensor) -> None:
    message = (
        "data of a plain prototype must be a contiguous torch.float32 of shape (4, 8), "
        f"got {data.dtype} of shape {tuple(data.shape)} and strides {data.stride()}"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        proto((4, 8)).assemble([data])


# -- plain prototypes ---------------------------------------------------------------------------


def test_plain_prototype_is_one_buffer_called_data() -> None:
    p = proto((2, 3), dtype=torch.float16, device="meta", requires_grad=True)
    assert not p.is_quantized
    assert proto((2, 4), ToyQuantizer()).is_quantized
    assert p.inner_specs() == {"data": ((2, 3), torch.float16)}
    assert p.create_metadata() is None
    assert p.nbytes == 12
    made = p.create_tensor()
    assert type(made) is torch.Tensor
    assert to_tensor_proto(made) == p


def test_a_plain_prototype_has_no_usage_to_change() -> None:
    message = "a plain tensor has no planes: the prototype of shape (2, 3) has no quantizer"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        proto((2, 3)).with_usage(rowwise=True)


def test_prototype_of_a_non_contiguous_tensor_is_dense() -> None:
    assert to_tensor_proto(values(4, 6).t()).create_tensor().stride() == (4, 1)


# -- values -------------------------------------------------------------------------------------


def test_prototype_is_a_frozen_value() -> None:
    p = proto((8, 8), ToyQuantizer(), device="cpu")
    assert p == proto([8, 8], ToyQuantizer(), device=torch.device("cpu"))
    assert hash(p) == hash(p.replace())
    assert p != p.with_usage(rowwise=False)
    assert p != p.replace(requires_grad=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.shape = (4, 4)  # type: ignore[misc]


def test_with_usage_gives_another_prototype_and_leaves_this_one() -> None:
    p = proto((8, 12), ToyQuantizer(note="kept"))
    row = p.with_usage(columnwise=False)
    assert row.inner_names() == ("rowwise_data", "rowwise_scale_inv")
    assert row == proto((8, 12), ToyQuantizer(note="kept", columnwise=False))
    assert len(p.inner_names()) == 4


# -- to_tensor_proto ----------------------------------------------------------------------------


@pytest.mark.parametrize("internal", [False, True])
def test_a_quantized_class_that_lost_its_quantizer_is_an_error(internal: bool) -> None:
    q = ToyQuantizer(internal=internal).quantize(values(4, 8))
    q.quantizer = None
    message = f"a {type(q).__name__} has no quantizer, so its layout is unknown; build it with one"
    with pytest.raises(LayoutError, match=f"^{message}$"):
        to_tensor_proto(q)


def test_an_attribute_called_quantizer_does_not_make_a_tensor_quantized() -> None:
    x = torch.zeros(4, 8)
    x.quantizer = ToyQuantizer()  # type: ignore[attr-defined]
    assert not to_tensor_proto(x).is_quantized


# -- eval_proto ---------------------------------------------------------------------------------


def test_eval_proto_runs_the_function_on_fakes_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = ToyQuantizer.quantize_impl

    def spy(self: Any, x: torch.Tensor, *args: Any) -> Any:
        seen.append(type(x))
        return original(self, x, *args)

    monkeypatch.setattr(ToyQuantizer, "quantize_impl", spy)
    big = proto((2**20, 2**15), dtype=torch.bfloat16, requires_grad=True)  # 64 GiB
    assert eval_proto(ToyQuantizer().quantize, big) == big.replace(quantizer=ToyQuantizer())
    assert seen == [FakeTensor]


def test_eval_proto_takes_tensors_prototypes_and_nests() -> None:
    q, internal = ToyQuantizer(), ToyQuantizer(internal=True)

    def fn(batch: dict[str, Any], w: Any, *, scale: float) -> Any:
        x = batch["x"] * scale
        return {
            "y": x @ w.dequantize().t(),
            "kept": (q.quantize(x), [internal.quantize(x), batch["s"].dequantize()]),
            "n": x.shape[0],
        }

    out = eval_proto(
        fn, {"x": values(4, 8), "s": internal.quantize(values(4, 8))}, proto((12, 8), q), scale=2.0
    )
    assert out == {
        "y": proto((4, 12)),
        "kept": (proto((4, 8), q), [proto((4, 8), internal), proto((4, 8))]),
        "n": 4,
    }


def test_eval_proto_sees_a_modules_real_parameters() -> None:
    linear = torch.nn.Linear(8, 4)
    held = ToyQuantizer().quantize(values(4, 8))
    out = eval_proto(lambda x: linear(x) + x @ held.dequantize().t(), proto((3, 8)))
    assert out == proto((3, 4), requires_grad=True)


def test_eval_proto_of_an_argument_without_device_is_refused() -> None:
    with pytest.raises(
        DeviceError, match=r"^a prototype of shape \(4, 8\) needs a device to be made"
    ):
        eval_proto(lambda x: x, proto((4, 8), device=None))


def test_eval_proto_on_a_device_that_is_not_there() -> None:
    out = eval_proto(ToyQuantizer().quantize, proto((4, 8), device="cuda:0"))
    assert out == proto((4, 8), ToyQuantizer(), device="cuda:0")


def test_eval_proto_raises_what_the_function_raises() -> None:
    with pytest.raises(ShapeError, match="^toy: K must be a multiple of 4, got 7"):
        eval_proto(ToyQuantizer().quantize, proto((4, 7)))
