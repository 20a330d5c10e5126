# SPDX-License-Identifier: Apache-2.0
"""Inner tensors of block-scaled FP8 and what views, slices, concatenation and transposition do.

The tensor is seen as a matrix ``[M, K]``, all leading axes flattened into ``M``. The columnwise
codes are stored with the last axis first. Scales are handled compact, ``[down, across]`` as the
blocks lie on that matrix, see :func:`te_fp8_block.reference.compact_scale`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch.nn.functional import ScalingType

from te_fp8_block import ops
from te_fp8_block.layout import BLOCK, matrix_shape, transposed
from te_fp8_block.reference import block_of, columnwise_scale, compact_scale, store_scale
from te_proto.errors import ShapeError, UsageError
from te_proto.gemm import GemmOperand
from te_proto.numerics import as_float8
from te_proto.storage import InnerTensor, QuantizedStorage
from te_proto.tensor import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

    from te_fp8_block.quantizer import Float8BlockQuantizer
    from te_proto.quantizer import Quantizer

_PLANES = (("rowwise", False), ("columnwise", True))


class _Part(NamedTuple):
    """One inner tensor as a piece of an axis sees it.

    Attributes:
        tensor: codes, or compact scales with the rows split at the axis: ``[outer, down, across]``.
        axis: which of its axes is cut.
        entries: rows of the matrix, columns for the last axis, in one entry of the logical axis.
        block: of these share one entry of ``axis``.
    """

    tensor: Tensor
    axis: int
    entries: int
    block: int


class Float8BlockwiseStorage(QuantizedStorage):
    """Inner tensors of block-scaled FP8: per plane uint8 codes and float32 ``scale_inv``."""

    rowwise_data: InnerTensor
    rowwise_scale_inv: InnerTensor
    columnwise_data: InnerTensor
    columnwise_scale_inv: InnerTensor
    quantizer: Float8BlockQuantizer

    # -- usages -----------------------------------------------------------------------------------

    def _planes(self, quantizer: Quantizer) -> dict[str, Tensor]:
        if not (quantizer.rowwise or quantizer.columnwise):
            msg = (
                "fp8_block: a tensor must keep the rowwise or the columnwise plane, got neither; "
                "delete the tensor instead"
            )
            raise UsageError(msg)
        return super()._planes(quantizer)

    def derive_inner(self, quantizer: Quantizer, missing: list[str]) -> dict[str, Tensor]:
        """Return the columnwise plane of a 2-D tensor, which is the rowwise one transposed.

        Raises:
            UsageError: blocks are 1x128, the rowwise plane is the missing one or is to be dropped.
        """
        if self.rowwise_data is None or not self._two_d:
            return super().derive_inner(quantizer, missing)
        if not quantizer.rowwise:
            msg = (
                "fp8_block: the columnwise plane is made from the rowwise one only to stand beside "
                "it, got rowwise=False, columnwise=True; ask for both, then drop the rowwise plane"
            )
            raise UsageError(msg)
        m, k = matrix_shape(self.shape)
        assert self.rowwise_scale_inv is not None
        codes = ops.transpose(self.rowwise_data.reshape(m, k))
        return {
            "columnwise_data": codes.reshape(transposed(self.shape)),
            "columnwise_scale_inv": columnwise_scale(self.rowwise_scale_inv, m, k),
        }

    # -- views ------------------------------------------------------------------------------------

    def view_inner(self, shape: Sequence[int]) -> dict[str, Tensor] | None:
        """Return the inner tensors of a view, or None if a block would be cut.

        Blocks stay whole if the matrix stays, or if both last axes hold only whole 1x128 blocks.
        """
        inner = self.inner_tensors()
        if matrix_shape(shape) == matrix_shape(self.shape):
            views = {"rowwise_data": tuple(shape), "columnwise_data": transposed(shape)}
            return {n: t.view(views[n]) if n in views else t for n, t in inner.items()}
        (m, k), (_, was) = matrix_shape(shape), matrix_shape(self.shape)
        if self._two_d or self.columnwise_data is not None or k % BLOCK or was % BLOCK:
            return None
        return {
            # a copy like the scales, so that both age alike
            "rowwise_data": inner["rowwise_data"].view(tuple(shape)).clone(),
            "rowwise_scale_inv": self._store(
                self._compact(columnwise=False).reshape(m, k // BLOCK), columnwise=False
            ),
        }

    def narrow_inner(self, dim: int, start: int, length: int) -> dict[str, Tensor]:
        """Return the inner tensors of a slice.

        Raises:
            ShapeError: it does not begin and end on a block of each plane held; the end of an axis
                that is cut into blocks as a whole is one, ragged or not.
        """
        if length == 0:  # every buffer is empty
            shape = [*self.shape[:dim], 0, *self.shape[dim + 1 :]]
            return self.quantizer.alloc_tensors(shape, self.device)
        for plane, columnwise in _PLANES:
            if self._blocked(dim, columnwise=columnwise) and not self._whole(dim, start, length):
                self._cut(plane, dim, start, length)
        pieces: dict[str, Tensor] = {}
        for name, (tensor, axis, entries, block) in self._parts(dim).items():
            first, count = start * entries // block, -(-length * entries // block)
            pieces[name] = tensor.narrow(axis, first, count)
        return self._join(pieces)

    @classmethod
    def cat_inner(cls, tensors: Sequence[Self], dim: int) -> dict[str, Tensor] | None:
        """Return the inner tensors of the concatenation, or None if it would move blocks' edges."""
        first = tensors[0]
        if any(first._blocked(dim, columnwise=columnwise) for _, columnwise in _PLANES):
            # nothing follows the last one, which may end on a ragged block
            followed = tensors if first._outer(dim) > 1 else tensors[:-1]
            if any(t.shape[dim] * t._inner(dim) % BLOCK for t in followed):
                return None
        parts = [t._parts(dim) for t in tensors]
        joined = {
            name: torch.cat([p[name].tensor for p in parts], dim=part.axis)
            for name, part in parts[0].items()
        }
        return first._join(joined)

    def transpose_inner(self) -> tuple[Quantizer, dict[str, Tensor]]:
        """Return the 2-D transpose: each plane is, as it lies, the result's other one."""
        quantizer = self.quantizer.with_usage(
            rowwise=self.quantizer.columnwise, columnwise=self.quantizer.rowwise
        )
        held = self.inner_tensors()
        other = {"rowwise": "columnwise", "columnwise": "rowwise"}
        return quantizer, {
            f"{plane}_{kind}": held[f"{other[plane]}_{kind}"]
            for plane in other
            for kind in ("data", "scale_inv")
            if f"{other[plane]}_{kind}" in held
        }

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        """Return one plane as a matrix whose last axis is summed, read in place; see the base."""
        data = self.columnwise_data if columnwise else self.rowwise_data
        scale = self.columnwise_scale_inv if columnwise else self.rowwise_scale_inv
        if data is None or scale is None:
            return None
        m, k = matrix_shape(self.shape)
        rows, summed = (k, m) if columnwise else (m, k)
        codes = as_float8(data.reshape(rows, summed), self.quantizer.dtype)
        if self._two_d:
            return GemmOperand(codes, scale, ScalingType.BlockWise128x128)
        return GemmOperand(codes, scale.narrow(1, 0, rows).t(), ScalingType.BlockWise1x128)

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _two_d(self) -> bool:
        return self.quantizer.is_2d()

    def _compact(self, *, columnwise: bool) -> Tensor:
        scale_inv = self.columnwise_scale_inv if columnwise else self.rowwise_scale_inv
        assert scale_inv is not None
        m, k = matrix_shape(self.shape)
        return compact_scale(scale_inv, m, k, columnwise=columnwise, two_d=self._two_d)

    def _store(self, scale: Tensor, *, columnwise: bool) -> Tensor:
        return store_scale(scale, columnwise=columnwise, two_d=self._two_d)

    def _outer(self, dim: int) -> int:
        """Return how many times the rows of the matrix run through ``dim``; 1 for the last axis."""
        return 1 if dim == len(self.shape) - 1 else math.prod(self.shape[:dim])

    def _inner(self, dim: int) -> int:
        """Return the rows of the matrix in one entry of ``dim``; 1 for the last axis."""
        return math.prod(self.shape[dim + 1 : -1])

    def _block(self, dim: int, *, columnwise: bool) -> int:
        """Return how many rows of the matrix, columns for the last axis, share a scale."""
        last = dim == len(self.shape) - 1
        return block_of(columnwise=columnwise, two_d=self._two_d)[1 if last else 0]

    def _blocked(self, dim: int, *, columnwise: bool) -> bool:
        """Whether the plane is held and ``dim`` cut into blocks in it."""
        data = self.columnwise_data if columnwise else self.rowwise_data
        return data is not None and self._block(dim, columnwise=columnwise) == BLOCK

    def _whole(self, dim: int, start: int, length: int) -> bool:
        """Whether a piece of ``dim``, where that is cut into blocks, is made of whole ones."""
        size, inner = self.shape[dim], self._inner(dim)
        if start * inner % BLOCK:
            return False
        if self._outer(dim) > 1:  # pieces follow each other, as whole axes did
            return length * inner % BLOCK == 0 and size * inner % BLOCK == 0
        return length * inner % BLOCK == 0 or start + length == size

    def _cut(self, plane: str, dim: int, start: int, length: int) -> NoReturn:
        unit = BLOCK // math.gcd(BLOCK, self._inner(dim))
        msg = (
            f"fp8_block: a slice of axis {dim} must begin and end at a multiple of {unit}, whole "
            f"{plane} blocks of {BLOCK}, got [{start}:{start + length}] of shape "
            f"{tuple(self.shape)}; slice elsewhere, drop the {plane} plane with with_usage(), or "
            "call .dequantize() first"
        )
        raise ShapeError(msg)

    def _parts(self, dim: int) -> dict[str, _Part]:
        """Return each inner tensor with what an entry of ``dim`` is in it."""
        last = dim == len(self.shape) - 1
        outer, inner = self._outer(dim), self._inner(dim)
        out: dict[str, _Part] = {}
        for plane, columnwise in _PLANES:
            data = self.columnwise_data if columnwise else self.rowwise_data
            if data is None:
                continue
            axis = (0 if last else dim + 1) if columnwise else dim
            out[f"{plane}_data"] = _Part(data, axis, 1, 1)
            scale = self._compact(columnwise=columnwise)
            block = self._block(dim, columnwise=columnwise)
            rows = scale.shape[0] if last else -(-self.shape[dim] * inner // block)
            split = scale.reshape(outer, rows, scale.shape[1])
            out[f"{plane}_scale_inv"] = _Part(split, 2 if last else 1, inner, block)
        return out

    def _join(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make inner tensors from codes and compact scales."""
        return {
            # a copy even where a view would do: the scales are copies, and both must age alike
            name: part.clone(memory_format=torch.contiguous_format)
            if name.endswith("_data")
            else self._store(part.flatten(0, 1), columnwise=name.startswith("col"))
            for name, part in parts.items()
        }


class Float8BlockwiseTensor(Float8BlockwiseStorage, QuantizedTensor):
    """A block-scaled FP8 tensor that torch sees as one of the logical shape and nominal dtype."""
