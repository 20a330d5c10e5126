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

from te_nvfp4 import ops
from te_nvfp4.quantizer import NVFP4Quantizer
from te_proto import TensorProto
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Run = Callable[..., Any]
    Dtypes = Callable[[dict[str, Any]], tuple[torch.dtype, ...]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

RHT = {"with_rht": True, "with_post_rht_amax": True}


class Recorder(TorchDispatchMode):
    """Remember the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "te_nvfp4":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name().removeprefix("te_nvfp4::") for func, _ in self.calls]


def there_and_back(run: Run, quantizer: NVFP4Quantizer, x: torch.Tensor) -> tuple[Any, Any]:
    """Use all: quantize, quantize_into, dequantize."""
    q = run(quantizer, x)
    run(quantizer, x, out=q, noop=torch.zeros((), device=x.device))
    return q, q.dequantize()


@pytest.mark.parametrize("shape", [(96, 160), (2, 32, 64), (0, 64)], ids=str)
def test_fake_cuda_tensors_have_every_fact_of_the_result(
    shape: tuple[int, ...],
    options: Options,
    run: Run,
    known: Known,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    calls = ["amax", "quantize", "amax", "quantize_into", "dequantize"]
    for fields in options:
        for internal in (True, False):
            quantizer = NVFP4Quantizer(**fields, internal=internal)
            with FakeTensorMode():
                x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                proto = TensorProto(
                    shape=shape, dtype=x.dtype, quantizer=quantizer, device=x.device
                )
                with Recorder() as recorder:
                    q, plain = there_and_back(run, quantizer, x)
                assert known(q) == known(proto.create_tensor())
                assert known(plain) == known(x)
            # the tensor's own dispatch calls the last one, below the recorder
            assert recorder.names == (calls if internal else calls[:-1])


@pytest.mark.parametrize("fields", [{}, {**RHT, "stochastic_rounding": True}], ids=["1d", "all"])
def test_other_devices_run_no_op_that_inductor_could_not_fuse(
    fields: dict[str, bool], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    quantizer = NVFP4Quantizer(internal=True, **fields)
    with Recorder() as recorder:
        there_and_back(run, quantizer, torch.ones(32, 64, dtype=torch.bfloat16))
    assert recorder.names == []


def test_presence_of_triton_is_what_python_finds() -> None:
    assert ops._HAS_TRITON is (importlib.util.find_spec("triton") is not None)


# -- on CPU tensors, in the exact interpreter -----------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cpu_triton: None) -> None:
    """Run the kernels wherever the reference would: on CPU tensors, in the interpreter."""
    monkeypatch.setattr(ops, "_runs_kernels", lambda tensor: True)


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Which NaN a product is depends on the instruction that multiplied."""
    return torch.where(values.isnan(), torch.nan, values)


def test_ops_are_the_reference_byte_for_byte(
    options: Options,
    dtypes: Dtypes,
    run: Run,
    assert_same_planes: Same,
    request: pytest.FixtureRequest,
) -> None:
    cases = []
    for turn, fields in enumerate(options[::2]):  # test_kernels_quantize swizzles
        takes = dtypes(fields)
        x = hostile((32, 160), takes[turn % len(takes)], seed=turn, block=(1, 16), nonfinite=True)
        quantizer = NVFP4Quantizer(**fields, internal=True)
        q = run(quantizer, x)
        planes = [q.with_usage(columnwise=False)] if q.rowwise_data is not None else []
        planes += [q.with_usage(rowwise=False)] if q.columnwise_data is not None else []
        to = (torch.float32, torch.bfloat16, torch.float16)[turn % 3]
        cases.append((quantizer, x, q, [(p, to, p.dequantize(to)) for p in planes]))
    request.getfixturevalue("kernels")
    for quantizer, x, expected, planes in cases:
        assert_same_planes(run(quantizer, x), expected)
        out = quantizer.make_empty(x.shape, dtype=x.dtype, device="cpu")
        before = [t.data_ptr() for t in out.inner_tensors().values()]
        run(quantizer, x, out=out)
        assert [t.data_ptr() for t in out.inner_tensors().values()] == before
        assert_same_planes(out, expected)
        for plane, to, values in planes:
            assert_same_bits(one_nan(plane.dequantize(to)), one_nan(values))


TAKEN = [
    pytest.param(hostile((2, 32, 64)).transpose(0, 1), id="rows-of-two-strides"),
    pytest.param(hostile((96, 64)).t(), id="transposed"),
    pytest.param(torch.tensor(3.0).expand(32, 32), id="expanded"),
    pytest.param(torch.empty(0, 64), id="no-rows"),
    pytest.param(torch.empty(64, 0), id="no-columns"),
]


@pytest.mark.parametrize("x", TAKEN)
def test_ops_take_what_the_reference_takes(
    x: torch.Tensor, assert_same_planes: Same, request: pytest.FixtureRequest
) -> None:
    quantizer = NVFP4Quantizer(internal=True)
    expected = quantizer.quantize(x)
    values = expected.dequantize()
    request.getfixturevalue("kernels")
    request.getfixturevalue("poisoned")  # and write every byte
    q = quantizer.quantize(x)
    assert_same_planes(q, expected)
    assert_same_bits(one_nan(q.dequantize()), one_nan(values))


@pytest.mark.parametrize(
    ("noop", "written"), [(1.0, False), (0.0, True), (2.0, True), (float("nan"), True)]
)
@pytest.mark.parametrize("shape", [(32, 64), (0, 64)], ids=str)
def test_noop_of_the_ops_is_exactly_one(
    noop: float,
    written: bool,
    shape: tuple[int, int],
    assert_same_planes: Same,
    request: pytest.FixtureRequest,
) -> None:
    old, new = hostile(shape, seed=1), hostile(shape, seed=2)
    for fields in ({}, RHT, {"row_scaled_nvfp4": True}):
        quantizer = NVFP4Quantizer(internal=True, **fields)
        out, expected = quantizer.quantize(old), quantizer.quantize(new if written else old)
        with pytest.MonkeyPatch.context() as patch:
            request.getfixturevalue("cpu_triton")
            patch.setattr(ops, "_runs_kernels", lambda tensor: True)
            quantizer.quantize_into(new, out, torch.tensor(noop))
        assert_same_planes(out, expected)


@pytest.mark.usefixtures("cpu_triton")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x, q, a: ops.amax_op(x, q.quantizer, None), id="amax"),
        pytest.param(lambda x, q, a: ops.quantize_op(x, q.quantizer, a, a, None), id="quantize"),
        pytest.param(
            lambda x, q, a: ops.quantize_into_op(x, q, a, a, torch.tensor([1, 2]), torch.ones(())),
            id="quantize_into",
        ),
        pytest.param(lambda x, q, a: ops.dequantize_op(q, torch.float16), id="dequantize"),
    ],
)
def test_op_passes_opcheck(call: Callable[[torch.Tensor, Any, torch.Tensor], Any]) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    q = NVFP4Quantizer(internal=True, optimize_for_gemm=True).quantize(x)
    with Recorder() as recorder:
        call(x, q, torch.ones(1))
    ((op, args),) = recorder.calls
    assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


# -- without Triton -------------------------------------------------------------------------------


def test_everything_but_the_kernels_works_without_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None  # what an import finds where there is none\n"
        "import torch, te_nvfp4, te_nvfp4.ops\n"
        "assert not te_nvfp4.ops._HAS_TRITON\n"
        "x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()\n"
        "quantizer = te_nvfp4.NVFP4Quantizer(optimize_for_gemm=True)\n"
        "q = quantizer.quantize(x)\n"
        "quantizer.quantize_into(x, q.detach(), torch.zeros(()))\n"
        "back = torch.compile(lambda t: quantizer.quantize(t).dequantize(), fullgraph=True,"
        " backend='aot_eager')\n"
        "assert torch.equal(back(x), q.dequantize())\n"
        "q.dequantize().sum().backward()\n"
        "assert x.grad.unique().tolist() == [1.0]\n"
        "assert torch.equal(q[:32].dequantize(), q.dequantize()[:32])\n"
        "assert sys.modules['triton'] is None\n"
        "try:\n"
        "    te_nvfp4.ops.amax_op(x.detach(), quantizer, None)\n"
        "except ImportError as error:\n"
        "    print(error.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    # torch built for CUDA says so
    said = [line for line in done.stderr.splitlines() if "triton not found" not in line]
    assert (done.returncode, done.stdout.strip(), said) == (0, "triton", [])
