# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that some version of torch fails, each named after the reason."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from te_proto._compat import HAS_SCALED_MM_ON_CPU, TRACES_NEW_QUANTIZERS, TRACES_SUPER

new_quantizer_in_graph = pytest.mark.xfail(
    not TRACES_NEW_QUANTIZERS,
    reason="torch 2.11 cannot use a quantizer that is made inside a graph",
    strict=True,
)
super_in_graph = pytest.mark.xfail(
    not TRACES_SUPER, reason="torch 2.11 knows no super() of a quantizer in a graph", strict=True
)
scaled_mm_on_cpu = pytest.mark.xfail(
    not HAS_SCALED_MM_ON_CPU, reason="torch 2.11 has no scaled_mm on a CPU", strict=True
)


def crowded_by(*tritons: str) -> pytest.MarkDecorator:
    """Mark a kernel to which these give more registers than its bound, or spill.

    Args:
        tritons: minor versions, such as ``"3.8"``; drop one when its torch is no longer supported.
    """
    try:
        found = ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:
        found = "none"
    reason = f"triton {found} gives the kernel more registers, or spills"
    return pytest.mark.xfail(found in tritons, reason=reason, strict=True)
