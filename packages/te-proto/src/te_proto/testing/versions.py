# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that some version of torch fails, each named after the reason."""

from __future__ import annotations

import pytest

from te_proto._compat import TRACES_NEW_QUANTIZERS

new_quantizer_in_graph = pytest.mark.xfail(
    not TRACES_NEW_QUANTIZERS,
    reason="torch 2.11 cannot use a quantizer that is made inside a graph",
    strict=True,
)
