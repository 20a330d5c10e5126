# SPDX-License-Identifier: Apache-2.0
"""The one function a pickled quantized tensor names; ``torch.load(weights_only=True)`` allows it.

Nothing here imports torch, so that ``import te_proto`` can allow it at no cost.
"""

from __future__ import annotations

from typing import Any


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
