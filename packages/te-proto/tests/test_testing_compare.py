# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from te_proto.errors import DtypeError, TeError
from te_proto.testing import assert_same_bits, assert_same_metadata, hostile

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def test_first_bad_index_count_and_both_values_are_reported() -> None:
    a = torch.zeros(3, 4, dtype=torch.float8_e4m3fn)
    b = a.clone()
    b.view(torch.uint8)[1, 2] = 0x7E
    b.view(torch.uint8)[2, 0] = 0x80
    message = (
        "data: 2 of 12 elements differ, first at index (1, 2): "
        "got 0x00 (0.0), expected 0x7e (448.0)"
    )
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_same_bits(a, b, what="data")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(0x7FC00000, 0x7FC00001, id="nan-payload"),
        pytest.param(0x00000000, -0x80000000, id="sign-of-zero"),
    ],
)
def test_equal_values_with_other_bits_differ(a: int, b: Any) -> None:
    left, right = (torch.tensor([v], dtype=torch.int32).view(torch.float32) for v in (a, b))
    assert_same_bits(left, left.clone())
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ, first at index \(0,\)"):
        assert_same_bits(left, right)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bool,
        torch.int64,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_any_dtype_and_stride(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (4, 6, 16), dtype=torch.uint8)
    a = raw.view(dtype)[::2].transpose(0, 1)
    b = raw.clone().view(dtype)[::2].transpose(0, 1)
    assert not a.is_contiguous()
    assert_same_bits(a, b)
    b.untyped_storage()[0] = 1 - b.untyped_storage()[0]
    with pytest.raises(AssertionError, match=r"first at index \(0, 0, 0\)"):
        assert_same_bits(a, b)


def test_scalar_and_empty_tensors() -> None:
    assert_same_bits(torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match=re.escape("first at index (): got 0x0001 (9.")):
        assert_same_bits(
            torch.tensor(1, dtype=torch.int16).view(torch.bfloat16),
            torch.zeros((), dtype=torch.bfloat16),
        )


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (torch.zeros(3), "s: shape differs: got (2,), expected (3,)"),
        (
            torch.zeros(2, dtype=torch.int32),
            "s: dtype differs: got torch.float32, expected torch.int32",
        ),
    ],
)
def test_shape_and_dtype_come_first(b: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_same_bits(torch.zeros(2), b, what="s")


def test_subclass_is_refused() -> None:
    class Wrapped(torch.Tensor):
        pass

    with pytest.raises(TeError, match="expected must be a plain tensor, got Wrapped"):
        assert_same_bits(torch.zeros(2), torch.zeros(2).as_subclass(Wrapped))


def test_metadata_names_every_difference() -> None:
    a = torch.empty(4, 6)
    b = torch.empty(6, 4, dtype=torch.float64, device="meta", requires_grad=True).t()
    assert_same_metadata(a, a.clone())
    message = (
        "grad: stride differs: got (6, 1), expected (1, 4); "
        "dtype differs: got torch.float32, expected torch.float64; "
        "device differs: got cpu, expected meta; requires_grad differs: got False, expected True"
    )
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_same_metadata(a, b, what="grad")
    with pytest.raises(AssertionError, match=r"^class differs: got Tensor, expected Parameter$"):
        assert_same_metadata(a, torch.nn.Parameter(a), ignore=("requires_grad",))
    assert_same_metadata(a, a.to("meta"), ignore=("device",))
    with pytest.raises(TeError, match="got 'strides'"):
        assert_same_metadata(a, a, ignore=("strides",))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hostile_holds_every_edge(dtype: torch.dtype) -> None:
    x = hostile((512, 1024), dtype)
    info = torch.finfo(dtype)
    assert x.dtype == dtype
    assert x.isfinite().all()
    assert ((x == 0) & x.signbit()).any()
    assert ((x == 0) & ~x.signbit()).any()
    smallest = info.smallest_normal * info.eps
    assert (x.abs() == smallest).any()
    exponents = torch.frexp(x[x != 0].double()).exponent.unique()
    assert exponents.numel() == exponents.max() - exponents.min() + 1
    assert exponents.min() == torch.frexp(torch.tensor(smallest).double()).exponent
    assert exponents.max() == torch.frexp(torch.tensor(info.max).double()).exponent


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hostile_maxima_sit_on_bounds_and_one_ulp_off(dtype: torch.dtype) -> None:
    x = hostile((1024, 256), dtype, block=(2, 64))
    amax = x.unflatten(0, (-1, 2)).unflatten(2, (-1, 64)).abs().amax(dim=(1, 3)).flatten()
    word = {4: torch.int32, 2: torch.int16}[x.element_size()]
    for mantissa in (1.0, 1.75, 1.5):
        for off in (-1, 0, 1):
            near = (amax.view(word) + off).view(dtype).double()
            normal = amax >= 2 * torch.finfo(dtype).smallest_normal
            hits = (2 * torch.frexp(near).mantissa == mantissa) & normal
            assert hits.sum() >= 8, (mantissa, off)


def test_hostile_is_reproducible_and_ragged() -> None:
    a = hostile((3, 5, 33), seed=4, nonfinite=True, block=(1, 16))
    assert a.shape == (3, 5, 33)
    assert a.is_contiguous()
    assert_same_bits(a, hostile((3, 5, 33), seed=4, nonfinite=True, block=(1, 16)))
    assert not torch.equal(a.isnan(), hostile((3, 5, 33), seed=5, nonfinite=True).isnan())
    assert hostile((7,)).shape == (7,)
    assert hostile((0, 32)).shape == (0, 32)


def test_hostile_nonfinite_has_nan_and_both_infinities() -> None:
    x = hostile((64, 64), nonfinite=True)
    assert x.isnan().any()
    assert (x == float("inf")).any()
    assert (x == -float("inf")).any()


def test_hostile_dtype_is_checked() -> None:
    with pytest.raises(DtypeError, match=r"got torch.float64$"):
        hostile((2, 2), torch.float64)
