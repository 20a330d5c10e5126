# SPDX-License-Identifier: Apache-2.0
"""What code that is compiled asks torch, in a form that does not depend on its version."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._compile import _disable_dynamo

from te_proto._compat import TRACES_NEW_QUANTIZERS
from te_proto._compat import is_compiling as is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., Any]")


def uses_new_quantizers(fn: _Function) -> _Function:
    """Mark a function that makes quantizers of others, by ``replace()`` say, and uses them.

    It is returned as it is, but with torch 2.11, whose graphs can use only quantizers that come
    from outside: there a graph breaks, and the function runs eagerly. With ``fullgraph=True`` that
    is torch's error, which says why.
    """
    if TRACES_NEW_QUANTIZERS:
        return fn
    reason = (
        f"{fn.__module__}.{fn.__name__} makes quantizers, which graphs cannot use before torch "
        f"2.12, got {torch.__version__}; take a newer torch, or leave out fullgraph=True"
    )
    disabled = _disable_dynamo(fn)  # torch.compiler.disable would import dynamo, and triton, now

    @functools.wraps(fn)
    def kept_out(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=reason)
        return disabled(*args, **kwargs)

    return kept_out  # type: ignore[return-value]
