# SPDX-License-Identifier: Apache-2.0
"""MXFP8 inner tensors and what views, slices, concatenation and transposition do with them.

Codes are ``[..., K]`` in both planes. A scale is found compact at ``[m, k // 32]`` (rowwise) or
``[m // 32, k]`` (columnwise), all leading axes flattened into ``m``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.nn.functional import ScalingType, SwizzleType

from te_mxfp8.layout import BLOCK
from te_mxfp8.reference import compact_scale, store_scale
from te_proto.blocks import matrix_shape
from te_proto.errors import ShapeError
from te_proto.gemm import GemmOperand
from te_proto.numerics import as_float8
from te_proto.storage import InnerTensor, QuantizedStorage
from te_proto.tensor import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

    from te_mxfp8.quantizer import MXFP8Quantizer
    from te_proto.quantizer import Quantizer

_PLANES = (("rowwise", False), ("columnwise", True))


class MXFP8Storage(QuantizedStorage):
    """Inner tensors of MXFP8: per plane the codes, one byte each, and E8M0 ``scale_inv`` bytes."""

    rowwise_data: InnerTensor
    rowwise_scale_inv: InnerTensor
    columnwise_data: InnerTensor
    columnwise_scale_inv: InnerTensor
    quantizer: MXFP8Quantizer

    def view_inner(self, shape: Sequence[int]) -> dict[str, Tensor] | None:
        """Return the inner tensors of a view, or None if a block would be cut.

        Blocks stay whole if K does, or if the new K only holds whole rowwise ones.
        """
        k = self.shape[-1]
        if 0 in (k, *shape[-1:]) and matrix_shape(shape) != matrix_shape(self.shape):
            return None  # no elements, but scales of other rows
        same = len(shape) > 0 and shape[-1] == k
        if not same and (
            len(shape) == 0 or self.columnwise_data is not None or self._two_d or shape[-1] % BLOCK
        ):
            return None
        inner: dict[str, Tensor] = {}
        for name, tensor in self.inner_tensors().items():
            if name.endswith("_data"):
                data = tensor.view(tuple(shape))
                inner[name] = data if same else data.clone()  # the scales are copies then
            elif same:
                inner[name] = tensor
            else:
                blocks = self._compact(tensor, columnwise=False).reshape(-1, shape[-1] // BLOCK)
                inner[name] = self._store(blocks, columnwise=False)
        return inner

    def narrow_inner(self, dim: int, start: int, length: int) -> dict[str, Tensor]:
        """Return the inner tensors of a slice.

        Raises:
            ShapeError: it does not begin and end on a block of each plane held.
        """
        last = dim == len(self.shape) - 1
        inner = 1 if last else math.prod(self.shape[dim + 1 : -1])
        for plane, columnwise in _PLANES:
            held = self.columnwise_data if columnwise else self.rowwise_data
            if held is None or (last == columnwise and not self._two_d):
                continue  # the axis is not cut into blocks in this plane
            if not self._whole(dim, (start * inner, length * inner)):
                self._cut(plane, dim, start, length, inner)
        return self._join(
            {
                name: part.narrow(axis, start * unit // BLOCK, length * unit // BLOCK)
                for name, (part, axis, unit) in self._parts(dim).items()
            }
        )

    @classmethod
    def cat_inner(cls, tensors: Sequence[Self], dim: int) -> dict[str, Tensor] | None:
        """Return the inner tensors of the concatenation, or None if it would move blocks' edges."""
        first = tensors[0]
        last = dim == len(first.shape) - 1
        rows = first.columnwise_data is not None or first._two_d
        if not last and rows and not all(t._whole(dim, ()) for t in tensors):
            return None
        parts = [t._parts(dim) for t in tensors]
        joined = {
            n: torch.cat([p[n][0] for p in parts], dim=axis) for n, (_, axis, _) in parts[0].items()
        }
        return first._join(joined)

    def transpose_inner(self) -> tuple[Quantizer, dict[str, Tensor]]:
        """Return the 2-D transpose: each plane is the exact image of the result's other one."""
        quantizer = self.quantizer.with_usage(
            rowwise=self.quantizer.columnwise, columnwise=self.quantizer.rowwise
        )
        inner: dict[str, Tensor] = {}
        for plane, columnwise in _PLANES:
            source = "rowwise" if columnwise else "columnwise"
            data, scale = getattr(self, f"{source}_data"), getattr(self, f"{source}_scale_inv")
            if data is not None:
                # not contiguous(), which keeps the strides of a single row or of none
                inner[f"{plane}_data"] = data.t().clone(memory_format=torch.contiguous_format)
                compact = self._compact(scale, columnwise=not columnwise)
                inner[f"{plane}_scale_inv"] = self._store(compact.t(), columnwise=columnwise)
        return quantizer, inner

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        """Return one plane as a matrix whose last axis is summed, read in place; see the base."""
        data = self.columnwise_data if columnwise else self.rowwise_data
        scale = self.columnwise_scale_inv if columnwise else self.rowwise_scale_inv
        if data is None or scale is None:
            return None
        codes = as_float8(data.reshape(matrix_shape(self.shape)), self.quantizer.dtype)
        scale = scale.view(torch.float8_e8m0fnu)
        swizzled = self.quantizer.optimize_for_gemm
        if columnwise:
            # a swizzled one is in the order of its transpose already
            codes, scale = codes.t(), scale.view(scale.shape[::-1]) if swizzled else scale.t()
        return GemmOperand(
            codes,
            scale,
            ScalingType.BlockWise1x32,
            SwizzleType.SWIZZLE_32_4_4 if swizzled else SwizzleType.NO_SWIZZLE,
        )

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _two_d(self) -> bool:
        return self.quantizer.with_2d_quantization

    def _compact(self, scale: Tensor, *, columnwise: bool) -> Tensor:
        m, k = matrix_shape(self.shape)
        return compact_scale(
            scale, m, k, columnwise=columnwise, swizzled=self.quantizer.optimize_for_gemm
        )

    def _store(self, scale: Tensor, *, columnwise: bool) -> Tensor:
        return store_scale(scale, columnwise=columnwise, swizzled=self.quantizer.optimize_for_gemm)

    def _whole(self, dim: int, edges: Sequence[int]) -> bool:
        """Whether no block of 32 rows (last axis: columns) crosses ``edges`` of ``dim``."""
        if dim == len(self.shape) - 1:
            return all(edge % BLOCK == 0 for edge in edges)
        outer, chunk = math.prod(self.shape[:dim]), math.prod(self.shape[dim:-1])
        return all(edge % BLOCK == 0 for edge in (*edges, *([chunk] if outer > 1 else [])))

    def _cut(self, plane: str, dim: int, start: int, length: int, inner: int) -> NoReturn:
        unit = BLOCK // math.gcd(BLOCK, inner)
        msg = (
            f"mxfp8: a slice of axis {dim} must begin and end at a multiple of {unit}, whole "
            f"{plane} blocks of {BLOCK}, got [{start}:{start + length}] of shape "
            f"{tuple(self.shape)}; slice elsewhere, drop the {plane} plane with with_usage(), or "
            "call .dequantize() first"
        )
        raise ShapeError(msg)

    def _parts(self, dim: int) -> dict[str, tuple[Tensor, int, int]]:
        """Return each inner tensor, its axis for ``dim`` and its unit.

        The unit is 32 times its entries per entry of ``dim``. Scales come compact, with the rows
        split at ``dim``.
        """
        last = dim == len(self.shape) - 1
        outer = 1 if last else math.prod(self.shape[:dim])
        inner = 1 if last else math.prod(self.shape[dim + 1 : -1])
        out: dict[str, tuple[Tensor, int, int]] = {}
        for plane, columnwise in _PLANES:
            data, scale = getattr(self, f"{plane}_data"), getattr(self, f"{plane}_scale_inv")
            if data is None:
                continue
            out[f"{plane}_data"] = (data, dim, BLOCK)
            compact = self._compact(scale, columnwise=columnwise)
            rows, columns = compact.shape
            compact = (
                compact.reshape(outer, rows // outer, columns) if outer else compact.unsqueeze(0)
            )
            along_blocks = last != columnwise
            unit = 1 if along_blocks else BLOCK
            out[f"{plane}_scale_inv"] = (compact, 2 if last else 1, unit if last else unit * inner)
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


class MXFP8Tensor(MXFP8Storage, QuantizedTensor):
    """An MXFP8 tensor that torch sees as one of the logical shape and nominal dtype."""
