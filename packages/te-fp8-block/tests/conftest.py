# SPDX-License-Identifier: Apache-2.0
"""Helpers of several test modules, as fixtures: in importlib mode modules import no sibling."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from te_proto.testing import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage


@pytest.fixture(scope="session")
def options() -> list[dict[str, Any]]:
    """Return every choice of quantizer options but ``internal``, in which a plane is on.

    ``optimize_for_gemm``, which changes nothing, and ``amax_epsilon`` change along with the others.
    """
    usages = ((True, True), (True, False), (False, True))
    flags = itertools.product(("e4m3", "e5m2"), usages, (True, False), (1, 2))
    return [
        {
            "dtype": dtype,
            "rowwise": rowwise,
            "columnwise": columnwise,
            "force_pow_2_scales": pow_2,
            "block_scaling_dim": dim,
            "amax_epsilon": 0.0 if pow_2 == (dtype == "e4m3") else 1e-3,
            "optimize_for_gemm": not pow_2,
        }
        for dtype, (rowwise, columnwise), pow_2, dim in flags
    ]


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
