# SPDX-License-Identifier: Apache-2.0
"""Which code runs where, and that the kernels' ops are the reference, in facts and in bytes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from te_mxfp8 import ops
from te_mxfp8.quantizer import MXFP8Quantizer
from te_proto import TensorProto
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]


class Recorder(TorchDispatchMode):
    """Remember the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "te_mxfp8":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name() for func, _ in self.calls]


def there_and_back(quantizer: MXFP8Quantizer, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Use all three: quantize, quantize_into, dequantize."""
    q = quantizer.quantize(x)
    quantizer.quantize_into(x, q, torch.zeros((), device=x.device))
    return q, q.dequantize()


# -- without a GPU, as a fake ---------------------------------------------------------------------

OPS = ["te_mxfp8::quantize", "te_mxfp8::quantize_into", "te_mxfp8::dequantize"]


@pytest.mark.parametrize("has_triton", [True, False], ids=["triton", "no-triton"])
@pytest.mark.parametrize("shape", [(96, 160), (2, 32, 64), (0, 64)], ids=str)
def test_fake_cuda_tensors_have_every_fact_of_the_result(
    has_triton: bool,
    shape: tuple[int, ...],
    options: Options,
    known: Known,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", has_triton)
    for fields in options:
        for internal in (True, False):
            quantizer = MXFP8Quantizer(**fields, internal=internal)
            with FakeTensorMode():
                x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                proto = TensorProto(
                    shape=shape, dtype=x.dtype, quantizer=quantizer, device=x.device
                )
                with Recorder() as recorder:
                    q, plain = there_and_back(quantizer, x)
                assert known(q) == known(proto.create_tensor())
                assert known(plain) == known(x)
            # the tensor's own dispatch calls the last one, below the recorder
            assert recorder.names == (OPS if internal else OPS[:2])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_run_no_op_that_inductor_could_not_fuse(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    with Recorder() as recorder:
        there_and_back(MXFP8Quantizer(internal=True), torch.ones(32, 64, device=device))
    assert recorder.names == []


def test_presence_of_triton_is_what_python_finds() -> None:
    assert ops._HAS_TRITON is (importlib.util.find_spec("triton") is not None)


# -- on CPU tensors, in the exact interpreter -----------------------------------------------------


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Which NaN a product is depends on the instruction that multiplied."""
    return torch.where(values.isnan(), torch.nan, values)


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ops_are_the_reference_byte_for_byte(
    dtype: torch.dtype, options: Options, assert_same_planes: Same
) -> None:
    x = hostile((96, 160), dtype, nonfinite=True)
    third = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]
    for fields in options[third::3]:  # each choice of options with one dtype
        quantizer = MXFP8Quantizer(**fields, internal=True)
        expected = quantizer.quantize(x)
        q = ops.quantize_op(x, quantizer)
        assert_same_planes(q, expected)
        out = quantizer.make_empty(x.shape, dtype=dtype, device="cpu")
        before = [t.data_ptr() for t in out.inner_tensors().values()]
        ops.quantize_into_op(x, out, None)
        assert [t.data_ptr() for t in out.inner_tensors().values()] == before
        assert_same_planes(out, expected)
        for to in (torch.float32, torch.bfloat16, torch.float16):
            assert_same_bits(one_nan(ops.dequantize_op(q, to)), one_nan(expected.dequantize(to)))


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(hostile((2, 32, 64)).transpose(0, 1), id="rows-of-two-strides"),
        pytest.param(hostile((96, 64)).t(), id="transposed"),
        pytest.param(torch.tensor(3.0).expand(32, 32), id="expanded"),
        pytest.param(torch.empty(0, 64), id="no-rows"),
        pytest.param(torch.empty(64, 0), id="no-columns"),
    ],
)
def test_ops_take_what_the_reference_takes(x: torch.Tensor, assert_same_planes: Same) -> None:
    quantizer = MXFP8Quantizer(internal=True)
    q = ops.quantize_op(x, quantizer)
    assert_same_planes(q, quantizer.quantize(x))
    assert_same_bits(ops.dequantize_op(q, x.dtype), quantizer.quantize(x).dequantize())


@pytest.mark.usefixtures("cpu_triton", "poisoned")
def test_op_writes_every_byte_of_its_buffers(assert_same_planes: Same) -> None:
    for swizzled in (False, True):
        quantizer = MXFP8Quantizer(internal=True, optimize_for_gemm=swizzled)
        x = hostile((96, 160))
        assert_same_planes(ops.quantize_op(x, quantizer), quantizer.quantize(x))


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    ("noop", "written"), [(1.0, False), (0.0, True), (2.0, True), (float("nan"), True)]
)
def test_noop_of_the_op_is_exactly_one(
    noop: float, written: bool, assert_same_planes: Same
) -> None:
    old, new = hostile((32, 64), seed=1), hostile((32, 64), seed=2)
    quantizer = MXFP8Quantizer(internal=True)
    out = quantizer.quantize(old)
    ops.quantize_into_op(new, out, torch.tensor(noop))
    assert_same_planes(out, quantizer.quantize(new if written else old))


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x, q: ops.quantize_op(x, q.quantizer), id="quantize"),
        pytest.param(lambda x, q: ops.dequantize_op(q, torch.float16), id="dequantize"),
        pytest.param(lambda x, q: ops.quantize_into_op(x, q, torch.ones(())), id="quantize_into"),
    ],
)
def test_op_passes_opcheck(call: Callable[[torch.Tensor, Any], Any]) -> None:
    x = hostile((64, 96))
    with Recorder() as recorder:
        call(x, MXFP8Quantizer(internal=True, optimize_for_gemm=True).quantize(x))
    ((op, args),) = recorder.calls
    assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


# -- without Triton -------------------------------------------------------------------------------


def test_ops_run_the_reference_where_there_is_no_triton(
    options: Options, assert_same_planes: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", False)
    monkeypatch.setenv("TE_PROTO_CHECK", "1")
    old, new = hostile((64, 96), seed=1), hostile((64, 96), seed=2)
    for fields in options:
        quantizer = MXFP8Quantizer(**fields, internal=True)
        q = ops.quantize_op(old, quantizer)
        assert_same_planes(q, quantizer.quantize(old))
        assert_same_bits(ops.dequantize_op(q, torch.float32), q.dequantize(torch.float32))
        ops.quantize_into_op(new, q, torch.ones(()))
        assert_same_planes(q, quantizer.quantize(old))
        ops.quantize_into_op(new, q, None)
        assert_same_planes(q, quantizer.quantize(new))


def test_everything_but_the_kernels_works_without_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None  # what an import finds where there is none\n"
        "import torch, te_mxfp8, te_mxfp8.ops\n"
        "assert not te_mxfp8.ops._HAS_TRITON\n"
        "x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()\n"
        "quantizer = te_mxfp8.MXFP8Quantizer(optimize_for_gemm=True)\n"
        "q = quantizer.quantize(x)\n"
        "quantizer.quantize_into(x, q.detach(), torch.zeros(()))\n"
        "back = torch.compile(lambda t: quantizer.quantize(t).dequantize(), fullgraph=True,"
        " backend='aot_eager')\n"
        "assert torch.equal(back(x), q.dequantize())\n"
        "q.dequantize().sum().backward()\n"
        "assert x.grad.unique().tolist() == [1.0]\n"
        "assert torch.equal(q.t()[:32].dequantize(), q.dequantize().t()[:32])\n"
        "q = te_mxfp8.ops.quantize_op(x.detach(), quantizer.replace(internal=True))\n"
        "print(torch.equal(te_mxfp8.ops.dequantize_op(q, torch.float32), back(x)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    # torch built for CUDA says so
    said = [line for line in done.stderr.splitlines() if "triton not found" not in line]
    assert (done.returncode, done.stdout.strip(), said) == (0, "True", [])
