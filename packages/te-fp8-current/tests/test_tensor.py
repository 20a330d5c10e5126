# SPDX-License-Identifier: Apache-2.0
"""Views, slices, transposition: codes of the part under the scale of the whole, or a fallback."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_fp8_current import Float8Tensor
from te_proto.errors import FallbackError, ShapeError, UsageError
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """An op that is claimed exact must not dequantize on the way."""
    with te_proto.fallback("error"):
        yield


@pytest.fixture
def quantizers(options: Options) -> list[Quantizer]:
    return [Quantizer(**fields) for fields in options]


def assert_is(found: Any, codes: Tensor, scale_inv: Tensor, quantizer: Quantizer) -> None:
    """Assert that ``found`` is the tensor of ``codes`` in all that ``quantizer`` describes."""
    assert type(found) is Float8Tensor
    assert found.quantizer == quantizer
    assert found.shape == codes.shape
    moved = codes.movedim(-1, 0) if codes.dim() else codes
    wanted = {"fp8_data": codes, "data_transpose": moved, "fp8_scale_inv": scale_inv}
    inner = found.inner_tensors()
    assert list(inner) == list(quantizer.describe_buffers(codes.shape))
    for name, buffer in inner.items():
        assert_same_bits(buffer, wanted[name], what=name)
        assert buffer.is_contiguous()


def codes_of(q: Any) -> Tensor:
    """Return the codes in the order of the logical shape, whatever is held."""
    codes = q.fp8_data
    if codes is None:
        codes = q.data_transpose.movedim(0, -1) if q.dim() else q.data_transpose
    return codes.contiguous()


# -- parts ----------------------------------------------------------------------------------------

PARTS = [
    pytest.param(lambda t: [t.narrow(0, 1, 3), t.narrow(-1, 2, 1)], id="narrow"),
    pytest.param(lambda t: [t[1:], t[:-2], t[2:3], t[3:3], t[..., 1:4], t[:, -1:]], id="slices"),
    pytest.param(lambda t: t.split(2), id="split"),
    pytest.param(lambda t: t.split([1, 4], dim=-1), id="split-sizes-last"),
    pytest.param(lambda t: t.chunk(3), id="chunk"),
    pytest.param(lambda t: t.chunk(2, dim=-1), id="chunk-last"),
    pytest.param(lambda t: [t[2], t[-1], t[:, 1], t[..., 0], t.select(1, 2)], id="select"),
    pytest.param(lambda t: t.unbind(), id="unbind"),
    pytest.param(lambda t: t.unbind(-1), id="unbind-last"),
]


@pytest.mark.parametrize("shape", [(5, 5), (5, 3, 5)], ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_part_keeps_codes_and_scale(
    parts: Callable[[Any], Any], shape: tuple[int, ...], quantizers: list[Quantizer]
) -> None:
    x = hostile(shape, torch.float32)
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        found, expected = parts(q), parts(codes_of(q))
        assert len(found) == len(expected) > 1
        for part, codes in zip(found, expected, strict=True):
            assert_is(part, codes, q.fp8_scale_inv, quantizer)


def test_part_of_a_line_is_a_line_or_a_scalar(quantizers: list[Quantizer]) -> None:
    for quantizer in quantizers:
        q = quantizer.quantize(hostile((7,), torch.float32))
        for part in (lambda t: t[2:5], lambda t: t[3], lambda t: t[-1]):
            assert_is(part(q), part(codes_of(q)), q.fp8_scale_inv, quantizer)


def test_part_and_transpose_are_copies_that_refuse_writes() -> None:
    for separate in (False, True):
        q = Quantizer(separate_transpose=separate).quantize(torch.ones(4, 6))
        held = {t.data_ptr() for t in q.inner_tensors().values()}
        for part in (q[:2], q[:, 1:3], q[1], q.t()):
            assert not held & {t.data_ptr() for t in part.inner_tensors().values()}
            with pytest.raises(UsageError, match="a write would not reach the whole"):
                part.copy_(torch.zeros(part.shape))
            part.clone().copy_(torch.zeros(part.shape))
        assert q.dequantize().unique().tolist() == [1.0]


def test_slice_with_a_step_is_refused() -> None:
    q = Quantizer().quantize(torch.ones(4, 6))
    message = (
        r"^fp8_current: a slice must have step 1, got 2 on axis 0; call .dequantize\(\) first$"
    )
    with pytest.raises(ShapeError, match=message):
        q[::2]


# -- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.view(4, 6, 5), id="rows-split"),
        pytest.param(lambda t: t.view(2, 2, 6, 5), id="rows-split-twice"),
        pytest.param(lambda t: t.view(2, 12, 5).view(-1, 5), id="rows-merged"),
        pytest.param(lambda t: t.reshape(6, 4, 5), id="reshape"),
        pytest.param(lambda t: t.unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda t: t.unsqueeze(0).squeeze(0), id="squeeze"),
        pytest.param(lambda t: t.view(t.shape), id="same"),
    ],
)
def test_view_that_keeps_the_last_axis_shares_the_memory(
    view: Callable[[Any], Any], quantizers: list[Quantizer]
) -> None:
    x = hostile((24, 5))
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        viewed = view(q)
        assert_is(viewed, view(codes_of(q)), q.fp8_scale_inv, quantizer)
        viewed.copy_(torch.zeros(viewed.shape))  # a view: the write reaches the whole
        assert not q.dequantize().any()


@pytest.mark.parametrize("shape", [(5, 24), (120,), (-1, 1), (3, 2, 20), (1, 120)], ids=str)
def test_view_with_another_last_axis_is_exact(
    shape: tuple[int, ...], quantizers: list[Quantizer]
) -> None:
    for quantizer in quantizers:
        q = quantizer.quantize(hostile((24, 5)))
        viewed = q.view(shape)
        assert_is(viewed, codes_of(q).view(shape), q.fp8_scale_inv, quantizer)
        assert_same_bits(viewed.dequantize(), q.dequantize().view(shape))
        if not quantizer.separate_transpose:
            viewed.copy_(torch.zeros(viewed.shape))
            assert not q.dequantize().any()
        elif quantizer.columnwise:  # the transpose was made anew, and the rest with it
            assert not {t.data_ptr() for t in q.inner_tensors().values()} & {
                t.data_ptr() for t in viewed.inner_tensors().values()
            }
            with pytest.raises(UsageError, match="a write would not reach the whole"):
                viewed.copy_(torch.zeros(viewed.shape))


@pytest.mark.parametrize(("old", "new"), [((), (1,)), ((1,), ()), ((1,), (1, 1))], ids=str)
def test_view_of_one_element(
    old: tuple[int, ...], new: tuple[int, ...], quantizers: list[Quantizer]
) -> None:
    for quantizer in quantizers:
        q = quantizer.quantize(torch.full(old, -3.0))
        assert_is(q.view(new), codes_of(q).view(new), q.fp8_scale_inv, quantizer)


def test_view_of_an_empty_tensor(quantizers: list[Quantizer]) -> None:
    for quantizer in quantizers:
        q = quantizer.quantize(torch.empty(0, 6))
        assert_is(q.view(2, 0, 3), codes_of(q).view(2, 0, 3), q.fp8_scale_inv, quantizer)


# -- transposition and concatenation --------------------------------------------------------------


@pytest.mark.parametrize(
    "transpose",
    [
        pytest.param(lambda t: t.t(), id="t"),
        pytest.param(lambda t: t.T, id="T"),
        pytest.param(lambda t: t.transpose(-1, 0), id="transpose"),
        pytest.param(lambda t: t.permute(1, 0), id="permute"),
    ],
)
@pytest.mark.parametrize("shape", [(5, 9), (1, 4), (4, 1), (0, 3)], ids=str)
def test_transpose_is_exact(
    transpose: Callable[[Any], Any],
    shape: tuple[int, int],
    quantizers: list[Quantizer],
    assert_same_planes: Same,
) -> None:
    x = hostile(shape)
    for quantizer in quantizers:
        q = quantizer.quantize(x)
        turned = transpose(q)
        if quantizer.separate_transpose:  # the buffers change places
            expected = quantizer.with_usage(
                rowwise=quantizer.columnwise, columnwise=quantizer.rowwise
            )
        else:
            expected = quantizer
        # dense: what its prototype says
        assert turned.stride() == torch.empty(turned.shape).stride()
        assert turned.quantizer == expected
        assert_same_planes(turned, expected.quantize(x.t()))
        assert_same_planes(transpose(turned), q)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(lambda q: torch.cat([q, q]), "aten.cat.default", id="cat"),
        pytest.param(lambda q: q.unsqueeze(0).transpose(1, 2), "aten.transpose.int", id="3-d"),
        pytest.param(lambda q: torch.cos(q), "aten.cos.default", id="cos"),
    ],
)
def test_op_without_a_quantized_form_falls_back_and_says_so(
    op: Callable[[Tensor], Tensor], name: str
) -> None:
    q = Quantizer().quantize(hostile((4, 6)))
    with pytest.raises(FallbackError, match=f"^fp8_current: {name} has no quantized form"):
        op(q)
    with te_proto.fallback("allow"):
        plain = op(q)
    assert type(plain) is torch.Tensor
    assert_same_bits(plain, op(q.dequantize()))


# -- usages ---------------------------------------------------------------------------------------

CHANGES = list(itertools.product((None, True, False), repeat=2))


@pytest.mark.parametrize("in_place", [False, True], ids=["with_usage", "update_usage"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("shape", [(5, 9), (2, 3, 5), (7,), ()], ids=str)
def test_one_buffer_serves_every_usage(
    in_place: bool, internal: bool, shape: tuple[int, ...], options: Options
) -> None:
    for fields, (rowwise, columnwise) in itertools.product(options, CHANGES):
        if fields["separate_transpose"]:
            continue
        quantizer = Quantizer(**fields, internal=internal)
        q = quantizer.quantize(hostile(shape, torch.float32))
        before = {n: t.data_ptr() for n, t in q.inner_tensors().items()}
        plain = q.dequantize()
        if in_place:
            q.update_usage(rowwise=rowwise, columnwise=columnwise)
        else:
            q = q.with_usage(rowwise=rowwise, columnwise=columnwise)
        assert {n: t.data_ptr() for n, t in q.inner_tensors().items()} == before
        assert q.quantizer == quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        assert_same_bits(q.dequantize(), plain)


@pytest.mark.parametrize("in_place", [False, True], ids=["with_usage", "update_usage"])
@pytest.mark.parametrize("shape", [(5, 9), (2, 3, 5), (7,), ()], ids=str)
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
def test_separate_transpose_is_dropped_and_made_and_codes_are_only_dropped(
    in_place: bool,
    shape: tuple[int, ...],
    internal: bool,
    options: Options,
    assert_same_planes: Same,
) -> None:
    x = hostile(shape, torch.float32)
    for fields, (rowwise, columnwise) in itertools.product(options, CHANGES):
        if not fields["separate_transpose"]:
            continue
        quantizer = Quantizer(**fields, internal=internal)
        wanted = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        q = quantizer.quantize(x)
        before = {n: t.data_ptr() for n, t in q.inner_tensors().items()}
        change = q.update_usage if in_place else q.with_usage
        if wanted.rowwise and not quantizer.rowwise:
            with pytest.raises(UsageError):
                change(rowwise=rowwise, columnwise=columnwise)
            assert_same_planes(q, quantizer.quantize(x))
            assert q.quantizer == quantizer
            continue
        changed = change(rowwise=rowwise, columnwise=columnwise)
        q = q if in_place else changed
        assert q.quantizer == wanted
        kept = {n: t.data_ptr() for n, t in q.inner_tensors().items() if n in before}
        assert kept == {n: before[n] for n in kept}
        if wanted.rowwise or wanted.columnwise:
            assert_same_planes(q, wanted.quantize(x))
        else:
            assert list(q.inner_tensors()) == ["fp8_scale_inv"]


def test_codes_that_were_dropped_are_named() -> None:
    q = Quantizer(separate_transpose=True, rowwise=False).quantize(torch.ones(3, 5))
    with pytest.raises(UsageError) as raised:
        q.update_usage(rowwise=True)
    assert str(raised.value) == (
        "fp8_current: the tensor does not hold fp8_data and they cannot be derived from "
        "data_transpose, fp8_scale_inv; quantize the high-precision tensor with that usage"
    )
    q.update_usage(columnwise=False)
    assert (q.shape, q.nbytes) == ((3, 5), 4)
    for use in (q.dequantize, lambda: q.with_usage(columnwise=True)):
        with pytest.raises(UsageError):
            use()
    with pytest.raises(UsageError) as raised:
        q.dequantize()
    assert str(raised.value) == (
        "fp8_current: the tensor holds no codes, so there is nothing to dequantize"
    )


def test_transpose_made_later_is_memory_of_its_own() -> None:
    for shape in ((5, 9), (1, 4), (7,), ()):
        q = Quantizer(separate_transpose=True, columnwise=False).quantize(torch.ones(shape))
        both = q.with_usage(columnwise=True)
        assert both.data_transpose.data_ptr() != both.fp8_data.data_ptr()
        assert both.data_transpose.stride() == torch.empty(both.data_transpose.shape).stride()


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True], ids=["one-buffer", "separate"])
def test_views_parts_and_usages_are_one_graph(separate: bool) -> None:
    quantizer = Quantizer(separate_transpose=separate)

    def work(x: Tensor) -> tuple[Tensor, ...]:
        q = quantizer.quantize(x)
        return q.view(-1, 4, 6)[1:3].dequantize(), q.t().dequantize(), q.view(-1, 12).dequantize()

    with count_compiles() as counted:
        compiled = torch.compile(work, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (32, 64, 96, 160):
            x = torch.randn(m, 6, generator=torch.Generator().manual_seed(m))
            for found, expected in zip(compiled(x), work(x), strict=True):
                assert_same_bits(found, expected)
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
