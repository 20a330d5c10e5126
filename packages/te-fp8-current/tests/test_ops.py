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

from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_fp8_current import ops, reference
from te_proto import TensorProto
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

INTERNAL = Quantizer(internal=True, separate_transpose=True)


class Recorder(TorchDispatchMode):
    """Remember the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "te_fp8_current":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name().removeprefix("te_fp8_current::") for func, _ in self.calls]


# -- without a GPU, as a fake ---------------------------------------------------------------------


@pytest.mark.parametrize("has_triton", [True, False], ids=["triton", "no-triton"])
@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 5), (), (0, 4)], ids=str)
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
            quantizer = Quantizer(**fields, internal=internal)
            with FakeTensorMode():
                x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                proto = TensorProto(
                    shape=shape, dtype=x.dtype, quantizer=quantizer, device=x.device
                )
                with Recorder() as recorder:
                    q = quantizer.quantize(x)
                    plain = q.dequantize()
                    if has_triton:  # a torch without CUDA refuses copy_ on a fake CUDA tensor
                        quantizer.quantize_into(x, q, torch.zeros((), device="cuda"))
                assert known(q) == known(proto.create_tensor())
                assert known(plain) == known(x)
            # a tensor's own dispatch calls dequantize, below the recorder
            run = ["amax", "quantize", *(["dequantize"] if internal else []), "amax"]
            assert recorder.names == ([*run, "quantize_into"] if has_triton else [])


def test_a_missing_transpose_is_made_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    quantizer = INTERNAL.replace(columnwise=False)
    with FakeTensorMode(), Recorder() as recorder:
        q = quantizer.make_empty((2, 3, 5), device="cuda").with_usage(columnwise=True)
        assert q.data_transpose.shape == (5, 2, 3)
        assert q.data_transpose.device.type == "cuda"
    assert recorder.names == ["transpose"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_run_no_op_that_inductor_could_not_fuse(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    with Recorder() as recorder:
        x, quantizer = torch.ones(3, 5, device=device), INTERNAL.replace(columnwise=False)
        q = quantizer.quantize(x)
        quantizer.quantize_into(x, q, torch.zeros((), device=device))
        q.with_usage(columnwise=True).dequantize()
    assert recorder.names == []


def test_presence_of_triton_is_what_python_finds() -> None:
    assert ops._HAS_TRITON is (importlib.util.find_spec("triton") is not None)


# -- on CPU tensors, in the exact interpreter -----------------------------------------------------


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Which NaN a product is depends on the instruction that multiplied."""
    return torch.where(values.isnan(), torch.nan, values)


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_ops_are_the_reference_byte_for_byte(
    dtype: torch.dtype, nonfinite: bool, options: Options, assert_same_planes: Same
) -> None:
    x = hostile((30, 50), dtype, nonfinite=nonfinite)
    for fields in options:
        quantizer = Quantizer(**fields, internal=True)
        expected = quantizer.quantize(x)
        amax = ops.amax_op(x, None)
        assert_same_bits(amax, reference.amax(x))
        q = ops.quantize_op(x, amax, quantizer)
        assert_same_planes(q, expected)
        out = quantizer.make_empty(x.shape, dtype=dtype, device="cpu")
        before = [t.data_ptr() for t in out.inner_tensors().values()]
        ops.quantize_into_op(x, amax, out, None)
        assert [t.data_ptr() for t in out.inner_tensors().values()] == before
        assert_same_planes(out, expected)
        assert_same_bits(one_nan(ops.dequantize_op(q, dtype)), one_nan(expected.dequantize(dtype)))
        if q.fp8_data is not None:
            expected_transpose = reference.move_last_to_front(q.fp8_data)
            assert_same_bits(ops.transpose_op(q.fp8_data), expected_transpose)


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(hostile((2, 6, 10)).transpose(0, 1), id="rows-of-two-strides"),
        pytest.param(hostile((9, 6)).t(), id="transposed"),
        pytest.param(torch.tensor(3.0).expand(3, 5), id="expanded"),
        pytest.param(torch.tensor(-3.0), id="scalar"),
        pytest.param(torch.ones(7), id="line"),
        pytest.param(torch.empty(0, 6), id="no-rows"),
        pytest.param(torch.empty(6, 0), id="no-columns"),
    ],
)
def test_ops_take_what_the_reference_takes(x: torch.Tensor, assert_same_planes: Same) -> None:
    q = ops.quantize_op(x, ops.amax_op(x, None), INTERNAL)
    assert_same_planes(q, INTERNAL.quantize(x))
    for held in (q, q.with_usage(rowwise=False)):
        assert_same_bits(ops.dequantize_op(held, x.dtype), INTERNAL.quantize(x).dequantize())


@pytest.mark.usefixtures("cpu_triton", "poisoned")
def test_ops_write_every_byte_of_their_results(assert_same_planes: Same) -> None:
    for shape in ((30, 50), (0, 5)):
        x = hostile(shape)
        q = ops.quantize_op(x, ops.amax_op(x, None), INTERNAL)
        assert_same_planes(q, INTERNAL.quantize(x))
        assert_same_bits(ops.transpose_op(q.fp8_data), q.data_transpose)
        assert_same_bits(ops.dequantize_op(q, torch.float32), q.dequantize(torch.float32))


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    ("noop", "written"), [(1.0, False), (0.0, True), (2.0, True), (float("nan"), True)]
)
def test_noop_of_the_ops_is_exactly_one(
    noop: float, written: bool, assert_same_planes: Same
) -> None:
    old, new = hostile((6, 10), seed=1), 2.0 * hostile((6, 10), seed=2)
    out, flag = INTERNAL.quantize(old), torch.tensor(noop)
    amax = ops.amax_op(new, flag)
    assert_same_bits(amax, reference.amax(new, flag))
    ops.quantize_into_op(new, amax, out, flag)
    assert_same_planes(out, INTERNAL.quantize(new if written else old))


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x, q: ops.amax_op(x, None), id="amax"),
        pytest.param(lambda x, q: ops.quantize_op(x, torch.ones(1), q.quantizer), id="quantize"),
        pytest.param(lambda x, q: ops.dequantize_op(q, torch.float16), id="dequantize"),
        pytest.param(lambda x, q: ops.transpose_op(q.fp8_data), id="transpose"),
        pytest.param(
            lambda x, q: ops.quantize_into_op(x, torch.ones(1), q, torch.ones(())),
            id="quantize_into",
        ),
    ],
)
def test_op_passes_opcheck(call: Callable[[torch.Tensor, Any], Any]) -> None:
    x = hostile((6, 10))
    with Recorder() as recorder:
        call(x, INTERNAL.quantize(x))
    ((op, args),) = recorder.calls
    assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


# -- without Triton -------------------------------------------------------------------------------


def test_everything_but_the_kernels_works_without_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None  # what an import finds where there is none\n"
        "import torch, te_fp8_current, te_fp8_current.ops\n"
        "assert not te_fp8_current.ops._HAS_TRITON\n"
        "x = torch.linspace(-1, 1, 60).view(6, 10).requires_grad_()\n"
        "quantizer = te_fp8_current.Float8CurrentScalingQuantizer(separate_transpose=True)\n"
        "q = quantizer.quantize(x)\n"
        "quantizer.quantize_into(x, q.detach(), torch.zeros(()))\n"
        "back = torch.compile(lambda t: quantizer.quantize(t).dequantize(), fullgraph=True,"
        " backend='aot_eager')\n"
        "assert torch.equal(back(x), q.dequantize())\n"
        "q.dequantize().sum().backward()\n"
        "assert x.grad.unique().tolist() == [1.0]\n"
        "assert torch.equal(q.t()[:5].dequantize(), q.dequantize().t()[:5])\n"
        "assert sys.modules['triton'] is None\n"
        "try:\n"
        "    te_fp8_current.ops.amax_op(x.detach(), None)\n"
        "except ImportError as error:\n"
        "    print(error.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    # torch built for CUDA says so
    said = [line for line in done.stderr.splitlines() if "triton not found" not in line]
    assert (done.returncode, done.stdout.strip(), said) == (0, "triton", [])
