# SPDX-License-Identifier: Apache-2.0
"""NVFP4 inner tensors and what views, slices, concatenation and transposition do with them.

A columnwise plane is that of the transposed matrix: codes ``[K, M // 2]`` whatever the logical
rank, scales compact at ``[k, m // 16]``, all leading axes flattened into ``m``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch.nn.functional import ScalingType, SwizzleType

from te_nvfp4.layout import BLOCK
from te_nvfp4.reference import compact_scale, store_scale
from te_nvfp4.rounding import transpose_packed
from te_proto.blocks import matrix_shape
from te_proto.errors import ShapeError
from te_proto.gemm import GemmOperand
from te_proto.numerics import E2M1_MAX
from te_proto.storage import InnerTensor, QuantizedStorage
from te_proto.tensor import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

    from te_nvfp4.quantizer import NVFP4Quantizer
    from te_proto.quantizer import Quantizer


class _Part(NamedTuple):
    """An inner tensor seen so that one logical axis is an axis of it.

    Attributes:
        tensor: scales come compact.
        axis: of ``tensor``; None if the logical axis is not among its own.
        times: entries of ``axis`` for ``per`` entries of the logical axis.
        per: as above.
    """

    tensor: Tensor
    axis: int | None
    times: int = 1
    per: int = 1


class NVFP4Storage(QuantizedStorage):
    """Inner tensors of NVFP4: per plane the codes, two a byte, E4M3 ``scale_inv`` and amax."""

    rowwise_data: InnerTensor
    rowwise_scale_inv: InnerTensor
    columnwise_data: InnerTensor
    columnwise_scale_inv: InnerTensor
    amax_rowwise: InnerTensor
    amax_columnwise: InnerTensor
    quantizer: NVFP4Quantizer

    def view_inner(self, shape: Sequence[int]) -> dict[str, Tensor] | None:
        """Return the inner tensors of a view, or None if a block or a line would be cut.

        They stay whole if K does, or if the new K only holds whole rowwise blocks of a tensor with
        one amax.
        """
        q, k = self.quantizer, self.shape[-1]
        if 0 in (k, *shape[-1:]) and matrix_shape(shape) != matrix_shape(self.shape):
            return None  # no elements, but scales of other rows
        inner = self.inner_tensors()
        if len(shape) > 0 and shape[-1] == k:
            if "rowwise_data" in inner:
                inner["rowwise_data"] = inner["rowwise_data"].view(*shape[:-1], k // 2)
            return inner
        if (
            len(shape) == 0
            or shape[-1] % BLOCK
            or self.columnwise_data is not None
            or q.with_2d_quantization
            or q.row_scaled_nvfp4
        ):
            return None
        out: dict[str, Tensor] = {}
        for name, tensor in inner.items():
            if name.endswith("_data"):
                out[name] = tensor.reshape(*shape[:-1], shape[-1] // 2).clone()
            elif name.endswith("_scale_inv"):
                blocks = self._compact("rowwise").reshape(-1, shape[-1] // BLOCK)
                out[name] = store_scale(blocks, *matrix_shape(shape), q.optimize_for_gemm)
            else:
                out[name] = tensor.clone()
        return out

    def narrow_inner(self, dim: int, start: int, length: int) -> dict[str, Tensor]:
        """Return the inner tensors of a slice: its codes, under the scales and amax of the whole.

        Raises:
            ShapeError: it does not begin and end on a block of each plane held.
        """
        if not self._whole(dim, (start, length)):
            self._cut(dim, start, length)
        parts = {}
        for name, (tensor, axis, times, per) in self._parts(dim).items():
            piece = tensor
            if axis is not None:
                piece = tensor.narrow(axis, start * times // per, length * times // per)
            parts[name] = piece
        shape = list(self.shape)
        shape[dim] = length
        return self._join(parts, shape)

    @classmethod
    def cat_inner(cls, tensors: Sequence[Self], dim: int) -> dict[str, Tensor] | None:
        """Return the inner tensors of the concatenation, or None if it is not exact.

        Tensors of one amax each would need one scale for all. Only lines that have their own can be
        put side by side: rows of a rowwise, columns of a columnwise plane.
        """
        first = tensors[0]
        last = dim == len(first.shape) - 1
        other = first.rowwise_data if last else first.columnwise_data
        if not first.quantizer.row_scaled_nvfp4 or other is not None:
            return None
        parts = [t._parts(dim) for t in tensors]
        joined = {}
        for name, (_, axis, _, _) in parts[0].items():
            assert axis is not None  # every buffer of the one plane has its lines as an axis
            joined[name] = torch.cat([part[name].tensor for part in parts], axis)
        shape = list(first.shape)
        shape[dim] = sum(t.shape[dim] for t in tensors)
        return first._join(joined, shape)

    def transpose_inner(self) -> tuple[Quantizer, dict[str, Tensor]] | None:
        """Return the 2-D transpose, which shares the buffers: each plane is the other's, as it is.

        None if the columnwise plane is transformed, for no rowwise one is.
        """
        q, (m, k) = self.quantizer, self.shape
        quantizer = q.with_usage(rowwise=q.columnwise, columnwise=q.rowwise)
        try:
            quantizer.check_shape((k, m))
        except ShapeError:
            return None
        if q.with_rht:
            return None
        swap = {"rowwise": "columnwise", "columnwise": "rowwise"}
        held = self.inner_tensors()
        turned = {
            name.replace(plane, other): tensor
            for plane, other in swap.items()
            for name, tensor in held.items()
            if plane in name.split("_")
        }
        return quantizer, {n: turned[n] for n in quantizer.describe_buffers((k, m))}

    def derive_inner(self, quantizer: Quantizer, missing: list[str]) -> dict[str, Tensor]:
        """Return the columnwise plane of 16x16 blocks, the transpose of the rowwise one.

        Raises:
            UsageError: blocks are 1x16 or transformed, or it is the rowwise plane that is missing.
        """
        q = self.quantizer
        exact = q.with_2d_quantization and not q.with_rht
        if not exact or self.rowwise_data is None or not quantizer.rowwise:
            return super().derive_inner(quantizer, missing)
        m, k = matrix_shape(self.shape)
        scale = self._compact("rowwise")[::BLOCK].t().repeat_interleave(BLOCK, 0)
        assert self.amax_rowwise is not None  # held with the codes
        return {
            "columnwise_data": transpose_packed(self.rowwise_data.reshape(m, k // 2)),
            "columnwise_scale_inv": store_scale(scale, k, m, q.optimize_for_gemm),
            "amax_columnwise": self.amax_rowwise.clone(),
        }

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        """Return one plane, read in place, None if each of its lines has an amax; see the base."""
        q, (m, k) = self.quantizer, matrix_shape(self.shape)
        plane = "columnwise" if columnwise else "rowwise"
        data, scale = getattr(self, f"{plane}_data"), getattr(self, f"{plane}_scale_inv")
        if data is None or q.row_scaled_nvfp4:
            return None
        outer, inner = (k, m) if columnwise else (m, k)
        return GemmOperand(
            data.reshape(outer, inner // 2).view(torch.float4_e2m1fn_x2),
            scale.view(torch.float8_e4m3fn),
            ScalingType.BlockWise1x16,
            SwizzleType.SWIZZLE_32_4_4 if q.optimize_for_gemm else SwizzleType.NO_SWIZZLE,
            factor=getattr(self, f"amax_{plane}") * (1.0 / (E2M1_MAX * q.nvfp4_e4m3_max)),
            transform=("hadamard", q.with_random_sign_mask) if columnwise and q.with_rht else None,
        )

    # -- helpers ----------------------------------------------------------------------------------

    def _compact(self, plane: str) -> Tensor:
        m, k = matrix_shape(self.shape)
        outer, inner = (m, k) if plane == "rowwise" else (k, m)
        scale = getattr(self, f"{plane}_scale_inv")
        return compact_scale(scale, outer, inner, self.quantizer.optimize_for_gemm)

    def _split(self, dim: int) -> tuple[int, int, int]:
        """Return how the rows of the matrix lie around ``dim``: outer, in all of it, in one of it.

        For the last axis all rows are one chunk.
        """
        if dim == len(self.shape) - 1:
            return 1, math.prod(self.shape[:-1]), 1
        return (
            math.prod(self.shape[:dim]),
            math.prod(self.shape[dim:-1]),
            math.prod(self.shape[dim + 1 : -1]),
        )

    def _whole(self, dim: int, edges: Sequence[int]) -> bool:
        """Whether no block that a plane needs whole crosses ``edges`` of ``dim``."""
        rows, columns = self.quantizer.alignment()
        if dim == len(self.shape) - 1:
            return all(edge % columns == 0 for edge in edges)
        outer, chunk, inner = self._split(dim)
        in_rows = [edge * inner for edge in edges] + ([chunk] if outer > 1 else [])
        return all(edge % rows == 0 for edge in in_rows)

    def _cut(self, dim: int, start: int, length: int) -> NoReturn:
        last = dim == len(self.shape) - 1
        rows, columns = self.quantizer.alignment()
        block = columns if last else rows
        unit = block if last else rows // math.gcd(rows, self._split(dim)[2])
        plane = "rowwise" if last else "columnwise"
        msg = (
            f"nvfp4: a slice of axis {dim} must begin and end at a multiple of {unit}, whole "
            f"{plane} blocks of {block}, got [{start}:{start + length}] of shape "
            f"{tuple(self.shape)}; slice elsewhere, drop the {plane} plane with with_usage(), or "
            "call .dequantize() first"
        )
        raise ShapeError(msg)

    def _parts(self, dim: int) -> dict[str, _Part]:
        """Return each inner tensor seen along ``dim``, with the rows split there."""
        last = dim == len(self.shape) - 1
        outer, chunk, rows = self._split(dim)
        k = self.shape[-1]
        out: dict[str, _Part] = {}
        if self.rowwise_data is not None:
            data = self.rowwise_data.reshape(outer, chunk, k // 2)
            scale = self._compact("rowwise").reshape(outer, chunk, k // BLOCK)
            out["rowwise_data"] = _Part(data, 2, 1, 2) if last else _Part(data, 1, rows)
            out["rowwise_scale_inv"] = _Part(scale, 2, 1, BLOCK) if last else _Part(scale, 1, rows)
        if self.columnwise_data is not None:
            data = self.columnwise_data.reshape(k, outer, chunk // 2)
            scale = self._compact("columnwise").reshape(k, outer, chunk // BLOCK)
            out["columnwise_data"] = _Part(data, 0) if last else _Part(data, 2, rows, 2)
            out["columnwise_scale_inv"] = _Part(scale, 0) if last else _Part(scale, 2, rows, BLOCK)
        lines = self.quantizer.row_scaled_nvfp4
        if self.amax_rowwise is not None:
            split = lines and not last
            amax = self.amax_rowwise.reshape(outer, chunk) if split else self.amax_rowwise
            out["amax_rowwise"] = _Part(amax, 1 if split else None, rows)
        if self.amax_columnwise is not None:
            out["amax_columnwise"] = _Part(self.amax_columnwise, 0 if lines and last else None)
        return out

    def _join(self, parts: dict[str, Tensor], shape: Sequence[int]) -> dict[str, Tensor]:
        """Make the inner tensors of ``shape`` from what :meth:`_parts` split."""
        m, k = matrix_shape(shape)
        sizes = {"rowwise": (m, k), "columnwise": (k, m)}
        out: dict[str, Tensor] = {}
        for name, spec in self.quantizer.describe_buffers(shape).items():
            part = parts[name]
            if name.endswith("_scale_inv"):
                outer, inner = sizes[name.removesuffix("_scale_inv")]
                compact = part.reshape(outer, inner // BLOCK)
                out[name] = store_scale(compact, outer, inner, self.quantizer.optimize_for_gemm)
            else:
                # a copy even where a view would do: scales are copies, and all must age alike
                out[name] = part.clone(memory_format=torch.contiguous_format).view(spec.shape)
        return out


class NVFP4Tensor(NVFP4Storage, QuantizedTensor):
    """An NVFP4 tensor that torch sees as one of the logical shape and nominal dtype."""
