# SPDX-License-Identifier: Apache-2.0
"""The operations of Triton's interpreter, made exact: a builder that replaces the stock one.

Imports triton, so it is imported only when a kernel is about to run. Names such as ``create_fma``
are the stock builder's. What is overridden, and why, is said at each; all else is inherited.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from te_proto.errors import TeError
from te_proto.testing import _exact as exact
from te_proto.testing import _ptx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_proto.testing._exact import Array

_SMALL = {
    tl.float16: exact.FP16,
    tl.bfloat16: exact.BF16,
    tl.float8e4nv: exact.E4M3,
    tl.float8e5: exact.E5M2,
}
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
_ARITHMETIC = (np.add, np.subtract, np.multiply, np.divide, np.fmod)
_LIBDEVICE = {
    f"__nv_{name}{suffix}": function
    for name, function in {
        "rint": np.rint,
        "nearbyint": np.rint,
        "trunc": np.trunc,
        "floor": np.floor,
        "ceil": np.ceil,
        "copysign": np.copysign,
    }.items()
    for suffix in ("", "f")
}

ADDRESS_BITS = 48
"""User-space addresses stay below this; a pointer carries the number of its argument above it."""

Handle = stock.TensorHandle


class OutOfBoundsError(TeError, IndexError):
    """A kernel touched memory outside the tensor argument its pointer comes from."""


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one tensor argument: its name, the first address, one past the last."""

    name: str
    start: int
    stop: int


def scalar(handle: Any) -> Any:
    return handle.dtype.scalar


def to_float(handle: Any) -> Array:
    """Return the values of a float handle as float32, or float64 for fp64, exact."""
    kind = scalar(handle)
    if kind in _SMALL:
        return exact.decode(handle.data, _SMALL[kind])
    if kind in (tl.float32, tl.float64):
        return np.asarray(handle.data)
    msg = f"interpreter: {kind} is not emulated; use float8e4nv or float8e5"
    raise TeError(msg)


def from_float(value: Array, kind: Any, *, toward_zero: bool = False) -> Any:
    """Return a handle of type ``kind`` with ``value`` rounded once."""
    if kind in _SMALL:
        code = exact.encode(value, _SMALL[kind], toward_zero=toward_zero)
        return Handle(code.view(stock._get_np_dtype(kind)), kind)
    if kind == tl.float32:
        with np.errstate(all="ignore"):
            return Handle(exact.canonical_nan(np.asarray(value).astype(np.float32)), kind)
    if kind == tl.float64:
        return Handle(np.asarray(value).astype(np.float64), kind)
    msg = f"interpreter: {kind} is not emulated; use float8e4nv or float8e5"
    raise TeError(msg)


class _AsmCall:
    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get_result(self, index: int) -> Any:
        return self._results[index]


class ExactBuilder(stock.InterpreterBuilder):
    """The builder of one launch; ``regions`` are its tensor arguments, in order of their tags."""

    def __init__(self) -> None:
        super().__init__()
        # the stock builder redoes every integer addition in int64 to find overflow
        options = stock.InterpreterOptions()
        self.options = dataclasses.replace(options, sanitize_overflow=False)
        self.regions: list[Region] = []

    # conversions: stock truncates to bf16, breaks ties away from zero and loses carries in fp8

    def get_bf16(self, value: float) -> Any:
        return from_float(np.array([value], np.float32), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, to = scalar(src), dst_type.scalar
        if source.is_floating() and to.is_floating():
            return from_float(to_float(src), to)
        if source.is_floating() and not to.is_int1():
            return Handle(exact.to_integer(to_float(src), stock._get_np_dtype(to)), to)
        if to in (tl.bfloat16, tl.float8e4nv, tl.float8e5):
            return from_float(src.data.astype(np.float64), to)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        toward_zero = rounding_mode == stock._ir.ROUNDING_MODE.RTZ
        return from_float(to_float(src), dst_type.scalar, toward_zero=toward_zero)

    # arithmetic: stock computes bf16 and fp8 on their bit patterns

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        kind = scalar(lhs)
        if kind.is_ptr() or not kind.is_floating() or op in _BITWISE:
            return super().binary_op(lhs, rhs, op)
        if kind.is_fp8():
            msg = f"interpreter: arithmetic on {kind} does not compile; convert to float32 first"
            raise TeError(msg)
        if kind == tl.bfloat16:
            out = op(to_float(lhs), to_float(rhs))
            return Handle(out, tl.int1) if out.dtype == np.bool_ else from_float(out, kind)
        out = super().binary_op(lhs, rhs, op)
        return self._canonical(out) if op in _ARITHMETIC else out

    def unary_op(self, arg: Any, op: Any) -> Any:
        if scalar(arg) == tl.bfloat16:
            return from_float(op(to_float(arg)), tl.bfloat16)
        return super().unary_op(arg, op)

    @staticmethod
    def _canonical(handle: Any) -> Any:
        """NaN results of the GPU have one payload; numpy passes on that of an operand."""
        if handle.data.dtype == np.float32:
            handle.data = exact.canonical_nan(handle.data)
        elif handle.data.dtype == np.float16:
            nan = np.uint16(exact.FP16.nan).view(np.float16)
            handle.data = np.where(np.isnan(handle.data), nan, handle.data)
        return handle

    def _extremum(self, lhs: Any, rhs: Any, *, largest: bool, propagate_nan: bool) -> Any:
        a, b = np.broadcast_arrays(to_float(lhs), to_float(rhs))
        out = exact.extremum(a, b, largest=largest, propagate_nan=propagate_nan)
        return from_float(out, scalar(lhs))

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        """PTX ``max``: a NaN operand loses. Stock lets it win before triton 3.9."""
        return self._extremum(lhs, rhs, largest=True, propagate_nan=False)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self._extremum(lhs, rhs, largest=False, propagate_nan=False)

    def create_maximumf(self, lhs: Any, rhs: Any) -> Any:
        return self._extremum(lhs, rhs, largest=True, propagate_nan=True)

    def create_minimumf(self, lhs: Any, rhs: Any) -> Any:
        return self._extremum(lhs, rhs, largest=False, propagate_nan=True)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        """Clamp; between ``-hi`` and ``hi`` the GPU gives NaN the magnitude ``hi``, sign kept."""
        x, low, high = np.broadcast_arrays(to_float(arg), to_float(lo), to_float(hi))
        everywhere = propagate_nans == stock._ir.PROPAGATE_NAN.ALL
        out = exact.extremum(x, low, largest=True, propagate_nan=everywhere)
        out = exact.extremum(out, high, largest=False, propagate_nan=everywhere)
        if not everywhere and (low == -high).all():
            out = np.where(np.isnan(x), np.copysign(high, x), out)
        return from_float(out, scalar(arg))

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """Fused multiply-add with one rounding. Stock rounds twice before triton 3.9."""
        if scalar(z) == tl.float64:
            return super().create_fma(x, y, z)
        return from_float(exact.fma(to_float(x), to_float(y), to_float(z)), scalar(z))

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        """High half of an unsigned product. Stock takes int32 as signed before triton 3.9."""
        kind = stock._get_np_dtype(scalar(lhs))
        if kind.itemsize != 4:
            return super().create_umulhi(lhs, rhs)
        a, b = (h.data.astype(np.uint32).astype(np.uint64) for h in (lhs, rhs))
        high = ((a * b) >> np.uint64(32)).astype(np.uint32)
        return Handle(high.astype(kind), scalar(lhs))

    def create_dot(self, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """Matrix product accumulated in the type of ``d``; the order of the sum is numpy's."""
        lhs, rhs = (to_float(h) if scalar(h).is_floating() else h.data for h in (a, b))
        out = np.matmul(lhs, rhs, dtype=d.data.dtype) + d.data
        return Handle(out.astype(d.data.dtype), scalar(d))

    # what stock does not have

    def create_inline_asm(
        self,
        asm: str,
        constraints: str,
        values: Sequence[Any],
        types: Sequence[Any],
        pure: bool,
        pack: int,
    ) -> Any:
        kinds = [t.scalar for t in types]
        arrays = np.broadcast_arrays(*(v.data for v in values))
        outs = _ptx.elementwise(
            asm, constraints, arrays, [stock._get_np_dtype(k) for k in kinds], pack
        )
        return _AsmCall([Handle(o, k) for o, k in zip(outs, kinds, strict=True)])

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: Sequence[Any], result: Any, pure: bool
    ) -> Any:
        if symbol not in _LIBDEVICE:
            msg = f"interpreter: libdevice {symbol} is not emulated; known are {sorted(_LIBDEVICE)}"
            raise TeError(msg)
        return Handle(_LIBDEVICE[symbol](*(a.data for a in args)), result.scalar)

    # memory: stock reads and writes raw addresses; here each must lie in the argument it was made
    # from

    def resolve(self, ptrs: Any, mask: Any, what: str) -> tuple[Any, Any]:
        """Return ``ptrs`` without tags and ``mask`` as a handle, or raise OutOfBoundsError."""
        # triton 3.9 takes nothing but bool, and where & had a scalar it is none
        held = mask.data if isinstance(mask, Handle) else mask
        mask = Handle(np.asarray(held).astype(np.bool_), tl.int1)
        live = np.broadcast_to(mask.data, ptrs.data.shape)
        tags = ptrs.data >> np.uint64(ADDRESS_BITS)
        address = ptrs.data & np.uint64((1 << ADDRESS_BITS) - 1)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        starts = np.array([0, *(r.start for r in self.regions)], np.uint64)
        # region 0 is empty: a pointer made from no argument is outside
        stops = np.array([0, *(r.stop for r in self.regions)], np.uint64)
        known = np.where(tags <= len(self.regions), tags, 0).astype(np.int64)
        inside = (address >= starts[known]) & (address + np.uint64(size) <= stops[known])
        outside = live & ~inside
        if outside.any():
            self._report(known[outside], address[outside], size, int(live.sum()), what)
        return Handle(address, ptrs.dtype), mask

    def _report(self, known: Array, address: Array, size: int, live: int, what: str) -> None:
        where = "a pointer that no tensor argument gave"
        if known[0]:
            region = self.regions[known[0] - 1]
            index = (int(address[0]) - region.start) // size
            count = (region.stop - region.start) // size
            where = f"argument {region.name}, element {index} of {count}"
        msg = (
            f"interpreter: out-of-bounds {what} through {where} in program {self.grid_idx}: "
            f"{len(address)} of {live} active lanes; mask them"
        )
        raise OutOfBoundsError(msg)

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return super().create_masked_load(*self.resolve(ptrs, mask, "load"), *rest, **named)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        ptrs, mask = self.resolve(ptrs, mask, "store")
        return super().create_masked_store(ptrs, value, mask, *rest, **named)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        ptr, mask = self.resolve(ptr, mask, "atomic")
        return super().create_atomic_rmw(op, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        ptr, _ = self.resolve(ptr, np.ones(ptr.data.shape, np.bool_), "atomic")
        return super().create_atomic_cas(ptr, cmp, val, *rest)


class ExactReduce(stock.ReduceOps):
    """``tl.sum`` of bf16 in float32 with one rounding; stock adds the bit patterns.

    ``tl.max`` and ``tl.min`` widen bf16 themselves, before they come here.
    """

    def sum(self, input: Any) -> Any:
        if input.dtype != tl.bfloat16:
            return super().sum(input)
        total = super().sum(self.to_tensor(to_float(input.handle), tl.float32))
        kind = total.type.with_element_ty(tl.bfloat16) if total.type.is_block() else tl.bfloat16
        return tl.tensor(from_float(total.handle.data, tl.bfloat16), kind)
