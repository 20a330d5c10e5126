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

from te_mxfp8 import reference
from te_proto.custom_ops import custom_op
from te_proto.proto import TensorProto
from te_proto.quantizer import Quantizer
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_mxfp8.quantizer import MXFP8Quantizer
    from te_mxfp8.tensor import MXFP8Storage

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def quantize(x: Tensor, quantizer: MXFP8Quantizer) -> dict[str, Tensor]:
    """Return the buffers of ``x``."""
    if x.device.type == "cuda":
        return QuantizedStorage.inner_tensors(quantize_op(x, quantizer.replace(internal=True)))
    return _reference_quantize(x, quantizer)


def quantize_into(
    x: Tensor, quantizer: MXFP8Quantizer, out: dict[str, Tensor], noop: Tensor | None
) -> bool:
    """Fill the buffers ``out`` with the op, or return False where it does not run."""
    if x.device.type == "cuda":
        context = quantizer.replace(internal=True).create_metadata(x.dtype)
        quantize_into_op(x, context.build(out, x.shape), noop)
        return True
    return False


def dequantize(storage: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    """Return the plain tensor; the rowwise plane is read if it is held."""
    if storage.device.type == "cuda":
        out: Tensor = dequantize_op(storage, dtype)
        return out
    return _reference_dequantize(storage, dtype)


@custom_op(
    "te_mxfp8::quantize",
    outputs=lambda x, quantizer: TensorProto(
        shape=x.shape, dtype=x.dtype, quantizer=quantizer, device=x.device
    ),
)
def quantize_op(x: Tensor, quantizer: MXFP8Quantizer) -> MXFP8Storage:
    """Quantize a CUDA tensor."""
    context = quantizer.create_metadata(x.dtype)
    if not _HAS_TRITON:
        plain: MXFP8Storage = context.build(_reference_quantize(x, quantizer), x.shape)
        return plain
    out: MXFP8Storage = context.build(quantizer.alloc_tensors(x.shape, x.device), x.shape)
    _launch(x, out, None)
    return out


@custom_op("te_mxfp8::quantize_into", mutates=("out",))
def quantize_into_op(x: Tensor, out: MXFP8Storage, noop: Tensor | None) -> None:
    """Quantize a CUDA tensor into the buffers of ``out``."""
    if _HAS_TRITON:
        _launch(x, out, noop)
    else:
        Quantizer.quantize_into_impl(out.quantizer, x, out.inner_tensors(), noop)


@custom_op(
    "te_mxfp8::dequantize",
    outputs=lambda q, dtype: TensorProto(shape=q.shape, dtype=dtype, device=q.device),
)
def dequantize_op(q: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    """Dequantize a CUDA tensor."""
    if not _HAS_TRITON:
        return _reference_dequantize(q, dtype)
    from te_mxfp8.kernels.dequantize import launch_dequantize  # imports triton

    data, scale_inv, columnwise = _held_plane(q)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch_dequantize(
        data,
        scale_inv,
        out,
        dtype=q.quantizer.dtype,
        columnwise=columnwise,
        swizzled=q.quantizer.optimize_for_gemm,
    )
    return out


def _reference_quantize(x: Tensor, quantizer: MXFP8Quantizer) -> dict[str, Tensor]:
    return reference.quantize(
        x,
        dtype=quantizer.dtype,
        rowwise=quantizer.rowwise,
        columnwise=quantizer.columnwise,
        two_d=quantizer.with_2d_quantization,
        swizzled=quantizer.optimize_for_gemm,
    )


def _reference_dequantize(storage: MXFP8Storage, dtype: torch.dtype) -> Tensor:
    data, scale_inv, columnwise = _held_plane(storage)
    return reference.dequantize(
        data,
        scale_inv,
        dtype=storage.quantizer.dtype,
        columnwise=columnwise,
        swizzled=storage.quantizer.optimize_for_gemm,
        out_dtype=dtype,
    )


def _held_plane(storage: MXFP8Storage) -> tuple[Tensor, Tensor, bool]:
    """Return codes, scales and whether they are columnwise; rowwise if that plane is held."""
    columnwise = storage.rowwise_data is None
    data = storage.columnwise_data if columnwise else storage.rowwise_data
    scale_inv = storage.columnwise_scale_inv if columnwise else storage.rowwise_scale_inv
    assert data is not None  # QuantizedStorage.dequantize saw that a plane is held
    assert scale_inv is not None
    return data, scale_inv, columnwise


def _launch(x: Tensor, out: MXFP8Storage, noop: Tensor | None) -> None:
    from te_mxfp8.kernels.quantize import launch_quantize  # imports triton

    launch_quantize(
        x,
        out.inner_tensors(),
        dtype=out.quantizer.dtype,
        two_d=out.quantizer.with_2d_quantization,
        swizzled=out.quantizer.optimize_for_gemm,
        noop=noop,
    )
