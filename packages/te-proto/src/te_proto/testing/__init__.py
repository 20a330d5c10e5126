# SPDX-License-Identifier: Apache-2.0
"""The test kit: what te-proto's own tests, and those of every format, are written with.

Needs ``te-proto[testing]``. Names are resolved on first access, so that importing this package
imports neither torch nor triton; triton is needed only where a kernel runs or is compiled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ImportError:
    pass  # the helpers work without it, in a benchmark for example
else:
    # before any of them is imported: rewriting works at import
    pytest.register_assert_rewrite(f"{__name__}.compare", f"{__name__}.conformance")

if TYPE_CHECKING:
    from te_proto.testing.aot import AotReport, aot_report
    from te_proto.testing.compare import assert_same_bits, assert_same_metadata, hostile
    from te_proto.testing.compiles import CompileCounts, count_compiles
    from te_proto.testing.conformance import FormatConformance
    from te_proto.testing.golden import GoldenCase, load_golden
    from te_proto.testing.interpreter import cpu_launches_interpreted
    from te_proto.testing.poison import poisoned_allocations

_WHERE = {
    "AotReport": "aot",
    "CompileCounts": "compiles",
    "FormatConformance": "conformance",
    "GoldenCase": "golden",
    "aot_report": "aot",
    "assert_same_bits": "compare",
    "assert_same_metadata": "compare",
    "count_compiles": "compiles",
    "cpu_launches_interpreted": "interpreter",
    "hostile": "compare",
    "load_golden": "golden",
    "poisoned_allocations": "poison",
}

__all__ = [
    "AotReport",
    "CompileCounts",
    "FormatConformance",
    "GoldenCase",
    "aot_report",
    "assert_same_bits",
    "assert_same_metadata",
    "count_compiles",
    "cpu_launches_interpreted",
    "hostile",
    "load_golden",
    "poisoned_allocations",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
