# SPDX-License-Identifier: Apache-2.0
"""The toy format with one fault each, in its storage or tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from te_toy import ToyQuantizer, ToyStorage
from torch import Tensor

from te_proto import QuantizedStorage, QuantizedTensor, Quantizer
from te_proto.gemm import GemmOperand
from te_proto.storage import FlattenContext

Buffers = dict[str, Tensor]


class SizedContextStorage(ToyStorage):
    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return names, SizedContext(*context, tuple(self.shape))

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Any:
        return context.build(inner, outer_size)


class SizedContext(tuple[Any, ...]):
    def __new__(cls, *parts: Any) -> Any:
        return super().__new__(cls, parts)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return FlattenContext(*self[:3]).build(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return tuple(self)[: len(tuple(other))] == tuple(other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(tuple(self))


class SizedContextTensor(SizedContextStorage, QuantizedTensor):
    pass


class LosesAttributesStorage(ToyStorage):
    def _extra_state(self) -> dict[str, Any]:
        return {}


class LosesAttributesTensor(LosesAttributesStorage, QuantizedTensor):
    pass


class OperandWithoutScaleStorage(ToyStorage):
    def gemm_operand(self, *, columnwise: bool) -> GemmOperand:
        data = self.columnwise_data if columnwise else self.rowwise_data
        assert data is not None
        matrix = data.reshape(-1, data.shape[-1])
        return GemmOperand(matrix.t() if columnwise else matrix, torch.ones(1))


class OperandWithoutScaleTensor(OperandWithoutScaleStorage, QuantizedTensor):
    pass


class MovesDataAloneStorage(ToyStorage):
    def to(self, device: Any, **kwargs: Any) -> Any:
        out = super().to(device, **kwargs)
        out.rowwise_scale_inv = self.rowwise_scale_inv
        out.columnwise_scale_inv = self.columnwise_scale_inv
        return out


class MovesDataAloneTensor(MovesDataAloneStorage, QuantizedTensor):
    pass


class UnderstatesStorage(ToyStorage):
    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(t.nbytes for n, t in self.inner_tensors().items() if n.endswith("data"))


class UnderstatesTensor(UnderstatesStorage, QuantizedTensor):
    pass


class QuantizerStaysStorage(ToyStorage):
    def update_usage(self, *, rowwise: Any = None, columnwise: Any = None) -> None:
        if columnwise is False:
            self.columnwise_data = self.columnwise_scale_inv = None


class QuantizerStaysTensor(QuantizerStaysStorage, QuantizedTensor):
    pass


class InventsPlanesStorage(ToyStorage):
    def derive_inner(self, quantizer: Quantizer, missing: list[str]) -> Buffers:
        specs = quantizer.describe_buffers(self.shape)
        return {n: torch.zeros(specs[n].shape, dtype=specs[n].dtype) for n in missing}


class InventsPlanesTensor(InventsPlanesStorage, QuantizedTensor):
    pass


# -- views -----------------------------------------------------------------------------------------


class SlicesFromTheStartStorage(ToyStorage):
    def narrow_inner(self, dim: int, start: int, length: int) -> Buffers:
        return super().narrow_inner(dim, 0, length)


class SlicesFromTheStartTensor(SlicesFromTheStartStorage, QuantizedTensor):
    pass


class CutsBlocksStorage(ToyStorage):
    def narrow_inner(self, dim: int, start: int, length: int) -> Buffers:
        whole = super().narrow_inner(dim, start // 4 * 4, length // 4 * 4)
        for name in whole:
            if name.endswith("data"):
                whole[name] = getattr(self, name).narrow(dim, start, length).contiguous()
        return whole


class CutsBlocksTensor(CutsBlocksStorage, QuantizedTensor):
    pass


class SliceHasNoAttributeStorage(ToyStorage):
    def narrow_inner(self, dim: int, start: int, length: int) -> Buffers:
        return {"rowwise_data": self.rowwise_codes}  # type: ignore[attr-defined]


class SliceHasNoAttributeTensor(SliceHasNoAttributeStorage, QuantizedTensor):
    pass


class SliceSaysNothingStorage(ToyStorage):
    def narrow_inner(self, dim: int, start: int, length: int) -> Buffers:
        from te_proto.errors import ShapeError

        msg = "cannot slice"
        raise ShapeError(msg)


class SliceSaysNothingTensor(SliceSaysNothingStorage, QuantizedTensor):
    pass


class SilentSliceStorage(ToyStorage):
    pass


class SilentSliceTensor(SilentSliceStorage, QuantizedTensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return func(QuantizedStorage.dequantize(args[0]), *args[1:], **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class IgnoresTheStepStorage(ToyStorage):
    pass


class IgnoresTheStepTensor(IgnoresTheStepStorage, QuantizedTensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor and len(args) == 5:
            q, dim, start, end, _ = args
            if (start, end) == (0, q.shape[dim]):
                return q.like(q.inner_tensors())
        return super().__torch_dispatch__(func, types, args, kwargs)


class NeedsAllArgumentsStorage(ToyStorage):
    pass


class NeedsAllArgumentsTensor(NeedsAllArgumentsStorage, QuantizedTensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            _, _, _ = args[1], args[2], args[3]
        return super().__torch_dispatch__(func, types, args, kwargs)


class ViewForgetsOptionsStorage(ToyStorage):
    def like(self, inner: Any, **kwargs: Any) -> Any:
        held = kwargs.pop("quantizer", None) or self.quantizer
        return super().like(inner, quantizer=held.replace(note=""), **kwargs)


class ViewForgetsOptionsTensor(ViewForgetsOptionsStorage, QuantizedTensor):
    pass


class ViewForgetsTheDtypeStorage(ToyStorage):
    def like(self, inner: Any, **kwargs: Any) -> Any:
        return super().like(inner, **kwargs | {"dtype": torch.float32})


class ViewForgetsTheDtypeTensor(ViewForgetsTheDtypeStorage, QuantizedTensor):
    pass


class OneScaleForAllStorage(ToyStorage):
    @classmethod
    def cat_inner(cls, tensors: Sequence[Any], dim: int) -> Buffers | None:
        joined = super().cat_inner(tensors, dim)
        alone = super().cat_inner([tensors[0], *tensors[:1] * (len(tensors) - 1)], dim)
        if joined is None or alone is None:
            return None
        return {n: alone[n] if "scale" in n else t for n, t in joined.items()}


class OneScaleForAllTensor(OneScaleForAllStorage, QuantizedTensor):
    pass


class ReshapesScalesAsTheyLieStorage(ToyStorage):
    def view_inner(self, shape: Sequence[int]) -> Buffers | None:
        q = self.quantizer
        if q.columnwise or not shape or shape[-1] % 4:
            return super().view_inner(shape)
        specs = q.describe_buffers(shape)  # right where scales are not turned for a GEMM
        return {n: t.view(specs[n].shape) for n, t in self.inner_tensors().items()}


class ReshapesScalesAsTheyLieTensor(ReshapesScalesAsTheyLieStorage, QuantizedTensor):
    pass


class TransposesCodesAloneStorage(ToyStorage):
    def transpose_inner(self) -> tuple[Quantizer, Buffers] | None:
        q, inner = super().transpose_inner()  # type: ignore[misc]
        return q, {n: t.flip(0) if "scale" in n else t for n, t in inner.items()}


class TransposesCodesAloneTensor(TransposesCodesAloneStorage, QuantizedTensor):
    pass


class AliasForACopyStorage(ToyStorage):
    pass


class AliasForACopyTensor(AliasForACopyStorage, QuantizedTensor):
    @property
    def is_view_copy(self) -> bool:  # type: ignore[override]
        return False

    @is_view_copy.setter
    def is_view_copy(self, value: bool) -> None:
        pass


# -- copies ----------------------------------------------------------------------------------------


class SharedDeepcopyStorage(ToyStorage):
    pass


class SharedDeepcopyTensor(SharedDeepcopyStorage, QuantizedTensor):
    def __deepcopy__(self, memo: Any) -> Any:
        out = self.like(self.inner_tensors()).requires_grad_(self.requires_grad)
        out.__dict__.update(self._extra_state())
        out.note = list(getattr(self, "note", []))
        return out


class DtypeStaysStorage(ToyStorage):
    pass


class DtypeStaysTensor(DtypeStaysStorage, QuantizedTensor):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self if isinstance(args[0], torch.dtype) else super().to(*args, **kwargs)


class CodesFollowTheDtypeStorage(ToyStorage):
    pass


class CodesFollowTheDtypeTensor(CodesFollowTheDtypeStorage, QuantizedTensor):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], torch.dtype):
            return super().to(*args, **kwargs)
        return self.quantizer.quantize(self.dequantize(args[0]))


@functools.cache
def quantizer_of(tensor: type[Any]) -> type[ToyQuantizer]:
    """Return the toy quantizer that makes such tensors, and their storage."""

    class Mutant(ToyQuantizer):
        __qualname__ = f"Of{tensor.__name__}"
        storage_class: ClassVar[Any] = tensor.__mro__[1]
        tensor_class: ClassVar[Any] = tensor

    return Mutant
