# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from te_toy import MAX, Rounding, ToyQuantizer, ToyStorage, ToyTensor, codes_of, values

import te_proto.quantizer
from te_proto.errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
    UsageError,
)

Q = ToyQuantizer()


class ShiftedQuantizer(ToyQuantizer):
    """Adds the first number of ``rng``, to show that it arrives."""

    shifted: bool = True

    def call_arguments(self) -> tuple[str, ...]:
        return ("rng",) if self.shifted else ()

    def quantize_impl(
        self, x: torch.Tensor, rng: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return super().quantize_impl(x if rng is None else x + rng[0])


class SamePlain(ToyQuantizer):
    """The same fields as its base: only the class differs."""


# -- quantize -----------------------------------------------------------------------------------


def test_quantize_gives_codes_and_scales_of_both_planes() -> None:
    x = torch.tensor([[127.0, -64.0, 0.0, 1.4], [254.0, 0.0, 2.0, -4.0]])
    q = ToyQuantizer(block=0).quantize(x)
    assert type(q) is ToyTensor
    assert q.rowwise_data.tolist() == [[127, -64, 0, 1], [127, 0, 1, -2]]
    assert q.rowwise_scale_inv.tolist() == [[1.0], [2.0]]
    assert q.columnwise_scale_inv[0, :2].tolist() == [2.0, torch.tensor(64.0 / MAX).item()]
    assert q.columnwise_data.tolist() == [[64, -127, 0, 44], [127, 0, 127, -127]]
    assert q.dequantize().tolist() == [[127.0, -64.0, 0.0, 1.0], [254.0, 0.0, 2.0, -4.0]]


def test_internal_quantize_gives_the_bare_storage() -> None:
    q = ToyQuantizer(internal=True).quantize(values(4, 8))
    assert type(q) is ToyStorage
    assert not isinstance(q, torch.Tensor)


def test_quantize_of_a_quantized_tensor_dequantizes_it_first() -> None:
    q = ToyQuantizer(note="first").quantize(values(4, 8))
    again = ToyQuantizer(block=0).quantize(q)
    assert codes_of(again) == codes_of(ToyQuantizer(block=0).quantize(q.dequantize()))


@pytest.mark.parametrize("internal", [False, True])
def test_quantizer_is_unchanged_by_use_and_shared_without_leaks(internal: bool) -> None:
    q = ToyQuantizer(internal=internal)
    before = q.state()
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            t = q.quantize(values(8, 8).requires_grad_())
            t.update_usage(rowwise=False)
            q.quantize_into(values(8, 8), q.make_empty((8, 8), device="cpu"))
            assert t.quantizer == q.with_usage(rowwise=False)
        assert q.state() == before
        assert list(q.quantize(values(8, 8)).inner_tensors()) == list(ToyStorage.inner_names)


NON_CONTIGUOUS = {
    "transposed": lambda: values(12, 8).t(),
    "strided": lambda: values(8, 24)[:, ::2],
    "offset": lambda: values(9, 12)[1:],
    "expanded": lambda: values(1, 12).expand(8, 12),
    "stride-0": lambda: values(8, 1).expand(8, 12),
    "permuted-3d": lambda: values(3, 4, 8).permute(1, 2, 0).reshape(8, 4, 3).permute(2, 0, 1),
    "channels-last": lambda: values(2, 4, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("make", NON_CONTIGUOUS.values(), ids=NON_CONTIGUOUS)
def test_input_of_any_strides_gives_what_its_contiguous_copy_gives(make: Any) -> None:
    x, q = make(), ToyQuantizer()
    t = q.quantize(x)
    assert codes_of(t) == codes_of(q.quantize(x.contiguous()))
    assert t.is_contiguous()
    into = q.make_empty(x.shape, device="cpu")
    q.quantize_into(x, into)
    assert codes_of(into) == codes_of(t)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (2, 0, 8)])
def test_zero_size_tensor_has_the_described_buffers(shape: tuple[int, ...]) -> None:
    q = ToyQuantizer().quantize(torch.empty(shape))
    assert q.shape == shape
    assert {n: tuple(t.shape) for n, t in q.inner_tensors().items()} == {
        n: s.shape for n, s in q.quantizer.describe_buffers(shape).items()
    }
    assert q.dequantize().shape == shape


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (
            torch.zeros(4, 8, dtype=torch.float64),
            DtypeError,
            "toy: x must be one of float32, bfloat16, float16, got float64; cast it first",
        ),
        (
            torch.zeros(4, 8, dtype=torch.int64),
            DtypeError,
            "toy: x must be one of float32, bfloat16, float16, got int64; cast it first",
        ),
        (torch.zeros(4, 6), ShapeError, "toy: K must be a multiple of 4, got 6 in (4, 6)"),
        (torch.zeros(6, 4), ShapeError, "toy: M must be a multiple of 4, got 6 in (6, 4)"),
    ],
)
def test_input_that_does_not_fit_is_refused(x: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        ToyQuantizer().quantize(x)


def test_a_shape_rule_binds_only_the_plane_it_concerns() -> None:
    q = ToyQuantizer()
    assert q.with_usage(columnwise=False).quantize(values(3, 8)).shape == (3, 8)
    assert q.with_usage(rowwise=False).quantize(values(8, 3)).shape == (8, 3)


def test_quantize_for_no_usage_is_refused() -> None:
    message = "toy: neither rowwise nor columnwise is on; turn one on with with_usage()"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        ToyQuantizer(rowwise=False, columnwise=False).quantize(values(4, 8))


@pytest.mark.parametrize("dtype", te_proto.layout.INPUT_DTYPES, ids=str)
def test_nominal_dtype_is_the_inputs(dtype: torch.dtype) -> None:
    x = values(4, 8, dtype=dtype)
    q = ToyQuantizer().quantize(x)
    assert q.dtype == q.dequantize().dtype == dtype
    assert q.dequantize(torch.float32).dtype == torch.float32


# -- quantize_into ------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("options", [{}, {"rowwise": False}, {"columnwise": False}], ids=str)
def test_quantize_into_keeps_the_memory_and_writes_what_quantize_gives(
    internal: bool, options: dict[str, bool]
) -> None:
    q = ToyQuantizer(internal=internal, **options)
    out = q.quantize(values(8, 8, seed=1))
    pointers = {n: t.data_ptr() for n, t in out.inner_tensors().items()}
    q.quantize_into(values(8, 8, seed=2), out)
    assert {n: t.data_ptr() for n, t in out.inner_tensors().items()} == pointers
    assert codes_of(out) == codes_of(q.quantize(values(8, 8, seed=2)))


@pytest.mark.parametrize(("flag", "written"), [(1.0, False), (0.0, True), (0.5, True)])
def test_noop_of_exactly_one_leaves_every_byte(flag: float, written: bool) -> None:
    q = ToyQuantizer()
    out = q.quantize(values(4, 8, seed=1))
    before = codes_of(out)
    q.quantize_into(values(4, 8, seed=2), out, noop=torch.tensor([flag]))
    assert (codes_of(out) != before) is written


def test_quantize_into_takes_a_quantized_source() -> None:
    q, source = ToyQuantizer(), ToyQuantizer(block=0).quantize(values(4, 8))
    out = q.make_empty((4, 8), device="cpu")
    q.quantize_into(source, out)
    assert codes_of(out) == codes_of(q.quantize(source.dequantize()))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            lambda: Q.replace(block=8, columnwise=False).quantize(values(4, 8)), id="block"
        ),
        pytest.param(lambda: Q.quantize(values(4, 8)), id="usage"),
        pytest.param(
            lambda: Q.replace(columnwise=False, rounding=Rounding.ZERO).quantize(values(4, 8)),
            id="arithmetic",
        ),
        pytest.param(lambda: SamePlain(columnwise=False).quantize(values(4, 8)), id="class"),
        pytest.param(lambda: values(4, 8), id="plain"),
    ],
)
def test_quantize_into_what_another_quantizer_describes_is_refused(given: Any) -> None:
    out, q = given(), Q.replace(columnwise=False)
    before = codes_of(out) if isinstance(out, ToyTensor) else out.tolist()
    message = (
        f"toy: out must be described by {q}, got {getattr(out, 'quantizer', 'Tensor')}; "
        "use its own quantizer, or quantize anew"
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        q.quantize_into(values(4, 8, seed=1), out)
    assert (codes_of(out) if isinstance(out, ToyTensor) else out.tolist()) == before


def test_quantize_into_another_shape_is_refused() -> None:
    message = "toy: out must have the shape of x, (8, 4), got (4, 8)"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        Q.quantize_into(values(8, 4), Q.quantize(values(4, 8)))


def test_noop_of_another_kind_is_refused() -> None:
    out = ToyQuantizer().make_empty((4, 8), device="cpu")
    with pytest.raises(
        DtypeError, match=r"^toy: noop must be one float32 element on cpu, got torch.bool"
    ):
        ToyQuantizer().quantize_into(values(4, 8), out, noop=torch.tensor(True))
    for noop in (torch.zeros(2), torch.zeros(1, device="meta")):
        with pytest.raises(DeviceError, match="^toy: noop must be one float32 element on cpu"):
            ToyQuantizer().quantize_into(values(4, 8), out, noop=noop)


# -- arguments of the call ----------------------------------------------------------------------


def test_call_argument_reaches_the_format_and_changes_no_field() -> None:
    q, rng = ShiftedQuantizer(), torch.tensor([3, 0])
    want = codes_of(Q.quantize(values(4, 8) + 3))
    assert codes_of(q.quantize(values(4, 8), rng=rng)) == want
    out = q.make_empty((4, 8), device="cpu")
    q.quantize_into(values(4, 8), out, rng=rng)
    assert codes_of(out) == want
    assert q == ShiftedQuantizer()


@pytest.mark.parametrize(
    ("q", "given", "rule"),
    [
        (ShiftedQuantizer(), {}, "needs rng with the call, got None"),
        (ShiftedQuantizer(shifted=False), {"rng": "r"}, "takes no rng with the call, got r"),
        (ToyQuantizer(), {"group": "dp"}, "takes no group with the call, got dp"),
    ],
    ids=["missing", "not-with-these-options", "not-in-this-format"],
)
def test_call_argument_that_is_missing_or_of_no_use_is_refused(
    q: Any, given: dict[str, Any], rule: str
) -> None:
    out = Q.make_empty((4, 8), device="cpu") if type(q) is ToyQuantizer else None
    with pytest.raises(UsageError, match=f"^{re.escape(f'toy: {q} {rule}')}$"):
        q.quantize(values(4, 8), **given)
    if out is not None:
        with pytest.raises(UsageError, match=f"^{re.escape(f'toy: {q} {rule}')}$"):
            q.quantize_into(values(4, 8), out, **given)
