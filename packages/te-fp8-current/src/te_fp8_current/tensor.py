# SPDX-License-Identifier: Apache-2.0
"""Inner tensors of FP8 with one scale, and what views, slices and transposition do with them.

Codes are ``[..., K]`` in ``fp8_data`` and ``[K, ...]`` in ``data_transpose``, the same ones. One
scale holds for all of them, so every part of a tensor and every order of its elements is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_fp8_current.layout import matrix_shape, transpose_shape
from te_fp8_current.reference import move_front_to_last, move_last_to_front
from te_proto.gemm import GemmOperand
from te_proto.numerics import as_float8
from te_proto.storage import InnerTensor, QuantizedStorage
from te_proto.tensor import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from te_fp8_current.quantizer import Float8CurrentScalingQuantizer
    from te_proto.quantizer import Quantizer


class Float8Storage(QuantizedStorage):
    """Inner tensors: FP8 codes, one byte each, their transpose where it is separate, one scale.

    The peer's constructor calls the first ``data``; every ``torch.Tensor`` has another ``data``.
    """

    fp8_data: InnerTensor
    data_transpose: InnerTensor
    fp8_scale_inv: InnerTensor
    quantizer: Float8CurrentScalingQuantizer

    def derive_inner(self, quantizer: Quantizer, missing: list[str]) -> dict[str, Tensor]:
        """Compute the transposed codes from the codes; as in the peer, not the other way round.

        Raises:
            UsageError: there are no codes to transpose, or the codes are what is missing.
        """
        from te_fp8_current.ops import transpose  # ops build on this module

        if missing != ["data_transpose"] or self.fp8_data is None:
            return super().derive_inner(quantizer, missing)
        return {"data_transpose": transpose(self.fp8_data)}

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        """Return the codes as a matrix whose last axis is summed, read in place; see the base.

        Where that usage has no buffer of its own it is a transposed view of the other's.
        """
        m, k = matrix_shape(self.shape)
        plain, moved, scale = self.fp8_data, self.data_transpose, self.fp8_scale_inv
        if scale is None:
            return None
        if moved is not None and (columnwise or plain is None):
            codes, is_moved = moved.reshape(k, m), True
        elif plain is not None:
            codes, is_moved = plain.reshape(m, k), False
        else:
            return None
        float8 = as_float8(codes, self.quantizer.dtype)
        return GemmOperand(float8 if is_moved == columnwise else float8.t(), scale)

    def view_inner(self, shape: Sequence[int]) -> dict[str, Tensor]:
        """Return the inner tensors of a view, copies if a new last axis reorders the transpose."""
        inner = self.inner_tensors()
        if self.data_transpose is None:
            if self.fp8_data is not None:
                inner["fp8_data"] = self.fp8_data.view(tuple(shape))
            return inner
        if tuple(shape[-1:]) == tuple(self.shape[-1:]):
            if self.fp8_data is not None:
                inner["fp8_data"] = self.fp8_data.view(tuple(shape))
            inner["data_transpose"] = self.data_transpose.view(transpose_shape(shape))
            return inner
        codes = self.fp8_data
        if codes is None:
            codes = move_front_to_last(self.data_transpose, self.shape)
        codes = codes.reshape(tuple(shape))
        copies = {"fp8_data": codes.clone()} if self.fp8_data is not None else {}
        copies["data_transpose"] = move_last_to_front(codes)
        copies["fp8_scale_inv"] = inner["fp8_scale_inv"].clone()
        return copies

    def narrow_inner(self, dim: int, start: int, length: int) -> dict[str, Tensor]:
        """Return the inner tensors of a slice; any slice keeps codes and scale."""
        last = dim == len(self.shape) - 1
        axes = {"fp8_data": dim, "data_transpose": 0 if last else dim + 1}
        return {
            # a copy even where a view would do, as that of the other buffer is none
            n: t.narrow(axes[n], start, length).clone(memory_format=torch.contiguous_format)
            if n in axes
            else t.clone()
            for n, t in self.inner_tensors().items()
        }

    def transpose_inner(self) -> tuple[Quantizer, dict[str, Tensor]]:
        """Return the 2-D transpose: separate buffers change places, and with them the usages."""
        inner = {"fp8_scale_inv": self.inner_tensors()["fp8_scale_inv"].clone()}
        if not self.quantizer.separate_transpose:
            assert self.fp8_data is not None  # one buffer is held whatever the usages
            return self.quantizer, {"fp8_data": move_last_to_front(self.fp8_data), **inner}
        quantizer = self.quantizer.with_usage(
            rowwise=self.quantizer.columnwise, columnwise=self.quantizer.rowwise
        )
        if self.fp8_data is not None:
            inner = {"data_transpose": self.fp8_data.clone(), **inner}
        if self.data_transpose is not None:
            inner = {"fp8_data": self.data_transpose.clone(), **inner}
        return quantizer, inner


class Float8Tensor(Float8Storage, QuantizedTensor):
    """An FP8 tensor that torch sees as one of the logical shape and nominal dtype."""
