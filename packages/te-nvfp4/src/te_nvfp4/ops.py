# SPDX-License-Identifier: Apache-2.0
"""Which code runs: the Triton kernels on CUDA tensors, the reference everywhere else.

The kernels are ops, so that a CUDA graph keeps them whole and a fake answers from the layout alone.
The reference is not: Inductor fuses it with its neighbours. The amaxes are an op of their own, for
a reduction over a group comes between them and the quantization.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from te_nvfp4 import reference
from te_nvfp4.layout import measured_amaxes
from te_proto.blocks import matrix_shape
from te_proto.custom_ops import custom_op
from te_proto.proto import TensorProto
from te_proto.storage import QuantizedStorage

if TYPE_CHECKING:
    from torch import Tensor

    from te_nvfp4.quantizer import NVFP4Quantizer
    from te_nvfp4.tensor import NVFP4Storage

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _runs_kernels(tensor: Tensor) -> bool:
    return _HAS_TRITON and tensor.device.type == "cuda"


def quantize(
    x: Tensor, quantizer: NVFP4Quantizer, group: str | None, rng: Tensor | None
) -> dict[str, Tensor]:
    """Return the buffers of ``x``."""
    if _runs_kernels(x):
        bare = quantizer.at_rest().replace(internal=True)
        row_amax, col_amax = _measure(x, bare, None, group)
        return QuantizedStorage.inner_tensors(quantize_op(x, bare, row_amax, col_amax, rng))
    return reference.quantize(x, quantizer, group, rng)


def quantize_into(
    x: Tensor,
    quantizer: NVFP4Quantizer,
    out: dict[str, Tensor],
    noop: Tensor | None,
    group: str | None = None,
    rng: Tensor | None = None,
) -> bool:
    """Fill the buffers ``out`` with the kernels, or return False where they do not run."""
    if _runs_kernels(x):
        bare = quantizer.at_rest().replace(internal=True)
        row_amax, col_amax = _measure(x, bare, noop, group)
        storage = bare.create_metadata(x.dtype).build(out, x.shape)
        quantize_into_op(x, storage, row_amax, col_amax, rng, noop)
        return True
    return False


def dequantize(storage: NVFP4Storage, dtype: torch.dtype) -> Tensor:
    """Return the plain tensor; the rowwise plane is read if it is held."""
    if _runs_kernels(_held_plane(storage)[0]):
        out: Tensor = dequantize_op(storage, dtype)
        return out
    data, scale_inv, amax, columnwise = _held_plane(storage)
    return reference.dequantize(
        data,
        scale_inv,
        amax,
        storage.quantizer,
        storage.shape,
        columnwise=columnwise,
        out_dtype=dtype,
    )


def _measure(
    x: Tensor, quantizer: NVFP4Quantizer, noop: Tensor | None, group: str | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the amax of each plane that is on; that of both planes if they share one."""
    names = measured_amaxes(quantizer)
    amaxes = dict(zip(names, amax_op(x, quantizer, noop), strict=True))
    if group is not None:
        from te_proto.collectives import all_reduce_max  # needs a torch built with distributed

        amaxes = {name: all_reduce_max(amax, group) for name, amax in amaxes.items()}
    row = amaxes.get("amax_rowwise")
    return row, amaxes.get("amax_columnwise", row if quantizer.columnwise else None)


def _amax_protos(x: TensorProto, quantizer: NVFP4Quantizer, noop: Any) -> tuple[TensorProto, ...]:
    m, k = matrix_shape(x.shape)
    sizes = {"amax_rowwise": m, "amax_columnwise": k}
    return tuple(
        TensorProto(
            shape=(sizes[name] if quantizer.row_scaled_nvfp4 else 1,),
            dtype=torch.float32,
            device=x.device,
        )
        for name in measured_amaxes(quantizer)
    )


@custom_op("te_nvfp4::amax", outputs=_amax_protos)
def amax_op(x: Tensor, quantizer: NVFP4Quantizer, noop: Tensor | None) -> tuple[Tensor, ...]:
    """Measure the amaxes with the Triton kernel; zeros where ``noop`` is 1."""
    from te_nvfp4.kernels.amax import launch_amax  # imports triton

    m, k = matrix_shape(x.shape)
    sizes = {"amax_rowwise": m, "amax_columnwise": k}
    out = {
        name: torch.zeros(
            sizes[name] if quantizer.row_scaled_nvfp4 else 1, dtype=torch.float32, device=x.device
        )
        for name in measured_amaxes(quantizer)
    }
    launch_amax(x, out, quantizer, noop=noop)
    return tuple(out.values())


def _result(
    x: TensorProto, quantizer: NVFP4Quantizer, row_amax: Any, col_amax: Any, rng: Any
) -> TensorProto:
    return TensorProto(shape=x.shape, dtype=x.dtype, quantizer=quantizer, device=x.device)


@custom_op("te_nvfp4::quantize", outputs=_result)
def quantize_op(
    x: Tensor,
    quantizer: NVFP4Quantizer,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    rng: Tensor | None,
) -> NVFP4Storage:
    """Quantize with the Triton kernel, under amaxes that are known; ``rng`` rounds by chance."""
    from te_nvfp4.kernels.quantize import launch_quantize  # imports triton

    out: NVFP4Storage = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
    launch_quantize(x, out.inner_tensors(), quantizer, row_amax, col_amax, rng=rng)
    return out


@custom_op("te_nvfp4::quantize_into", mutates=("out",))
def quantize_into_op(
    x: Tensor,
    out: NVFP4Storage,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
) -> None:
    """Quantize into the buffers of ``out`` with the Triton kernel."""
    from te_nvfp4.kernels.quantize import launch_quantize  # imports triton

    launch_quantize(x, out.inner_tensors(), out.quantizer, row_amax, col_amax, rng=rng, noop=noop)


@custom_op(
    "te_nvfp4::dequantize",
    outputs=lambda q, dtype: TensorProto(shape=q.shape, dtype=dtype, device=q.device),
)
def dequantize_op(q: NVFP4Storage, dtype: torch.dtype) -> Tensor:
    """Dequantize with the Triton kernel."""
    from te_nvfp4.kernels.dequantize import launch_dequantize  # imports triton

    data, scale_inv, amax, columnwise = _held_plane(q)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch_dequantize(data, scale_inv, amax, out, q.quantizer, columnwise=columnwise)
    return out


def _held_plane(storage: NVFP4Storage) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return codes, scales, amax and whether they are columnwise; rowwise if that is held."""
    columnwise = storage.rowwise_data is None
    data = storage.columnwise_data if columnwise else storage.rowwise_data
    scale_inv = storage.columnwise_scale_inv if columnwise else storage.rowwise_scale_inv
    amax = storage.amax_columnwise if columnwise else storage.amax_rowwise
    assert data is not None  # QuantizedStorage.dequantize saw that a plane is held
    assert scale_inv is not None
    assert amax is not None
    return data, scale_inv, amax, columnwise
