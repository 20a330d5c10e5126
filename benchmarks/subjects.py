# SPDX-License-Identifier: Apache-2.0
"""What is timed: a quantizer of ours, and the casts of torchao 0.18 that do the same work."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

import te_proto
from benchmarks.check import Bound, bound_element

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.cases import Case
    from te_proto import Quantizer

    Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Two functions to time, and how to look at what the first one makes.

    Attributes:
        quantize: of a bfloat16 matrix.
        dequantize: of what ``quantize`` made; reads the rowwise plane.
        columnwise_values: of what ``quantize`` made, from the columnwise plane; None if there is
            none, or its values cannot be compared with the input.
    """

    quantize: Callable[[Tensor], Any]
    dequantize: Callable[[Any], Tensor]
    columnwise_values: Callable[[Any], Tensor] | None = None


def our_quantizer(format_name: str, case: Case) -> Quantizer:
    """Return the quantizer of ``case``.

    Raises:
        TeError: the format cannot be loaded, or has no such options.
    """
    quantizer: Quantizer = getattr(te_proto.get_recipe(format_name), case.role)
    return quantizer.replace(**case.options).with_usage(rowwise=True, columnwise=case.columnwise)


def our_bound(quantizer: Quantizer, case: Case) -> Bound:
    """Return the error that ``quantizer`` may make."""
    card = te_proto.describe(quantizer.format_name)
    return Bound(
        element=bound_element(getattr(quantizer, "dtype", card.elements[0])),
        block=case.block or card.block,
        stochastic="rng" in quantizer.call_arguments(),
    )


def our_subject(quantizer: Quantizer, case: Case) -> Subject:
    """Return the functions of ``quantizer``."""
    call: dict[str, Any] = (
        {"rng": torch.tensor([1, 0])} if "rng" in quantizer.call_arguments() else {}
    )
    return Subject(
        quantize=lambda x: quantizer.quantize(x, **call),
        dequantize=lambda t: t.dequantize(),
        columnwise_values=(lambda t: t.with_usage(rowwise=False).dequantize())
        if case.columnwise and case.checks_columnwise
        else None,
    )


def has_peers() -> bool:
    """Return whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def peer_subject(name: str, *, columnwise: bool) -> Subject:
    """Return the peer ``name`` of :data:`PEERS`.

    Args:
        name: key of :data:`PEERS`.
        columnwise: cast the transpose too, which is how torchao gets the other direction.

    Raises:
        Exception: whatever torchao raises where it does not have it.
    """
    quantize, dequantize = PEERS[name]()
    if not columnwise:
        return Subject(quantize=quantize, dequantize=dequantize)
    return Subject(
        quantize=lambda x: (quantize(x), quantize(x.t().contiguous())),
        dequantize=lambda pair: dequantize(pair[0]),
        columnwise_values=lambda pair: dequantize(pair[1]).t(),
    )


def _tensorwise() -> Pair:
    cast = resolve_name("torchao.float8.float8_scaling_utils:hp_tensor_to_float8_dynamic")
    config = resolve_name("torchao.float8.float8_training_tensor:LinearMMConfig")()
    return (
        lambda x: cast(x, torch.float8_e4m3fn, config),
        lambda t: t.to_original_precision(),
    )


def _float8_tensor(granularity: str, *sizes: list[int]) -> Pair:
    cast = resolve_name("torchao.quantization:Float8Tensor").from_hp
    chosen = resolve_name(f"torchao.quantization:{granularity}")(*sizes)
    return lambda x: cast(x, granularity=chosen), lambda t: t.dequantize()


def _mx_tensor() -> Pair:
    cast = resolve_name("torchao.prototype.mx_formats.mx_tensor:MXTensor").to_mx
    modes = resolve_name("torchao.prototype.mx_formats.config:ScaleCalculationMode")
    return (
        lambda x: cast(x, torch.float8_e4m3fn, 32, modes.RCEIL),
        lambda t: t.dequantize(),
    )


def _nvfp4_tensor() -> Pair:
    module = "torchao.prototype.mx_formats.nvfp4_tensor"
    cast = resolve_name(f"{module}:NVFP4Tensor").to_nvfp4
    to_scale = resolve_name(f"{module}:per_tensor_amax_to_scale")
    return (
        lambda x: cast(x, per_tensor_scale=to_scale(x.abs().max())),
        lambda t: t.dequantize(),
    )


PEERS: dict[str, Callable[[], Pair]] = {
    "float8 tensorwise": _tensorwise,
    "Float8Tensor tensor": lambda: _float8_tensor("PerTensor"),
    "Float8Tensor 1x128": lambda: _float8_tensor("PerBlock", [1, 128]),
    "Float8Tensor 128x128": lambda: _float8_tensor("PerBlock", [128, 128]),
    "MXTensor rceil": _mx_tensor,
    "NVFP4Tensor two-level": _nvfp4_tensor,
}
"""Name -> the quantize and dequantize functions; torchao is imported when one is asked for."""
