# SPDX-License-Identifier: Apache-2.0
"""Which code runs: ops on CUDA tensors, which launch the Triton kernels, the reference elsewhere.

An op is kept whole in a CUDA graph, and a fake answers from the layout alone, also where triton is
absent; then the op runs the reference. The CPU meets no op: Inductor fuses the reference with its
neighbours.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from te_fp8_block import reference
from te_proto.custom_ops import custom_op
from te_proto.errors import DeviceError
from te_proto.launch import has_conversion
from te_proto.proto import TensorProto
from te_proto.quantizer import Quantizer
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_fp8_block.quantizer import Float8BlockQuantizer
    from te_fp8_block.tensor import Float8BlockwiseStorage

_HAS_TRITON = importlib.util.find_spec("triton") is not None

_TAKES_POWERS_OF_TWO_ALONE = (10, 0)
"""From this compute capability on, the GEMM is one of MXFP8, which would cut a mantissa off."""


def quantize(x: Tensor, quantizer: Float8BlockQuantizer) -> dict[str, Tensor]:
    """Return the buffers of ``x``."""
    if x.device.type == "cuda":
        return QuantizedStorage.inner_tensors(quantize_op(x, quantizer.replace(internal=True)))
    return _reference_quantize(x, quantizer)


def quantize_into(
    x: Tensor, quantizer: Float8BlockQuantizer, out: dict[str, Tensor], noop: Tensor | None
) -> bool:
    """Fill the buffers ``out`` with the op, or return False where it does not run."""
    if x.device.type == "cuda":
        context = quantizer.replace(internal=True).create_metadata(x.dtype)
        quantize_into_op(x, context.build(out, x.shape), noop)
        return True
    return False


def dequantize(storage: Float8BlockwiseStorage, dtype: torch.dtype) -> Tensor:
    """Return the plain tensor; the rowwise plane is read if it is held."""
    if storage.device.type == "cuda":
        out: Tensor = dequantize_op(storage, dtype)
        return out
    return _reference_dequantize(storage, dtype)


def transpose(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes, in memory of its own."""
    if codes.device.type == "cuda":
        out: Tensor = transpose_op(codes)
        return out
    return reference.transpose_codes(codes)


@custom_op(
    "te_fp8_block::quantize",
    outputs=lambda x, quantizer: TensorProto(
        shape=x.shape, dtype=x.dtype, quantizer=quantizer, device=x.device
    ),
)
def quantize_op(x: Tensor, quantizer: Float8BlockQuantizer) -> Float8BlockwiseStorage:
    """Quantize a CUDA tensor."""
    _check_device(x, quantizer)
    context = quantizer.create_metadata(x.dtype)
    if not _HAS_TRITON:
        plain: Float8BlockwiseStorage = context.build(_reference_quantize(x, quantizer), x.shape)
        return plain
    out: Float8BlockwiseStorage = context.build(quantizer.alloc_tensors(x.shape, x.device), x.shape)
    _launch(x, out, None)
    return out


@custom_op("te_fp8_block::quantize_into", mutates=("out",))
def quantize_into_op(x: Tensor, out: Float8BlockwiseStorage, noop: Tensor | None) -> None:
    """Quantize a CUDA tensor into the buffers of ``out``."""
    _check_device(x, out.quantizer)
    if _HAS_TRITON:
        _launch(x, out, noop)
    else:
        Quantizer.quantize_into_impl(out.quantizer, x, out.inner_tensors(), noop)


@custom_op(
    "te_fp8_block::dequantize",
    outputs=lambda q, dtype: TensorProto(shape=q.shape, dtype=dtype, device=q.device),
)
def dequantize_op(q: Float8BlockwiseStorage, dtype: torch.dtype) -> Tensor:
    """Dequantize a CUDA tensor."""
    if not _HAS_TRITON:
        return _reference_dequantize(q, dtype)
    from te_fp8_block.kernels.dequantize import launch_dequantize  # imports triton

    data, scale_inv, columnwise = _held_plane(q)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch_dequantize(
        data,
        scale_inv,
        out,
        dtype=q.quantizer.dtype,
        columnwise=columnwise,
        two_d=q.quantizer.is_2d(),
    )
    return out


@custom_op(
    "te_fp8_block::transpose",
    outputs=lambda codes: TensorProto(
        shape=codes.shape[::-1], dtype=codes.dtype, device=codes.device
    ),
)
def transpose_op(codes: Tensor) -> Tensor:
    """Transpose a CUDA matrix of codes."""
    if not _HAS_TRITON:
        return reference.transpose_codes(codes)
    from te_fp8_block.kernels.transpose import launch_transpose  # imports triton

    out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    launch_transpose(codes, out)
    return out


def _reference_quantize(x: Tensor, quantizer: Float8BlockQuantizer) -> dict[str, Tensor]:
    return reference.quantize(
        x,
        dtype=quantizer.dtype,
        rowwise=quantizer.rowwise,
        columnwise=quantizer.columnwise,
        two_d=quantizer.is_2d(),
        pow_2=quantizer.force_pow_2_scales,
        amax_epsilon=quantizer.amax_epsilon,
    )


def _reference_dequantize(storage: Float8BlockwiseStorage, dtype: torch.dtype) -> Tensor:
    data, scale_inv, columnwise = _held_plane(storage)
    return reference.dequantize(
        data,
        scale_inv,
        storage.shape,
        dtype=storage.quantizer.dtype,
        columnwise=columnwise,
        two_d=storage.quantizer.is_2d(),
        out_dtype=dtype,
    )


def _held_plane(storage: Float8BlockwiseStorage) -> tuple[Tensor, Tensor, bool]:
    """Return codes, scales and whether they are columnwise; rowwise if that plane is held."""
    columnwise = storage.rowwise_data is None
    data = storage.columnwise_data if columnwise else storage.rowwise_data
    scale_inv = storage.columnwise_scale_inv if columnwise else storage.rowwise_scale_inv
    assert data is not None  # QuantizedStorage.dequantize saw that a plane is held
    assert scale_inv is not None
    return data, scale_inv, columnwise


def _check_device(x: Tensor, quantizer: Float8BlockQuantizer) -> None:
    if not quantizer.force_pow_2_scales and has_conversion(x.device, _TAKES_POWERS_OF_TWO_ALONE):
        msg = (
            "fp8_block: option force_pow_2_scales must be True on a GPU of compute capability 10.0 "
            f"or later, got False for a tensor on {x.device}; its GEMM takes powers of two alone"
        )
        raise DeviceError(msg)


def _launch(x: Tensor, out: Float8BlockwiseStorage, noop: Tensor | None) -> None:
    from te_fp8_block.kernels.quantize import launch_quantize  # imports triton

    launch_quantize(
        x,
        out.inner_tensors(),
        dtype=out.quantizer.dtype,
        two_d=out.quantizer.is_2d(),
        pow_2=out.quantizer.force_pow_2_scales,
        amax_epsilon=out.quantizer.amax_epsilon,
        noop=noop,
    )
