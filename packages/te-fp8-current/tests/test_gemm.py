# SPDX-License-Identifier: Apache-2.0
"""Operands of ``torch.nn.functional.scaled_mm``: the codes as they lie, summed axis last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from te_fp8_current import Float8CurrentScalingQuantizer as Quantizer
from te_proto.testing import assert_same_bits, scaled_mm_on_cpu

if TYPE_CHECKING:
    from torch import Tensor

    Options = list[dict[str, Any]]

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 5), (7,), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_operand_is_a_view_of_what_is_held(
    columnwise: bool, shape: tuple[int, ...], internal: bool, options: Options
) -> None:
    m, k = torch.Size(shape[:-1]).numel(), shape[-1]
    for fields in options:
        q = Quantizer(**fields, internal=internal).quantize(random(*shape))
        operand = q.gemm_operand(columnwise=columnwise)
        assert operand is not None
        assert (operand.scaling, operand.swizzle) == (
            ScalingType.TensorWise,
            SwizzleType.NO_SWIZZLE,
        )
        assert operand.scale is q.fp8_scale_inv
        assert operand.data.dtype == KINDS[fields["dtype"]]
        values = q.dequantize(torch.float32).reshape(m, k)
        assert_same_bits(operand.data.float() * operand.scale, values.t() if columnwise else values)
        held = [t for n, t in q.inner_tensors().items() if n != "fp8_scale_inv"]
        assert operand.data.untyped_storage().data_ptr() in [
            t.untyped_storage().data_ptr() for t in held
        ]


def test_operand_is_read_in_order_where_it_has_a_buffer_of_its_own() -> None:
    q = Quantizer(separate_transpose=True).quantize(random(6, 10))
    assert q.gemm_operand(columnwise=False).data.data_ptr() == q.fp8_data.data_ptr()
    assert q.gemm_operand(columnwise=True).data.data_ptr() == q.data_transpose.data_ptr()
    for columnwise in (False, True):
        assert q.gemm_operand(columnwise=columnwise).data.is_contiguous()


def test_no_codes_no_operand() -> None:
    q = Quantizer(separate_transpose=True).quantize(random(6, 10))
    empty = q.with_usage(rowwise=False, columnwise=False)
    assert empty.gemm_operand(columnwise=False) is None


@scaled_mm_on_cpu
@pytest.mark.parametrize("a_dtype", KINDS)
@pytest.mark.parametrize("b_dtype", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(32, 48, 64), (5, 16, 32), (33, 24, 40), (1, 3, 7), (0, 16, 32), (8, 16, 0)]
)
def test_scaled_product_is_that_of_the_dequantized_values(
    a_dtype: str, b_dtype: str, m: int, n: int, k: int
) -> None:
    x = Quantizer(dtype=a_dtype).quantize(random(m, k))
    w = Quantizer(dtype=b_dtype).quantize(random(n, k, seed=1))
    a, b = x.gemm_operand(columnwise=False), w.gemm_operand(columnwise=False)
    product = scaled_mm(
        a.data, b.data.t(), a.scale, a.scaling, b.scale, b.scaling, output_dtype=torch.float32
    )
    exact = x.dequantize().double() @ w.dequantize().double().t()
    assert product.shape == (m, n)
    # float32 sums of k products, scaled
    torch.testing.assert_close(product.double(), exact, rtol=1e-6, atol=1e-5)
