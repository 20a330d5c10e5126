# SPDX-License-Identifier: Apache-2.0
"""The toy format with one fault each, in its quantizer."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from te_toy import Rounding, ToyQuantizer
from torch import Tensor

from te_proto import BufferSpec
from te_proto.errors import QuantizerError, ShapeError
from te_proto.numerics import decode_e8m0, e8m0_from_amax
from te_proto.storage import QuantizedStorage

Buffers = dict[str, Tensor]


def without_data(x: Tensor) -> bool:
    return x.device.type == "meta" or type(x) is not Tensor


class PaddedQuantizer(ToyQuantizer):
    """No fault: scales are padded to a multiple of 8 along their first axis, with zeros."""

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        return {
            name: BufferSpec((-(-spec.shape[0] // 8) * 8, spec.shape[1]), spec.dtype)
            if "scale" in name
            else spec
            for name, spec in super().describe_buffers(shape).items()
        }

    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        return {n: self.padded(t, x) if "scale" in n else t for n, t in made.items()}

    def padded(self, scale: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(scale, (0, 0, 0, -scale.shape[0] % 8))

    def dequantize_impl(self, inner: Buffers, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        rows = {n: s.shape[0] for n, s in super().describe_buffers(shape).items()}
        cut = {n: t[: rows[n]] if "scale" in n else t for n, t in inner.items()}
        return super().dequantize_impl(cut, shape, dtype)


# -- layout ----------------------------------------------------------------------------------------


class OtherOrder(ToyQuantizer):
    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        return dict(reversed(super().describe_buffers(shape).items()))

    def quantize_impl(self, x: Tensor) -> Buffers:
        return dict(reversed(super().quantize_impl(x).items()))


class UnpaddedFake(PaddedQuantizer):
    def padded(self, scale: Tensor, x: Tensor) -> Tensor:
        return scale if without_data(x) else super().padded(scale, x)


class UnwrittenPadding(PaddedQuantizer):
    def padded(self, scale: Tensor, x: Tensor) -> Tensor:
        out = scale.new_empty(-(-scale.shape[0] // 8) * 8, scale.shape[1])
        out[: scale.shape[0]] = scale
        return out


class UnwrittenPaddingInPlace(PaddedQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        for name, made in ToyQuantizer.quantize_impl(self, x).items():
            if noop is None or noop != 1.0:
                out[name][: made.shape[0]] = made


class MissingPlane(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        return {n: t for n, t in made.items() if not (self.rowwise and n.startswith("col"))}


class OtherStride(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        for name, t in made.items():
            if t.shape[-1] == 1:  # contiguous, and yet of other strides than a fresh tensor
                made[name] = t.view(1, -1).as_strided((1, len(t)), (len(t), 1)).t()
        return made


class OtherDtype(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        return {n: t.double() if t.is_floating_point() else t for n, t in made.items()}


class OtherDtypeOfFake(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        return {n: t.view(torch.uint8) if without_data(x) else t for n, t in made.items()}


class OtherDeviceOfFake(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        if not without_data(x):
            return made
        return {n: torch.empty(t.shape, dtype=t.dtype, device="cpu") for n, t in made.items()}


class SizesIn32Bits(ToyQuantizer):
    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        return {
            n: BufferSpec((math.prod(s.shape) & 0x7FFFFFFF,), s.dtype)
            for n, s in super().describe_buffers(shape).items()
        }

    def quantize_impl(self, x: Tensor) -> Buffers:
        return {n: t.reshape(-1) for n, t in super().quantize_impl(x).items()}


class SharedMemory(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        if len(made) == 4:
            made["columnwise_data"] = made["rowwise_data"]
        return made


class HeldTooMuch(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        return {
            n: torch.cat([t, t])[: t.shape[0]] if t.dim() else t
            for n, t in super().quantize_impl(x).items()
        }


class TransposedShape(ToyQuantizer):
    def quantize(self, x: Any, **call: Any) -> Any:
        lost = self.columnwise and not self.rowwise and x.dim() == 2
        return super().quantize(x.t() if lost else x, **call)


# -- shapes ----------------------------------------------------------------------------------------


class CrashOnEmpty(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        x.reshape(-1)[:1].reshape(())  # takes the first element
        return super().quantize_impl(x)


class RefusedTooLate(ToyQuantizer):
    def check_shape(self, shape: Sequence[int]) -> None:
        """Leave it to the reshape in the middle."""


class RefusedWithoutFormat(ToyQuantizer):
    def check_shape(self, shape: Sequence[int]) -> None:
        try:
            super().check_shape(shape)
        except ShapeError:
            msg = "bad shape"
            raise ShapeError(msg) from None


class RefusedByCallAlone(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        if x.dim() == 1:
            msg = f"toy: x must have two axes, got {tuple(x.shape)}"
            raise ShapeError(msg)
        return super().quantize_impl(x)


class OtherAlignment(ToyQuantizer):
    def alignment(self) -> tuple[int, int]:
        return (1, 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        ToyQuantizer(rowwise=self.rowwise, columnwise=self.columnwise).check_shape(shape)


# -- values of quantizers --------------------------------------------------------------------------


class MutatedByUse(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        object.__setattr__(self, "ceiling", 3.3e38)
        return super().quantize_impl(x)


class CountsItsCalls(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        object.__setattr__(self, "_calls", getattr(self, "_calls", 0) + 1)
        return super().quantize_impl(x)


class ForgottenInEquality(ToyQuantizer):
    note: str = dataclasses.field(default="", compare=False)


class ForgottenInState(ToyQuantizer):
    def state(self) -> dict[str, Any]:
        return {n: v for n, v in super().state().items() if n != "ceiling"}


class ForgottenInSource(ToyQuantizer):
    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        source, classes = super().__fx_repr__()
        return source.replace(f", note={self.note!r}", ""), classes


class ForgottenInCacheKey(ToyQuantizer):
    def _stable_hash_for_caching(self) -> str:
        return type(self).__name__


class HashOfTheObject(ToyQuantizer):
    __hash__ = object.__hash__


class UsageForgetsOptions(ToyQuantizer):
    def with_usage(self, *, rowwise: Any = None, columnwise: Any = None) -> Any:
        other = super().with_usage(rowwise=rowwise, columnwise=columnwise)
        return type(self)(rowwise=other.rowwise, columnwise=other.columnwise)


class HasStaticMethod(ToyQuantizer):
    @staticmethod
    def helper() -> int:
        return 1


class SilentOption(ToyQuantizer):
    def __post_init__(self) -> None:
        if not isinstance(self.note, str):
            msg = "wrong note"
            raise QuantizerError(msg)
        super().__post_init__()


class WritesItsInput(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        return super().quantize_impl(x.clamp_(-1.0, 1.0))


class RoundsByChance(ToyQuantizer):
    """No fault: codes are one off where a generator says so."""

    chance: bool = True

    def call_arguments(self) -> tuple[str, ...]:
        return ("rng",) if self.chance else ()

    def at_rest(self) -> Any:
        return self.replace(chance=False)

    def quantize_impl(self, x: Tensor, rng: Tensor | None = None) -> Buffers:
        made = super().quantize_impl(x)
        if rng is not None and not without_data(x):
            seed = hash(tuple(rng.tolist())) % 2**31
            for name, t in made.items():
                if name.endswith("data"):
                    g = torch.Generator().manual_seed(seed)
                    t += torch.randint(2, t.shape, generator=g, dtype=torch.int8) * (t < 0)
        return made


class IgnoresTheSeed(RoundsByChance):
    def quantize_impl(self, x: Tensor, rng: Tensor | None = None) -> Buffers:
        return super().quantize_impl(x)


class KeepsTheSeed(RoundsByChance):
    def at_rest(self) -> Any:
        return self


# -- bytes -----------------------------------------------------------------------------------------


class IgnoresStrides(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        if not without_data(x) and x.numel() <= x.untyped_storage().nbytes() // x.itemsize:
            x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), 0)
        return super().quantize_impl(x)


_amax = [math.inf]


class RemembersAmax(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x.float().clamp(-_amax[0], _amax[0]))
        if not without_data(x):
            _amax[0] = float(x.abs().max())
        return made


_scratch: dict[str, Tensor] = {}


class SharesScratch(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        _scratch["x"] = x
        time.sleep(0.001)
        last = _scratch["x"]
        return super().quantize_impl(last if last.shape == x.shape else x)


class StaleColumns(ToyQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        some = {n: t for n, t in out.items() if self.rowwise <= n.startswith("row")}
        for name, made in self.quantize_impl(x).items():
            if name in some and (noop is None or noop != 1.0):
                out[name].copy_(made)


class TakesTheFirstToWrite(ToyQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        x.reshape(-1)[:1].reshape(())
        super().quantize_into_impl(x, out, noop)


class MovesBuffers(ToyQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        for name, made in self.quantize_impl(x).items():
            if noop is None or noop != 1.0:
                out[name].set_(made)


class AnyNoop(ToyQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        if noop is None or not noop.bool():
            super().quantize_into_impl(x, out, None)


class NoopUnknownToGraphs(ToyQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        super().quantize_into_impl(x, out, None if torch.compiler.is_compiling() else noop)


class OptionLostInPlace(ToyQuantizer):
    def quantize_into_impl(self, x: Tensor, out: Buffers, noop: Tensor | None, **call: Any) -> None:
        q = self.replace(rounding=Rounding.NEAREST)
        super(type(self), q).quantize_into_impl(x, out, noop)


class ProductUnderAutocast(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        return super().quantize_impl(x.float() @ torch.eye(x.shape[-1], device=x.device))


class OtherInGraphs(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        return super().quantize_impl(x * 2 if torch.compiler.is_compiling() else x)


class GuardsOnSizes(ToyQuantizer):
    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        if shape and shape[0] > 150:
            return dict(super().describe_buffers(shape))
        return super().describe_buffers(shape)


# -- what they stand for ---------------------------------------------------------------------------


class _Encodes(ToyQuantizer):
    def scale_of(self, amax: Tensor) -> Tensor:
        return amax / 127

    def codes_of(self, blocks: Tensor, scale_inv: Tensor) -> Tensor:
        return blocks / scale_inv.masked_fill(scale_inv == 0, 1.0).unsqueeze(-1)

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        amax = blocks.abs().amax(-1) if blocks.shape[-1] else blocks.new_zeros(blocks.shape[:-1])
        scale_inv = self.scale_of(amax)
        codes = self.codes_of(blocks, scale_inv).round().clamp(-127, 127)
        return codes.to(torch.int8), scale_inv


class ZeroByZero(_Encodes):
    def scale_of(self, amax: Tensor) -> Tensor:
        return amax / amax * amax / 127


class OverflowingReciprocal(_Encodes):
    def codes_of(self, blocks: Tensor, scale_inv: Tensor) -> Tensor:
        codes = blocks * (1.0 / scale_inv).unsqueeze(-1)
        return torch.where(blocks == 0, 0.0, codes.nan_to_num(nan=99.0, posinf=50.0, neginf=-50.0))


class OverflowingScale(_Encodes):
    def scale_of(self, amax: Tensor) -> Tensor:
        return amax * 2 / 254


class CoarseCodes(_Encodes):
    def codes_of(self, blocks: Tensor, scale_inv: Tensor) -> Tensor:
        return (super().codes_of(blocks, scale_inv) / 16).round() * 16


class RowsOutOfPlace(ToyQuantizer):
    def quantize_impl(self, x: Tensor) -> Buffers:
        made = super().quantize_impl(x)
        if self.columnwise and x.dim() > 1:
            made["columnwise_data"] = made["columnwise_data"].flip(-1).contiguous()
        return made


class DriftsAway(ToyQuantizer):
    def dequantize_impl(self, inner: Buffers, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return super().dequantize_impl(inner, shape, dtype) * 1.001


class IgnoresTheDtype(ToyQuantizer):
    def dequantize_impl(self, inner: Buffers, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return super().dequantize_impl(inner, shape, torch.float32)


# -- autograd --------------------------------------------------------------------------------------


class LosesRequiresGrad(ToyQuantizer):
    def quantize(self, x: Any, **call: Any) -> Any:
        return super().quantize(x.detach() if isinstance(x, Tensor) else x, **call)


class ScalesTheGradient(ToyQuantizer):
    def quantize(self, x: Any, **call: Any) -> Any:
        made = super().quantize(x, **call)
        if self.internal or isinstance(x, QuantizedStorage) or not x.requires_grad:
            return made
        return torch.ops.te_proto.straight_through(x * 2, made.detach())


# -- E8M0 ------------------------------------------------------------------------------------------


class PowerOfTwoQuantizer(ToyQuantizer):
    """No fault: scales are E8M0 bytes."""

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        return {
            n: BufferSpec(s.shape, torch.uint8 if "scale" in n else s.dtype)
            for n, s in super().describe_buffers(shape).items()
        }

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        amax = blocks.abs().amax(-1) if blocks.shape[-1] else blocks.new_zeros(blocks.shape[:-1])
        byte = e8m0_from_amax(amax, "e4m3")  # two binades more than int8 needs
        codes = blocks / self.scale_of(byte).unsqueeze(-1)
        return codes.round().clamp(-127, 127).to(torch.int8), byte

    def dequantize_impl(self, inner: Buffers, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wide = {n: self.scale_of(t) if "scale" in n else t for n, t in inner.items()}
        return super().dequantize_impl(wide, shape, dtype)

    def scale_of(self, byte: Tensor) -> Tensor:
        return decode_e8m0(byte)


class ZeroCodeIsZero(PowerOfTwoQuantizer):
    def scale_of(self, byte: Tensor) -> Tensor:
        return torch.where(byte == 0, 0.0, super().scale_of(byte))


class LastCodeIsInfinity(PowerOfTwoQuantizer):
    def scale_of(self, byte: Tensor) -> Tensor:
        return super().scale_of(byte).nan_to_num(nan=math.inf)
