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

from te_fp8_block import ops
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_proto import TensorProto
from te_proto.errors import DeviceError
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
        if func.namespace == "te_fp8_block":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name() for func, _ in self.calls]


def there_and_back(quantizer: Float8BlockQuantizer, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Use them all: quantize, quantize_into, dequantize, and transpose where it can."""
    q = quantizer.quantize(x)
    quantizer.quantize_into(x, q, torch.zeros((), device=x.device))
    plain = q.dequantize()
    if quantizer.rowwise and quantizer.is_2d():
        q = q.with_usage(columnwise=False).with_usage(columnwise=True)
    return q, plain


# -- without a GPU, as a fake ---------------------------------------------------------------------

OPS = ["te_fp8_block::quantize", "te_fp8_block::quantize_into", "te_fp8_block::dequantize"]


@pytest.mark.parametrize("has_triton", [True, False], ids=["triton", "no-triton"])
@pytest.mark.parametrize("shape", [(130, 300), (2, 3, 65), (), (0, 64)], ids=str)
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
            quantizer = Float8BlockQuantizer(**fields, internal=internal)
            with FakeTensorMode():
                x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                proto = TensorProto(
                    shape=shape, dtype=x.dtype, quantizer=quantizer, device=x.device
                )
                with Recorder() as recorder:
                    q, plain = there_and_back(quantizer, x)
                made = quantizer.rowwise and quantizer.is_2d()
                proto = proto.with_usage(columnwise=True) if made else proto
                assert known(q) == known(proto.create_tensor())
                assert known(plain) == known(x)
            # the tensor's own dispatch calls dequantize, below the recorder
            expected = OPS if internal else OPS[:2]
            assert recorder.names == [*expected, *(["te_fp8_block::transpose"] if made else [])]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dim", [1, 2])
def test_other_devices_run_no_op_that_inductor_could_not_fuse(
    device: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    quantizer = Float8BlockQuantizer(internal=True, block_scaling_dim=dim)
    with Recorder() as recorder:
        there_and_back(quantizer, torch.ones(32, 64, device=device))
    assert recorder.names == []


def test_presence_of_triton_is_what_python_finds() -> None:
    assert ops._HAS_TRITON is (importlib.util.find_spec("triton") is not None)


@pytest.mark.parametrize("into", [False, True], ids=["quantize", "quantize_into"])
def test_other_scales_than_powers_of_two_are_refused_where_the_gemm_takes_no_others(
    into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def is_one(device: torch.device, capability: tuple[int, int]) -> bool:
        asked.append(capability)
        return True

    monkeypatch.setattr(ops, "has_conversion", is_one)
    monkeypatch.setattr(ops, "_HAS_TRITON", False)
    x = torch.ones(4, 5)

    def run(quantizer: Float8BlockQuantizer) -> None:
        if into:
            ops.quantize_into_op(x, quantizer.make_empty(x.shape, device="cpu"), None)
        else:
            ops.quantize_op(x, quantizer)

    with pytest.raises(DeviceError) as raised:
        run(Float8BlockQuantizer(internal=True, force_pow_2_scales=False))
    assert str(raised.value) == (
        "fp8_block: option force_pow_2_scales must be True on a GPU of compute capability 10.0 or "
        "later, got False for a tensor on cpu; its GEMM takes powers of two alone"
    )
    assert asked == [(10, 0)]
    run(Float8BlockQuantizer(internal=True))
    monkeypatch.setattr(ops, "has_conversion", lambda *_: False)
    run(Float8BlockQuantizer(internal=True, force_pow_2_scales=False))


# -- without Triton, as an op ---------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2])
def test_ops_run_the_reference_without_triton(
    dim: int, monkeypatch: pytest.MonkeyPatch, assert_same_planes: Same
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", False)
    quantizer, x = Float8BlockQuantizer(internal=True, block_scaling_dim=dim), hostile((130, 300))
    expected = quantizer.quantize(x)
    assert_same_planes(ops.quantize_op(x, quantizer), expected)
    for noop, written in ((None, True), (torch.ones(()), False)):
        out = quantizer.quantize(torch.ones(130, 300, dtype=x.dtype))
        kept = quantizer.quantize(torch.ones(130, 300, dtype=x.dtype))
        ops.quantize_into_op(x, out, noop)
        assert_same_planes(out, expected if written else kept)
    assert_same_bits(ops.dequantize_op(expected, x.dtype), expected.dequantize())
    assert_same_bits(ops.transpose_op(expected.rowwise_data), expected.rowwise_data.t())


# -- on CPU tensors, in the exact interpreter -----------------------------------------------------


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Which NaN a product is depends on the instruction that multiplied."""
    return torch.where(values.isnan(), torch.nan, values)


@pytest.mark.usefixtures("cpu_triton", "poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ops_are_the_reference_byte_for_byte(
    dtype: torch.dtype, options: Options, assert_same_planes: Same
) -> None:
    x = hostile((130, 140), dtype, block=(1, 128), nonfinite=True)
    third = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]
    for fields in options[third::3]:  # each choice of options with one dtype
        quantizer = Float8BlockQuantizer(**fields, internal=True)
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


@pytest.mark.usefixtures("cpu_triton", "poisoned")
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(hostile((2, 32, 64)).transpose(0, 1), id="rows-of-two-strides"),
        pytest.param(hostile((96, 64)).t(), id="transposed"),
        pytest.param(torch.tensor(3.0).expand(32, 33), id="expanded"),
        pytest.param(torch.tensor(-3.0), id="scalar"),
        pytest.param(hostile((311,)), id="line"),
        pytest.param(torch.empty(0, 64), id="no-rows"),
        pytest.param(torch.empty(64, 0), id="no-columns"),
    ],
)
def test_ops_take_what_the_reference_takes(x: torch.Tensor, assert_same_planes: Same) -> None:
    for dim in (1, 2):
        quantizer = Float8BlockQuantizer(internal=True, block_scaling_dim=dim)
        q, expected = ops.quantize_op(x, quantizer), quantizer.quantize(x)
        assert_same_planes(q, expected)
        for kept in (q, q.with_usage(rowwise=False)):
            assert_same_bits(ops.dequantize_op(kept, x.dtype), kept.dequantize())


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    ("noop", "written"), [(1.0, False), (0.0, True), (2.0, True), (float("nan"), True)]
)
def test_noop_of_the_op_is_exactly_one(
    noop: float, written: bool, assert_same_planes: Same
) -> None:
    old, new = hostile((32, 64), seed=1), hostile((32, 64), seed=2)
    quantizer = Float8BlockQuantizer(internal=True, block_scaling_dim=1)
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
        pytest.param(lambda x, q: ops.transpose_op(q.rowwise_data), id="transpose"),
    ],
)
def test_op_passes_opcheck(call: Callable[[torch.Tensor, Any], Any]) -> None:
    x = hostile((64, 96))
    with Recorder() as recorder:
        call(x, Float8BlockQuantizer(internal=True).quantize(x))
    ((op, args),) = recorder.calls
    assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


# -- without Triton -------------------------------------------------------------------------------


def test_everything_but_the_kernels_works_without_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None  # what an import finds where there is none\n"
        "import torch, te_fp8_block, te_fp8_block.ops\n"
        "assert not te_fp8_block.ops._HAS_TRITON\n"
        "x = torch.linspace(-1, 1, 64 * 65).view(64, 65).requires_grad_()\n"
        "quantizer = te_fp8_block.Float8BlockQuantizer()\n"
        "q = quantizer.quantize(x)\n"
        "quantizer.quantize_into(x, q.detach(), torch.zeros(()))\n"
        "back = torch.compile(lambda t: quantizer.quantize(t).dequantize(), fullgraph=True,"
        " backend='aot_eager')\n"
        "assert torch.equal(back(x), q.dequantize())\n"
        "q.dequantize().sum().backward()\n"
        "assert x.grad.unique().tolist() == [1.0]\n"
        "assert torch.equal(q.t().dequantize(), q.dequantize().t())\n"
        "assert sys.modules['triton'] is None\n"
        "import te_fp8_block.kernels\n"
        "try:\n"
        "    import te_fp8_block.kernels.quantize\n"
        "except ImportError as error:\n"
        "    print(error.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    # torch built for CUDA says so
    said = [line for line in done.stderr.splitlines() if "triton not found" not in line]
    assert (done.returncode, done.stdout.strip(), said) == (0, "triton", [])
