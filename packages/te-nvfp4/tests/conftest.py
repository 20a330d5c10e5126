# SPDX-License-Identifier: Apache-2.0
"""Helpers of several test modules, as fixtures: in importlib mode modules import no sibling."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_nvfp4 import NVFP4Quantizer
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from te_proto import QuantizedStorage

RHT = {"with_rht": True, "with_post_rht_amax": True}
CHOOSE = {"nvfp4_use_4over6": True}
FEATURES: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {"with_2d_quantization": True},
    "rht": RHT,
    "rht-unsigned": {**RHT, "with_random_sign_mask": False},
    "sr": {"stochastic_rounding": True},
    "gradient": {**RHT, "stochastic_rounding": True},
    "2d-sr": {"with_2d_quantization": True, "stochastic_rounding": True},
    "row-scaled": {"row_scaled_nvfp4": True},
    "4over6": CHOOSE,
    "4over6-mse-256": {**CHOOSE, "nvfp4_4over6_err_mode": "MSE", "nvfp4_e4m3_max": 256},
    "4over6-fast": {**CHOOSE, "nvfp4_4over6_err_use_fast_math": True},
    "4over6-2d": {**CHOOSE, "with_2d_quantization": True, "nvfp4_e4m3_max": 256},
    "4over6-row-scaled": {**CHOOSE, "row_scaled_nvfp4": True},
}


def legal(fields: dict[str, Any]) -> bool:
    """Whether the kernels can make the planes that are on: the rules of the specification."""
    choose, lines = fields.get("nvfp4_use_4over6"), fields.get("row_scaled_nvfp4")
    if choose and fields["optimize_for_gemm"]:
        return False
    if choose and lines and fields["columnwise"]:
        return False
    return fields["rowwise"] or not (lines or (choose and fields.get("with_2d_quantization")))


@pytest.fixture(scope="session")
def options() -> list[dict[str, Any]]:
    """Return every legal choice of planes, order of scales and feature."""
    usages = ((True, True), (True, False), (False, True))
    found = [
        {"rowwise": row, "columnwise": column, "optimize_for_gemm": swizzled, **feature}
        for feature, (row, column), swizzled in itertools.product(
            FEATURES.values(), usages, (False, True)
        )
    ]
    return [fields for fields in found if legal(fields)]


@pytest.fixture(scope="session")
def dtypes() -> Callable[[dict[str, Any]], tuple[torch.dtype, ...]]:
    """Return the input dtypes that a choice of options takes."""

    def of(fields: dict[str, Any]) -> tuple[torch.dtype, ...]:
        lines = fields.get("row_scaled_nvfp4") and fields["columnwise"]
        if fields.get("with_rht") or lines:
            return (torch.bfloat16,)
        return (torch.float32, torch.bfloat16, torch.float16)

    return of


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """Quantize, with seed and offset where they are asked for."""

    def quantize(
        quantizer: NVFP4Quantizer, x: Tensor, seed: int = 20, offset: int = 3, **into: Any
    ) -> Any:
        call: dict[str, Any] = {}
        if quantizer.stochastic_rounding:
            call["rng"] = torch.tensor([seed, offset], device=x.device)
        if into:
            return quantizer.quantize_into(x, into["out"], into.get("noop"), **call)
        return quantizer.quantize(x, **call)

    return quantize


@pytest.fixture(scope="session")
def level() -> Callable[..., Tensor]:
    """Make a matrix whose every row and column has the same amax in every block of 16.

    A slice then has the amaxes of the whole, and can be compared with itself quantized.
    """

    def make(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        x = hostile(shape, torch.float32, seed=seed, block=(1, 16)).clamp(-96.0, 96.0).to(dtype)
        flat = x.view(-1, x.shape[-1])
        row = torch.arange(flat.shape[0]).unsqueeze(1)
        column = torch.arange(flat.shape[1])
        flat[row % 16 == column % 16] = 112.0
        return x

    return make


@pytest.fixture(scope="session")
def assert_same_planes() -> Callable[[QuantizedStorage, QuantizedStorage], None]:
    """Assert that two tensors hold the same inner tensors, in order and byte for byte."""

    def check(actual: QuantizedStorage, expected: QuantizedStorage) -> None:
        found, wanted = actual.inner_tensors(), expected.inner_tensors()
        assert list(found) == list(wanted)
        for name, buffer in found.items():
            assert_same_bits(buffer, wanted[name], what=name)

    return check


@pytest.fixture(scope="session")
def known() -> Callable[[Any], dict[str, Any]]:
    """Return all that can be known of a tensor, plain or quantized, without its data."""

    def describe(tensor: Any) -> dict[str, Any]:
        facts = {
            name: getattr(tensor, name, None)
            for name in ("shape", "dtype", "device", "requires_grad", "quantizer")
        }
        facts["class"] = type(tensor)
        if hasattr(tensor, "stride"):
            facts["stride"] = tensor.stride()
        if hasattr(tensor, "inner_tensors"):
            # a list, so that the flatten order counts
            facts["inner"] = [
                (n, tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device)
                for n, t in tensor.inner_tensors().items()
            ]
            facts["context"] = tensor.__tensor_flatten__()[1]
        return facts

    return describe
