# SPDX-License-Identifier: Apache-2.0
"""The test kit: what te-proto's own tests, and those of every format, are written with.

Needs ``te-proto[testing]``. Names are resolved on first access, so that importing this package
imports neither torch nor triton; triton is needed only where a kernel runs or is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_proto import lazy_exports

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
    from te_proto.testing.imports import assert_lazy_package
    from te_proto.testing.interpreter import cpu_launches_interpreted
    from te_proto.testing.op_check import check_op
    from te_proto.testing.poison import poisoned_allocations
    from te_proto.testing.ranks import run_ranks
    from te_proto.testing.versions import (
        crowded_by,
        new_quantizer_in_graph,
        scaled_mm_on_cpu,
        super_in_graph,
    )
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "AotReport": "aot",
            "CompileCounts": "compiles",
            "FormatConformance": "conformance",
            "GoldenCase": "golden",
            "aot_report": "aot",
            "assert_lazy_package": "imports",
            "assert_same_bits": "compare",
            "assert_same_metadata": "compare",
            "check_op": "op_check",
            "count_compiles": "compiles",
            "cpu_launches_interpreted": "interpreter",
            "crowded_by": "versions",
            "hostile": "compare",
            "load_golden": "golden",
            "new_quantizer_in_graph": "versions",
            "poisoned_allocations": "poison",
            "run_ranks": "ranks",
            "scaled_mm_on_cpu": "versions",
            "super_in_graph": "versions",
        },
    )

__all__ = [
    "AotReport",
    "CompileCounts",
    "FormatConformance",
    "GoldenCase",
    "aot_report",
    "assert_lazy_package",
    "assert_same_bits",
    "assert_same_metadata",
    "check_op",
    "count_compiles",
    "cpu_launches_interpreted",
    "crowded_by",
    "hostile",
    "load_golden",
    "new_quantizer_in_graph",
    "poisoned_allocations",
    "run_ranks",
    "scaled_mm_on_cpu",
    "super_in_graph",
]
