# SPDX-License-Identifier: Apache-2.0
"""A linear layer for any te-proto format: one plan, followed by eager and compiled code alike.

Importing this package imports neither torch nor triton; names are resolved on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_linear.__about__ import __version__

if TYPE_CHECKING:
    from te_linear.execute import execute_backward, execute_forward
    from te_linear.module import Linear, linear
    from te_linear.plan import LinearConfig, LinearPlan, plan_linear

# no module is called `linear`: once imported, it would stand in the place of the function
_WHERE = {
    "Linear": "module",
    "LinearConfig": "plan",
    "LinearPlan": "plan",
    "execute_backward": "execute",
    "execute_forward": "execute",
    "linear": "module",
    "plan_linear": "plan",
}

__all__ = [
    "Linear",
    "LinearConfig",
    "LinearPlan",
    "__version__",
    "execute_backward",
    "execute_forward",
    "linear",
    "plan_linear",
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
