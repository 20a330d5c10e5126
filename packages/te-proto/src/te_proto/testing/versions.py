# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that some version of torch fails, each named after the reason."""

from __future__ import annotations

import pytest

from te_proto._compat import HAS_SCALED_MM_ON_CPU, TRACES_NEW_QUANTIZERS

new_quantizer_in_graph = pytest.mark.xfail(
    not TRACES_NEW_QUANTIZERS,
    reason="torch 2.11 cannot use a quantizer that is made inside a graph",
    strict=True,
)
scaled_mm_on_cpu = pytest.mark.xfail(
    not HAS_SCALED_MM_ON_CPU, reason="torch 2.11 has no scaled_mm on a CPU", strict=True
)
