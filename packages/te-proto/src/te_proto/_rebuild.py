# SPDX-License-Identifier: Apache-2.0
"""The one function a pickled quantized tensor names; ``torch.load(weights_only=True)`` allows it.

Nothing here imports torch, so that ``import te_proto`` can allow it at no cost.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def rebuild(
    cls: str,
    quantizer_cls: str,
    quantizer_state: dict[str, Any],
    inner: dict[str, Any],
    shape: tuple[int, ...],
    dtype: Any,
    requires_grad: bool,
    extra: dict[str, Any],
) -> Any:
    """Rebuild a quantized tensor or storage from plain values and inner tensors.

    Raises:
        UnknownFormatError: the plugin is not installed; the message says what to install.
    """
    from te_proto._classes import find_class
    from te_proto.quantizer import Quantizer
    from te_proto.storage import FlattenContext, QuantizedStorage

    found, quantizer = find_class(cls), find_class(quantizer_cls)
    if not (issubclass(found, QuantizedStorage) and issubclass(quantizer, Quantizer)):
        # a weights-only file must not be able to name any other class
        msg = f"{cls!r} and {quantizer_cls!r} are not a quantized tensor and its quantizer"
        raise TypeError(msg)
    context = FlattenContext(found, quantizer.from_state(quantizer_state), dtype)
    out = context.build(inner, shape, requires_grad=requires_grad)
    out.__dict__.update(extra)
    return out


class _OnceTorchIsThere(MetaPathFinder):
    """Sees ``torch.serialization`` being imported, once, and allows :func:`rebuild` in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch.serialization" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_allow(module: ModuleType) -> None:
                execute(module)
                module.add_safe_globals([rebuild])

            spec.loader.exec_module = execute_and_allow  # type: ignore[method-assign]
        return spec


def allow_in_checkpoints() -> None:
    """Let ``torch.load(weights_only=True)`` call :func:`rebuild`, also if torch comes later."""
    serialization = sys.modules.get("torch.serialization")
    if serialization is None:
        sys.meta_path.insert(0, _OnceTorchIsThere())
    else:
        serialization.add_safe_globals([rebuild])
