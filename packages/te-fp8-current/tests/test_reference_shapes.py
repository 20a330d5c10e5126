# SPDX-License-Identifier: Apache-2.0
"""Shapes, strides, memory, parts and compilation of the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_fp8_current import reference
from te_proto.testing import assert_same_bits, count_compiles, hostile

if TYPE_CHECKING:
    from collections.abc import Callable

Buffers = dict[str, Tensor]
ALL = (torch.float32, torch.bfloat16, torch.float16)


def quantize(
    x: Tensor,
    *,
    dtype: str = "e4m3",
    pow_2: bool = False,
    data: bool = True,
    transpose: bool = True,
) -> Buffers:
    return reference.quantize(
        x,
        reference.amax(x),
        dtype=dtype,
        force_pow_2_scales=pow_2,
        amax_epsilon=0.0,
        data=data,
        transpose=transpose,
    )


def assert_same_buffers(actual: Buffers, expected: Buffers) -> None:
    assert list(actual) == list(expected)
    for name, buffer in expected.items():
        assert_same_bits(actual[name], buffer, what=name)


def storages(buffers: Buffers) -> int:
    return len({t.untyped_storage().data_ptr() for t in buffers.values()})


@pytest.mark.parametrize(
    ("shape", "transpose"),
    [
        pytest.param((), (), id="scalar"),
        pytest.param((5,), (5,), id="line"),
        pytest.param((3, 7), (7, 3), id="matrix"),
        pytest.param((2, 3, 7), (7, 2, 3), id="three-axes"),
        pytest.param((2, 3, 4, 5), (5, 2, 3, 4), id="four-axes"),
        pytest.param((1, 7), (7, 1), id="one-row"),
        pytest.param((7, 1), (1, 7), id="one-column"),
    ],
)
def test_transpose_has_the_last_axis_in_front_and_memory_of_its_own(
    shape: tuple[int, ...], transpose: tuple[int, ...]
) -> None:
    x = hostile(shape, torch.float32, seed=1)
    both = quantize(x)
    expected = both["fp8_data"].movedim(-1, 0) if shape else both["fp8_data"]
    assert both["data_transpose"].shape == transpose
    assert_same_bits(both["data_transpose"], expected)
    assert storages(both) == 3
    for name, buffer in both.items():
        assert buffer.stride() == torch.empty(buffer.shape).stride()
        assert buffer.untyped_storage().nbytes() == buffer.nbytes, name
    alone = quantize(x, data=False)
    assert list(alone) == ["data_transpose", "fp8_scale_inv"]
    assert_same_bits(alone["data_transpose"], both["data_transpose"])
    assert alone["data_transpose"].stride() == both["data_transpose"].stride()
    back = reference.move_front_to_last(alone["data_transpose"], shape)
    assert_same_bits(back, both["fp8_data"])


VIEWS = [
    pytest.param(lambda x: x.t(), id="transposed"),
    pytest.param(lambda x: x[:, ::2], id="every-second-column"),
    pytest.param(lambda x: x[::3], id="every-third-row"),
    pytest.param(lambda x: x[:1].expand(8, -1), id="expanded-rows"),
    pytest.param(lambda x: x[:, :1].expand(-1, 4), id="expanded-columns"),
    pytest.param(lambda x: x[:, :1], id="one-column"),
    pytest.param(lambda x: x[3:, 5:], id="offset"),
    pytest.param(lambda x: x.view(6, 4, 20).transpose(0, 1), id="three-axes"),
    pytest.param(
        lambda x: x.view(2, 3, 4, 20).to(memory_format=torch.channels_last), id="channels-last"
    ),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("x_dtype", ALL)
def test_strides_of_the_input_do_not_matter(
    view: Callable[[Tensor], Tensor], x_dtype: torch.dtype
) -> None:
    x = view(hostile((24, 20), x_dtype, seed=2, nonfinite=True))
    assert not x.is_contiguous()
    out = quantize(x)
    assert_same_buffers(out, quantize(x.clone(memory_format=torch.contiguous_format)))
    for buffer in out.values():
        assert buffer.stride() == torch.empty(buffer.shape).stride()


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", ALL)
@pytest.mark.parametrize(
    "special",
    [None, math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0],
    ids=["hostile", "nan", "-nan", "inf", "-inf", "0", "-0"],
)
def test_parts_give_the_bytes_of_the_whole(
    x_dtype: torch.dtype, special: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = hostile((33, 32), x_dtype, seed=3)
    if special is not None:
        x = torch.full_like(x, special)
        x[32, 31] = x.new_tensor(math.nan if special == 0.0 else special)
    whole = quantize(x, transpose=False)
    values = reference.dequantize(
        whole["fp8_data"], whole["fp8_scale_inv"], dtype="e4m3", out_dtype=x_dtype
    )
    amax = reference.amax(x)
    monkeypatch.setattr(reference, "_PART", 100)  # the last is shorter
    assert reference._is_long(x)
    assert_same_bits(reference.amax(x), amax)
    parts = quantize(x, transpose=False)
    assert_same_buffers(parts, whole)
    again = reference.dequantize(
        parts["fp8_data"], parts["fp8_scale_inv"], dtype="e4m3", out_dtype=x_dtype
    )
    assert_same_bits(again.nan_to_num(nan=1.0), values.nan_to_num(nan=1.0))
    assert_same_bits(again.isnan(), values.isnan())


@pytest.mark.parametrize("x_dtype", ALL)
def test_amax_of_one_value_is_its_magnitude(
    x_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if x_dtype == torch.float32:
        edges = torch.tensor([0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000])
        nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF])
        bits = torch.cat([edges, nans, edges - 2**31, nans - 2**31]).to(torch.int32)
    else:
        bits = torch.arange(-(2**15), 2**15, 7).to(torch.int16)  # all exponents, NaN and infinity
        bits = torch.cat([bits, torch.tensor([0x7C00, 0x7F80, 0x7C01, 0x7F81]).to(torch.int16)])
    values = bits.view(x_dtype)
    expected = values.abs().nan_to_num(nan=0.0, posinf=math.inf).float()
    monkeypatch.setattr(reference, "_PART", 1)
    found = [reference.amax(pair) for pair in torch.stack([values, values], 1).unbind()]
    assert_same_bits(torch.cat(found), expected)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: torch.empty(1000, 1000, device="meta"), id="meta"),
        pytest.param(lambda x: x.t(), id="strided"),
        pytest.param(lambda x: x[:1], id="short"),
    ],
)
def test_only_long_real_contiguous_tensors_are_taken_in_parts(
    make: Callable[[Tensor], Tensor],
) -> None:
    x = torch.empty(1000, 1000)
    assert reference._is_long(x)
    assert not reference._is_long(make(x))
    with FakeTensorMode():
        assert not reference._is_long(torch.empty(1000, 1000))


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "pow_2", "which"),
    [
        pytest.param(torch.float32, "e4m3", False, {}, id="float32"),
        pytest.param(torch.bfloat16, "e5m2", True, {}, id="bfloat16-e5m2-pow-2"),
        pytest.param(torch.float16, "e4m3", False, {"transpose": False}, id="float16-one-buffer"),
        pytest.param(torch.bfloat16, "e4m3", True, {"data": False}, id="bfloat16-transpose"),
    ],
)
def test_one_graph_for_every_row_count(
    backend: str, x_dtype: torch.dtype, dtype: str, pow_2: bool, which: dict[str, bool]
) -> None:
    def there_and_back(x: Tensor) -> tuple[Buffers, Tensor]:
        # exact neighbours on both sides: Inductor does not round between fused operations
        out = quantize(-x, dtype=dtype, pow_2=pow_2, **which)
        codes = out["fp8_data"] if "fp8_data" in out else out["data_transpose"]
        values = reference.dequantize(codes, out["fp8_scale_inv"], dtype=dtype, out_dtype=x_dtype)
        return out, values.abs()

    with count_compiles() as counts:
        compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend=backend)
        for m in (32, 64, 96, 128, 160, 33):
            for scale in (1.0, 2.0**-90):
                x = hostile((m, 40), x_dtype, seed=m, nonfinite=m == 96) * scale
                out, values = compiled(x)
                expected_out, expected_values = there_and_back(x)
                assert_same_buffers(out, expected_out)
                assert storages(out) == len(out)
                # which NaN it is depends on the instruction that multiplied
                assert_same_bits(values.nan_to_num(nan=-1.0), expected_values.nan_to_num(nan=-1.0))
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


@pytest.mark.parametrize("shape", [(), (5,), (1, 7), (7, 1), (2, 3, 5), (0, 4)], ids=str)
def test_compiled_shapes_have_the_bytes_and_strides_of_eager_ones(shape: tuple[int, ...]) -> None:
    x = hostile(shape, torch.float32, seed=5)
    with count_compiles():
        out = torch.compile(quantize, fullgraph=True, backend="inductor")(x)
    assert_same_buffers(out, quantize(x))
    assert storages(out) == (3 if x.numel() else storages(out))
    for buffer in out.values():
        assert buffer.stride() == torch.empty(buffer.shape).stride()
