# SPDX-License-Identifier: Apache-2.0
"""What a plugin says about its format before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 1
"""Raised when a plugin built for the old core would misbehave with the new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """The torch-free card of one format: numbers, and where the classes are.

    Import strings read ``"package.module:Name"`` and are resolved on first use.

    Attributes:
        name: format id, such as ``"mxfp8"``; equals the entry-point name.
        distribution: what to ``pip install``.
        protocol: the :data:`PROTOCOL` the plugin was written for.
        summary: one line for listings.
        elements: element formats of the codes, such as ``("e4m3", "e5m2")``; the first is the
            default.
        scale: format of a scale, such as ``"e8m0"`` or ``"float32"``.
        block: ``(rows, columns)`` that share a scale in the rowwise plane; 0 stands for the whole
            axis.
        quantizer: import string of the quantizer class.
        tensor: import string of the ``torch.Tensor`` subclass.
        storage: import string of the bare storage class.
        recipe: import string of a callable without required arguments that returns the
            :class:`te_proto.Recipe` of the format's defaults.
    """

    name: str
    distribution: str
    protocol: int
    summary: str
    elements: tuple[str, ...]
    scale: str
    block: tuple[int, int]
    quantizer: str
    tensor: str
    storage: str
    recipe: str
