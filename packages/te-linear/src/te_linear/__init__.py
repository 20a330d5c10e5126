# SPDX-License-Identifier: Apache-2.0
"""A linear layer for any te-proto format: one plan, followed by eager and compiled code alike.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_linear.__about__ import __version__
from te_proto import lazy_exports

if TYPE_CHECKING:
    from te_linear.config import LinearConfig
    from te_linear.conversion import ConversionReport, convert
    from te_linear.execute import execute_backward, execute_forward
    from te_linear.functional import linear, quantize_weight
    from te_linear.module import Linear
    from te_linear.plan import LinearPlan, plan_linear
else:
    # no module is called `linear`: once imported, it would stand in the place of the function
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ConversionReport": "conversion",
            "Linear": "module",
            "LinearConfig": "config",
            "LinearPlan": "plan",
            "convert": "conversion",
            "execute_backward": "execute",
            "execute_forward": "execute",
            "linear": "functional",
            "plan_linear": "plan",
            "quantize_weight": "functional",
        },
    )

__all__ = [
    "ConversionReport",
    "Linear",
    "LinearConfig",
    "LinearPlan",
    "__version__",
    "convert",
    "execute_backward",
    "execute_forward",
    "linear",
    "plan_linear",
    "quantize_weight",
]
