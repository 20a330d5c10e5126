# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_proto.errors import DeviceError, TeError
from te_proto.testing import cpu_launches_interpreted

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra import libdevice

pytestmark = pytest.mark.usefixtures("cpu_triton")


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, TO: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x.to(TO), mask=i < n)


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def largest_doubled_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.max(doubled(tl.load(x_ptr + tl.arange(0, BLOCK))), axis=0))


@triton.jit
def unmasked_copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


@triton.jit
def unmasked_atomic_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(x_ptr + tl.arange(0, BLOCK), 1)


@triton.jit
def unmasked_cas_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.atomic_cas(x_ptr + tl.arange(0, BLOCK), 0, 1)


@triton.jit
def made_up_pointer_kernel(x_ptr, address):
    tl.store(address.to(tl.pointer_type(tl.int32)), tl.load(x_ptr))


@triton.jit
def rint_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, libdevice.rint(tl.load(x_ptr + i)))


@triton.jit
def erf_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, libdevice.erf(tl.load(x_ptr + i)))


@triton.jit
def forgotten_import_kernel(out_ptr):
    tl.store(out_ptr, np.pi)  # type: ignore[name-defined]  # noqa: F821


@triton.jit
def block_number_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0), tl.program_id(0))


def test_libdevice_rint_runs_and_what_is_not_emulated_raises() -> None:
    x, out = torch.tensor([0.5, 1.5, -2.5, 2.51]), torch.empty(4)
    rint_kernel[(1,)](x, out, BLOCK=4)
    assert out.tolist() == [0.0, 2.0, -2.0, 3.0]
    with pytest.raises(TeError, match="libdevice __nv_erff is not emulated"):
        erf_kernel[(1,)](x, out, BLOCK=4)


@pytest.mark.parametrize(
    ("n_x", "n_out", "what"),
    [
        (7, 8, "load through argument x_ptr, element 7 of 7"),
        (8, 6, "store through argument out_ptr"),
    ],
)
def test_out_of_bounds_lane_raises_before_memory_is_touched(
    n_x: int, n_out: int, what: str
) -> None:
    # both live in one storage, so a stray lane would land in memory that is ours
    storage = torch.arange(64.0)
    x, out = storage[8 : 8 + n_x], storage[32 : 32 + n_out]
    with pytest.raises(IndexError, match=re.escape(what)):
        unmasked_copy_kernel[(1,)](x, out, BLOCK=8)
    assert torch.equal(storage, torch.arange(64.0))


def test_neighbouring_argument_does_not_hide_a_stray_lane() -> None:
    storage = torch.arange(16.0)
    with pytest.raises(IndexError, match=r"2 of 8 active lanes"):
        unmasked_copy_kernel[(1,)](storage[:6], storage[6:14], BLOCK=8)


@pytest.mark.parametrize("kernel", [unmasked_atomic_kernel, unmasked_cas_kernel])
def test_out_of_bounds_atomic_raises(kernel: Any) -> None:
    storage = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(IndexError, match="out-of-bounds atomic through argument x_ptr"):
        kernel[(1,)](storage[:3], BLOCK=4)
    assert storage.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("offset", [4, 7 << 48], ids=["untagged", "tag-of-no-argument"])
def test_pointer_made_of_an_integer_is_out_of_bounds(offset: int) -> None:
    x = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(IndexError, match="store through a pointer that no tensor argument gave"):
        made_up_pointer_kernel[(1,)](x, x.data_ptr() + offset)


def test_argument_with_gaps_ends_at_its_last_element() -> None:
    storage = torch.zeros(16)
    unmasked_copy_kernel[(1,)](torch.ones(8), storage[:10:3], BLOCK=8)
    with pytest.raises(IndexError, match="element 10 of 10"):
        unmasked_copy_kernel[(1,)](torch.ones(16), storage[:10:3], BLOCK=16)
    assert storage.tolist() == [1.0] * 8 + [0.0] * 8


def test_masked_lanes_may_point_anywhere() -> None:
    out = torch.empty(100, dtype=torch.bfloat16)
    x = torch.arange(100.0)
    copy_kernel[(2,)](x, out, 100, TO=tl.bfloat16, BLOCK=64)
    assert torch.equal(out, x.to(torch.bfloat16))


def test_grid_may_be_a_function_of_the_arguments() -> None:
    out = torch.zeros(3, dtype=torch.int32)
    block_number_kernel[lambda meta: (triton.cdiv(9, meta["BLOCK"]),)](out, BLOCK=3)
    assert out.tolist() == [0, 1, 2]


def test_unknown_keyword_is_refused_and_launch_options_are_not() -> None:
    x = torch.zeros(2)
    unmasked_copy_kernel[(1,)](x, x, BLOCK=2, num_warps=4, enable_fp_fusion=False)
    with pytest.raises(TypeError, match="no parameter or launch option 'num_warp'"):
        unmasked_copy_kernel[(1,)](x, x, BLOCK=2, num_warp=4)


def test_forgotten_import_is_noticed() -> None:
    with pytest.raises(NameError, match="np"):
        forgotten_import_kernel[(1,)](torch.zeros(1))


def test_tensors_without_data_are_left_to_triton() -> None:
    ran = []
    hook = lambda *a, **k: ran.append(1)  # noqa: E731
    x = torch.zeros(2)
    fake = FakeTensorMode().from_tensor(x)
    # triton itself runs, and finds no GPU
    with pytest.raises(RuntimeError, match="active driver"):
        unmasked_copy_kernel[(1,)](fake, fake, BLOCK=2)
    unmasked_copy_kernel.add_pre_run_hook(hook)
    try:
        unmasked_copy_kernel[(1,)](x, x, BLOCK=2)
    finally:
        unmasked_copy_kernel.pre_run_hooks.remove(hook)
    assert ran == [1]


def test_arguments_on_two_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="argument out_ptr is on meta"):
        unmasked_copy_kernel[(1,)](torch.zeros(2), torch.zeros(2, device="meta"), BLOCK=2)


def test_triton_interpret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TeError, match="unset it"), cpu_launches_interpreted():
        pass


def snapshot() -> dict[str, object]:
    from triton.runtime import interpreter, jit

    owners = {
        "tl": tl,
        "core": tl.core,
        "math": tl.math,
        "tensor": tl.tensor,
        "standard": tl.standard,
        "libdevice": libdevice,
        "interpreter": interpreter,
        "builder": interpreter.InterpreterBuilder,
        "jit": jit.JITFunction,
        "module": copy_kernel.fn.__globals__,
    }
    found = {n: dict(o) if isinstance(o, dict) else dict(vars(o)) for n, o in owners.items()}
    return {f"{n}.{k}": id(v) for n, names in found.items() for k, v in names.items()}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_patched(fails: bool) -> None:
    before = snapshot()
    x = torch.zeros(3)
    if fails:
        with pytest.raises(IndexError):
            unmasked_copy_kernel[(1,)](x, x, BLOCK=4)
    else:
        largest_doubled_kernel[(1,)](torch.tensor([1.0, 4.0]), x, BLOCK=2)
        assert x[0] == 8.0
    assert snapshot() == before
