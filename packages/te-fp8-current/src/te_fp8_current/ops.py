# SPDX-License-Identifier: Apache-2.0
"""Which code runs: the Triton kernels on CUDA tensors, the reference everywhere else.

The kernels are ops, so that a CUDA graph keeps them whole and a fake answers from the layout alone.
The reference is not: Inductor fuses it with its neighbours.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from te_fp8_current import reference
from te_fp8_current.layout import transpose_shape
from te_proto.custom_ops import custom_op
from te_proto.errors import UsageError
from te_proto.proto import TensorProto
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_fp8_current.quantizer import Float8CurrentScalingQuantizer
    from te_fp8_current.tensor import Float8Storage

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _runs_kernels(tensor: Tensor) -> bool:
    return _HAS_TRITON and tensor.device.type == "cuda"


def quantize(
    x: Tensor, quantizer: Float8CurrentScalingQuantizer, group: str | None
) -> dict[str, Tensor]:
    """Return the buffers of ``x``, its maximum taken over ``group`` if there is one."""
    amax = _amax(x, None, group)
    if _runs_kernels(x):
        made = quantize_op(x, amax, quantizer.at_rest().replace(internal=True))
        return QuantizedStorage.inner_tensors(made)
    return _reference(x, amax, quantizer)


def quantize_into(
    x: Tensor,
    quantizer: Float8CurrentScalingQuantizer,
    out: dict[str, Tensor],
    noop: Tensor | None,
    group: str | None = None,
) -> None:
    """Fill the buffers ``out``, unless ``noop`` is 1."""
    amax = _amax(x, noop, group)
    if _runs_kernels(x):
        context = quantizer.replace(internal=True).create_metadata(x.dtype)
        quantize_into_op(x, amax, context.build(out, x.shape), noop)
        return
    for name, made in _reference(x, amax, quantizer).items():
        if noop is not None:
            made = torch.where(noop.reshape(()) == 1.0, out[name], made)
        out[name].copy_(made)


def dequantize(
    storage: Float8Storage, quantizer: Float8CurrentScalingQuantizer, dtype: torch.dtype
) -> Tensor:
    """Return the plain tensor; the transposed codes are read if there are no others.

    Raises:
        UsageError: no codes are held.
    """
    plain, moved = storage.fp8_data, storage.data_transpose
    codes = moved if plain is None else plain
    if codes is None:
        msg = "fp8_current: the tensor holds no codes, so there is nothing to dequantize"
        raise UsageError(msg)
    if _runs_kernels(codes):
        out: Tensor = dequantize_op(storage, dtype)
        return out
    assert storage.fp8_scale_inv is not None  # always held
    values = reference.dequantize(
        codes, storage.fp8_scale_inv, dtype=quantizer.dtype, out_dtype=dtype
    )
    return reference.move_front_to_last(values, storage.shape) if plain is None else values


def transpose(codes: Tensor) -> Tensor:
    """Return ``codes`` with the last axis in front, in memory of their own."""
    if _runs_kernels(codes):
        out: Tensor = transpose_op(codes)
        return out
    return reference.move_last_to_front(codes)


def _amax(x: Tensor, noop: Tensor | None, group: str | None) -> Tensor:
    amax: Tensor = amax_op(x, noop) if _runs_kernels(x) else reference.amax(x, noop)
    if group is None:
        return amax
    from te_proto.collectives import all_reduce_max  # needs a torch built with distributed

    return all_reduce_max(amax, group)


def _reference(
    x: Tensor, amax: Tensor, quantizer: Float8CurrentScalingQuantizer
) -> dict[str, Tensor]:
    return reference.quantize(
        x,
        amax,
        dtype=quantizer.dtype,
        force_pow_2_scales=quantizer.force_pow_2_scales,
        amax_epsilon=quantizer.amax_epsilon,
        data=quantizer.rowwise or not quantizer.separate_transpose,
        transpose=quantizer.columnwise and quantizer.separate_transpose,
    )


@custom_op(
    "te_fp8_current::amax",
    outputs=lambda x, noop: TensorProto(shape=(1,), dtype=torch.float32, device=x.device),
)
def amax_op(x: Tensor, noop: Tensor | None) -> Tensor:
    """Return the largest magnitude with the Triton kernel."""
    from te_fp8_current.kernels.amax import launch_amax  # imports triton

    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    launch_amax(x, out, noop=noop)
    return out


@custom_op(
    "te_fp8_current::quantize",
    outputs=lambda x, amax, quantizer: TensorProto(
        shape=x.shape, dtype=x.dtype, quantizer=quantizer, device=x.device
    ),
)
def quantize_op(x: Tensor, amax: Tensor, quantizer: Float8CurrentScalingQuantizer) -> Float8Storage:
    """Quantize with the Triton kernel."""
    out: Float8Storage = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, amax, out, None)
    return out


@custom_op("te_fp8_current::quantize_into", mutates=("out",))
def quantize_into_op(x: Tensor, amax: Tensor, out: Float8Storage, noop: Tensor | None) -> None:
    """Quantize into the buffers of ``out`` with the Triton kernel."""
    _launch(x, amax, out, noop)


@custom_op(
    "te_fp8_current::dequantize",
    outputs=lambda q, dtype: TensorProto(shape=q.shape, dtype=dtype, device=q.device),
)
def dequantize_op(q: Float8Storage, dtype: torch.dtype) -> Tensor:
    """Dequantize with the Triton kernel."""
    from te_fp8_current.kernels.dequantize import launch_dequantize  # imports triton

    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch_dequantize(q.inner_tensors(), out, dtype=q.quantizer.dtype)
    return out


@custom_op(
    "te_fp8_current::transpose",
    outputs=lambda codes: codes.replace(shape=transpose_shape(codes.shape)),
)
def transpose_op(codes: Tensor) -> Tensor:
    """Transpose with the Triton kernel."""
    from te_fp8_current.kernels.transpose import launch_transpose  # imports triton

    out = torch.empty(transpose_shape(codes.shape), dtype=codes.dtype, device=codes.device)
    launch_transpose(codes, out)
    return out


def _launch(x: Tensor, amax: Tensor, out: Float8Storage, noop: Tensor | None) -> None:
    from te_fp8_current.kernels.quantize import launch_quantize  # imports triton

    quantizer = out.quantizer
    launch_quantize(
        x,
        amax,
        out.inner_tensors(),
        dtype=quantizer.dtype,
        force_pow_2_scales=quantizer.force_pow_2_scales,
        amax_epsilon=quantizer.amax_epsilon,
        noop=noop,
    )
