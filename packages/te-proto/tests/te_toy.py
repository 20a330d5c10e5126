# SPDX-License-Identifier: Apache-2.0
"""A format to test the core with: int8 codes, float32 scales, every layout rule.

Codes have the logical shape in both planes. With ``block = 0`` a scale covers a whole row or column
and any shape will do; otherwise ``block`` elements along it, and the axis must be a multiple.
Scales are ``[M, K // block]`` rowwise and ``[M // block, K]`` columnwise, the other way round with
``optimize_for_gemm``.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_proto import BufferSpec, QuantizedStorage, QuantizedTensor, Quantizer, TensorProto
from te_proto.errors import ShapeError
from te_proto.recipe import Recipe
from te_proto.storage import InnerTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

MAX = 127


class Rounding(enum.Enum):
    """How a value becomes a code."""

    NEAREST = 1
    ZERO = 2


class ToyStorage(QuantizedStorage):
    rowwise_data: InnerTensor
    rowwise_scale_inv: InnerTensor
    columnwise_data: InnerTensor
    columnwise_scale_inv: InnerTensor

    def view_inner(self, shape: Sequence[int]) -> dict[str, Tensor] | None:
        q = self.quantizer
        assert isinstance(q, ToyQuantizer)
        if _matrix(shape) != _matrix(self.shape) and (
            q.columnwise or q.optimize_for_gemm or not q.block or not shape or shape[-1] % q.block
        ):
            return None
        specs, held = q.describe_buffers(shape), self.inner_tensors()
        if any(math.prod(specs[n].shape) != t.numel() for n, t in held.items()):
            return None
        same = {n: tuple(t.shape) == tuple(specs[n].shape) for n, t in held.items()}
        return {n: t if same[n] else t.view(specs[n].shape) for n, t in held.items()}

    def narrow_inner(self, dim: int, start: int, length: int) -> dict[str, Tensor]:
        q = self.quantizer
        assert isinstance(q, ToyQuantizer)
        last, inner = dim == len(self.shape) - 1, math.prod(self.shape[dim + 1 : -1])
        out: dict[str, Tensor] = {}
        for plane, blocks_run_along in (("rowwise", last), ("columnwise", not last)):
            data, scale = getattr(self, f"{plane}_data"), getattr(self, f"{plane}_scale_inv")
            if data is None:
                continue
            rows = 1 if last else inner
            if blocks_run_along and q.block:
                if (start * rows) % q.block or (length * rows) % q.block or (dim and not last):
                    msg = (
                        f"toy: a slice of axis {dim} must begin and end on a {plane} block of "
                        f"{q.block}, got [{start}:{start + length}] of shape {tuple(self.shape)}"
                    )
                    raise ShapeError(msg)
                unit = q.block
            else:
                unit = 0 if blocks_run_along else 1
            out[f"{plane}_data"] = data.narrow(dim, start, length).contiguous()
            kept = q.store(scale)
            if unit and last:
                kept = kept.narrow(1, start // unit, length // unit)
            elif unit == 1:
                kept = kept.view(*self.shape[:-1], -1).narrow(dim, start, length).flatten(0, -2)
            elif unit:
                kept = kept.narrow(0, start * rows // unit, length * rows // unit)
            out[f"{plane}_scale_inv"] = q.store(kept)
        return out

    @classmethod
    def cat_inner(cls, tensors: Sequence[Self], dim: int) -> dict[str, Tensor] | None:
        q, last = tensors[0].quantizer, dim == len(tensors[0].shape) - 1
        assert isinstance(q, ToyQuantizer)
        out: dict[str, Tensor] = {}
        for name in tensors[0].inner_tensors():
            parts = [getattr(t, name) for t in tensors]
            if name.endswith("data"):
                out[name] = torch.cat(parts, dim)
            elif (not q.block and last == name.startswith("row")) or not (last or dim == 0):
                return None
            else:
                out[name] = q.store(torch.cat([q.store(p) for p in parts], 1 if last else 0))
        return out

    def transpose_inner(self) -> tuple[Quantizer, dict[str, Tensor]] | None:
        q, out = self.quantizer, {}
        for name in ("columnwise_data", "columnwise_scale_inv"):
            if (t := getattr(self, name)) is not None:
                out[name.replace("column", "row")] = t.t().contiguous()
        for name in ("rowwise_data", "rowwise_scale_inv"):
            if (t := getattr(self, name)) is not None:
                out[name.replace("row", "column")] = t.t().contiguous()
        return q.with_usage(rowwise=q.columnwise, columnwise=q.rowwise), out


class ToyTensor(ToyStorage, QuantizedTensor):
    pass


class ToyQuantizer(Quantizer):
    block: int = 4
    rounding: Rounding = Rounding.NEAREST
    ceiling: float = math.inf
    note: str = ""

    format_name: ClassVar[str] = "toy"
    storage_class: ClassVar = ToyStorage
    tensor_class: ClassVar = ToyTensor

    def alignment(self) -> tuple[int, int]:
        block = self.block or 1
        return (block if self.columnwise else 1, block if self.rowwise else 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        for size, multiple, axis in zip(_matrix(shape), self.alignment(), "MK", strict=True):
            if size % multiple:
                msg = f"toy: {axis} must be a multiple of {multiple}, got {size} in {tuple(shape)}"
                raise ShapeError(msg)

    def store(self, scale: Tensor) -> Tensor:
        return _dense(scale.t() if self.optimize_for_gemm else scale)

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        m, k = _matrix(shape)
        out = {}
        for plane, size in (
            ("rowwise", (m, k // self.block if self.block else 1)),
            ("columnwise", (m // self.block if self.block else 1, k)),
        ):
            if getattr(self, plane):
                out[f"{plane}_data"] = BufferSpec(tuple(shape), torch.int8)
                scale = size[::-1] if self.optimize_for_gemm else size
                out[f"{plane}_scale_inv"] = BufferSpec(scale, torch.float32)
        return out

    def quantize_impl(self, x: Tensor) -> dict[str, Tensor]:
        m, k = _matrix(x.shape)
        matrix = x.reshape(m, k).float().clamp(-self.ceiling, self.ceiling)
        made = {}
        if self.rowwise:
            codes, scale = self._encode(matrix.reshape(m, *_cut(k, self.block)))
            made["rowwise_data"] = _dense(codes.reshape(x.shape))
            made["rowwise_scale_inv"] = self.store(scale)
        if self.columnwise:
            blocks = matrix.reshape(*_cut(m, self.block), k).transpose(1, 2)
            codes, scale = self._encode(blocks)
            made["columnwise_data"] = _dense(codes.transpose(1, 2).reshape(x.shape))
            made["columnwise_scale_inv"] = self.store(scale)
        return made

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scale_inv of blocks along the last axis."""
        amax = blocks.abs().amax(-1) if blocks.shape[-1] else blocks.new_zeros(blocks.shape[:-1])
        scale_inv = amax / MAX
        codes = blocks / scale_inv.masked_fill(scale_inv == 0, 1.0).unsqueeze(-1)
        codes = codes.round() if self.rounding is Rounding.NEAREST else codes.trunc()
        # a subnormal scale may be too small by half
        return codes.clamp(-MAX, MAX).to(torch.int8), scale_inv

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        m, k = _matrix(shape)
        plane = "rowwise" if "rowwise_data" in inner else "columnwise"
        codes = inner[f"{plane}_data"].reshape(m, k).float()
        scale_inv = self.store(inner[f"{plane}_scale_inv"])
        if plane == "rowwise":
            values = codes.reshape(m, *_cut(k, self.block)) * scale_inv.unsqueeze(-1)
        else:
            values = codes.reshape(*_cut(m, self.block), k) * scale_inv.unsqueeze(1)
        return values.reshape(tuple(shape)).to(dtype)


def recipe() -> Recipe:
    """Return the recipe that the card names."""
    q = ToyQuantizer()
    return Recipe(name="toy", input=q, weight=q, grad_output=q)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1] if len(shape) else 1


def _dense(t: Tensor) -> Tensor:
    """Return ``t`` with the strides of a fresh allocation, those of size-1 axes included."""
    return t.contiguous().reshape(-1).view(t.shape)


def _cut(size: int, block: int) -> tuple[int, int]:
    return (size // block, block) if block else (1, size)


def proto(
    shape: Sequence[int], quantizer: Quantizer | None = None, **options: object
) -> TensorProto:
    """Return a float32 prototype on the CPU."""
    return TensorProto(
        **{"shape": tuple(shape), "dtype": torch.float32, "device": "cpu", "quantizer": quantizer}
        | options  # type: ignore[arg-type]
    )


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal values, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(*shape: int, quantizer: Quantizer | None = None, **kwargs: Any) -> Any:
    """Return :func:`values` in the toy format."""
    return (quantizer or ToyQuantizer()).quantize(values(*shape, **kwargs))


def pointers(q: QuantizedStorage) -> dict[str, int]:
    """Return where the inner tensors lie."""
    return {n: t.data_ptr() for n, t in q.inner_tensors().items()}


def codes_of(q: QuantizedStorage) -> dict[str, list[object]]:
    """Return the bytes of every inner tensor, to compare before and after."""
    return {n: t.tolist() for n, t in q.inner_tensors().items()}


def assert_kept(out: Any, source: Any, expected: Tensor) -> None:
    """``out`` is quantized, like ``source``, and each of its planes stands for ``expected``."""
    assert type(out) is type(source)
    assert out.dtype == source.dtype
    assert out.shape == expected.shape
    assert out.stride() == torch.empty(expected.shape).stride()
    assert torch.equal(out.dequantize(), expected)
    for usage in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        if all(getattr(out.quantizer, n) >= on for n, on in usage.items()):
            assert_plane(out.with_usage(**usage), expected)


def assert_plane(plane: Any, expected: Tensor) -> None:
    # both planes of a toy stand for about the same values, so a plane left stale would show
    assert plane.dequantize().shape == expected.shape
    if expected.numel():
        limit = 3 * expected.abs().max() / 127
        assert (plane.dequantize() - expected).abs().max() <= limit


QUANTIZERS = {
    "both": ToyQuantizer(),
    "row": ToyQuantizer(columnwise=False),
    "column": ToyQuantizer(rowwise=False),
    "whole-rows": ToyQuantizer(columnwise=False, block=0),
    "gemm": ToyQuantizer(optimize_for_gemm=True),
}
