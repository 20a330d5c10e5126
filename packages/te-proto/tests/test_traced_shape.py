# SPDX-License-Identifier: Apache-2.0
"""A buffer with a size that is 1 for some inputs: held flat in a graph, in its shape outside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from te_toy import proto, values
from torch.compiler import is_compiling

from te_proto import BufferSpec, QuantizedStorage, QuantizedTensor, Quantizer, custom_op
from te_proto.errors import LayoutError
from te_proto.storage import InnerTensor
from te_proto.testing import count_compiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

ROWS = (8, 24, 32, 64, 8, 100)


class FlatStorage(QuantizedStorage):
    codes: InnerTensor
    maxima: InnerTensor

    @classmethod
    def traced_shape(
        cls, name: str, shape: tuple[int, ...], quantizer: Quantizer
    ) -> tuple[int, ...]:
        return (math.prod(shape),) if name == "maxima" else shape

    @classmethod
    def settle_inner(
        cls, inner: Mapping[str, Tensor], quantizer: Quantizer, shape: Sequence[int]
    ) -> Mapping[str, Tensor]:
        maxima = quantizer.describe_buffers(shape)["maxima"].shape
        flat = {"maxima": inner["maxima"].view(maxima)} if inner["maxima"].dim() == 1 else {}
        return {**inner, **flat}


class FlatTensor(FlatStorage, QuantizedTensor):
    pass


class FlatQuantizer(Quantizer):
    """Round to int8, and keep the maximum of each 32 rows: ``[1, K]`` for few rows."""

    format_name: ClassVar[str] = "flat"
    storage_class: ClassVar = FlatStorage
    tensor_class: ClassVar = FlatTensor

    def alignment(self) -> tuple[int, int]:
        return 1, 1

    def check_shape(self, shape: Sequence[int]) -> None:
        pass

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        m, k = shape
        return {
            "codes": BufferSpec((m, k), torch.int8),
            "maxima": BufferSpec(((m + 31) // 32, k), torch.float32),
        }

    def quantize_impl(self, x: Tensor) -> dict[str, Tensor]:
        m, k = x.shape
        count = (m + 31) // 32
        rows = torch.arange((count + 1) * 32).clamp_max(m - 1)
        maxima = x.index_select(0, rows).reshape(count + 1, 32, k).amax(1)
        flat = maxima.reshape(-1)[: count * k].clone()
        return {"codes": x.to(torch.int8), "maxima": flat if is_compiling() else maxima[:count]}

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return inner["codes"].to(dtype)


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")


def test_quantize_is_one_graph_and_gives_the_buffers_of_eager() -> None:
    quantizer = FlatQuantizer()
    with count_compiles() as counts:
        run = compiled(quantizer.quantize)
        for m in ROWS:
            x = values(m, 6, seed=m)
            q, expected = run(x), quantizer.quantize(x)
            assert q.maxima.shape == expected.maxima.shape == (-(-m // 32), 6)
            assert torch.equal(q.maxima, expected.maxima)
            assert torch.equal(q.codes, expected.codes)
    assert (counts.graphs, counts.recompiles) == (1, 0)


def test_create_tensor_is_one_graph_and_gives_the_layout_of_eager() -> None:
    with count_compiles() as counts:
        run = compiled(lambda x: proto(x.shape, FlatQuantizer()).create_tensor())
        for m in ROWS:
            q = run(values(m, 6))
            assert q.maxima.shape == (-(-m // 32), 6)
            assert q.maxima.is_contiguous()
    assert (counts.graphs, counts.recompiles) == (1, 0)


def test_write_into_an_input_of_the_graph_takes_the_flat_buffer() -> None:
    quantizer = FlatQuantizer()

    def write(q: FlatTensor, x: Tensor) -> FlatTensor:
        return q.quantize_(x)

    def copy(q: FlatTensor, x: Tensor) -> FlatTensor:
        return q.copy_(quantizer.quantize(x))

    for fn in (write, copy):
        with count_compiles():
            run = compiled(fn)
            for m in (24, 64):
                q, x = quantizer.quantize(values(m, 6)), values(m, 6, seed=1)
                run(q, x)
                assert torch.equal(q.maxima, quantizer.quantize(x).maxima)


@custom_op("te_flat::maxima", outputs=lambda q: proto((6,)))
def column_maxima(q: FlatStorage) -> Tensor:
    maxima: Tensor = q.maxima
    return maxima.amax(0)


def test_op_gets_the_buffer_in_its_shape() -> None:
    quantizer = FlatQuantizer(internal=True)
    with count_compiles() as counts:
        run = compiled(lambda x: column_maxima(quantizer.quantize(x)))
        for m in ROWS:
            x = values(m, 6, seed=m)
            assert torch.equal(run(x), x.amax(0))
    assert (counts.graphs, counts.recompiles) == (1, 0)


def test_settled_buffers_are_checked() -> None:
    inner = {"codes": torch.zeros(64, 6, dtype=torch.int8), "maxima": torch.zeros(12)}
    assert FlatTensor(inner, FlatQuantizer(), (64, 6), torch.float32).maxima.shape == (2, 6)
    with pytest.raises(LayoutError, match=r"^flat: maxima of a tensor of shape \(64, 6\) must be"):
        FlatTensor(inner | {"maxima": torch.zeros(6, 2)}, FlatQuantizer(), (64, 6), torch.float32)
