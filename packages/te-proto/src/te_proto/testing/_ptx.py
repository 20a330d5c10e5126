# SPDX-License-Identifier: Apache-2.0
"""Run the inline PTX of ``tl.inline_asm_elementwise`` on numpy arrays.

The text is executed, not recognized: operand order, register numbers, widths and packing are
    checked as
they are written, so that a swapped operand gives wrong bytes in a test on a CPU too. An instruction
that is not in the table raises. Registers are uint64 arrays, one lane an instance of the assembly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from te_proto.errors import TeError
from te_proto.testing import _exact as exact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_proto.testing._exact import Array

# bits of an operand by its constraint letter, as LLVM's NVPTX backend reads them
_CONSTRAINT_BITS = {"b": 1, "c": 8, "h": 16, "r": 32, "f": 32, "l": 64, "d": 64}
_TYPE_BITS = {"pred": 1, **{f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}}


class PtxError(TeError):
    """Inline assembly that ptxas would refuse, or that the emulator does not know."""


@dataclass(frozen=True)
class _Op:
    """One instruction: bits of the destination, bits of each source, and what it computes."""

    out: int
    sources: tuple[int, ...]
    run: Callable[..., Array]


def _f32(register: Array) -> Array:
    return register.astype(np.uint32).view(np.float32)


def _bits(value: Array) -> Array:
    return exact.canonical_nan(np.asarray(value, np.float32)).view(np.uint32).astype(np.uint64)


def _float_op(compute: Callable[..., Array], count: int) -> _Op:
    return _Op(32, (32,) * count, lambda *regs: _bits(compute(*(_f32(r) for r in regs))))


def _halves(register: Array, width: int) -> tuple[Array, Array]:
    """Return (high, low) parts of a register that packs two elements of ``width`` bits."""
    mask = np.uint64((1 << width) - 1)
    return (register >> np.uint64(width)) & mask, register & mask


def _pair(high: Array, low: Array, width: int) -> Array:
    return (high.astype(np.uint64) << np.uint64(width)) | low.astype(np.uint64)


def _narrow_f32(encode: Callable[[Array], Array], width: int) -> _Op:
    """``cvt d, a, b`` puts ``a`` in the high part of ``d``."""
    return _Op(2 * width, (32, 32), lambda a, b: _pair(encode(_f32(a)), encode(_f32(b)), width))


def _narrow_packed(encode: Callable[[Array], Array], width: int, source: exact.SmallFloat) -> _Op:
    def run(packed: Array) -> Array:
        high, low = (exact.decode(h.astype(np.uint16), source) for h in _halves(packed, 16))
        return _pair(encode(high), encode(low), width)

    return _Op(2 * width, (32,), run)


def _widen_packed(decode: Callable[[Array], Array], width: int, to: exact.SmallFloat) -> _Op:
    def run(packed: Array) -> Array:
        high, low = (exact.encode(decode(h.astype(np.uint8)), to) for h in _halves(packed, width))
        return _pair(high, low, 16)

    return _Op(32, (2 * width,), run)


def _encoder(to: exact.SmallFloat) -> Callable[[Array], Array]:
    return lambda value: exact.encode(value, to)


def _decoder(source: exact.SmallFloat) -> Callable[[Array], Array]:
    return lambda code: exact.decode(code, source)


def _shift(left: bool, width: int) -> _Op:
    def run(a: Array, b: Array) -> Array:
        amount = np.minimum(b, np.uint64(63))
        out = a << amount if left else a >> amount
        return np.where(b >= width, np.uint64(0), out & np.uint64((1 << width) - 1))

    return _Op(width, (width, 32), run)


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    source = _pair(b, a, 32)
    out = np.zeros_like(source)
    for i in range(4):
        nibble = (selector >> np.uint64(4 * i)) & np.uint64(0xF)
        byte = (source >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        out = out | (np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i))
    return out


def _conversions() -> dict[str, _Op]:
    ops: dict[str, _Op] = {}
    for name, to, width in (
        ("e4m3x2", exact.E4M3, 8),
        ("e5m2x2", exact.E5M2, 8),
        ("e2m1x2", exact.E2M1, 4),
    ):
        ops[f"cvt.rn.satfinite.{name}.f32"] = _narrow_f32(_encoder(to), width)
        for packed, source in (("f16x2", exact.FP16), ("bf16x2", exact.BF16)):
            ops[f"cvt.rn.satfinite.{name}.{packed}"] = _narrow_packed(_encoder(to), width, source)
        ops[f"cvt.rn.f16x2.{name}"] = _widen_packed(_decoder(to), width, exact.FP16)
    for mode in ("rp", "rz"):

        def e8m0(value: Array, up: bool = mode == "rp") -> Array:
            return exact.encode_e8m0(value, up=up)

        ops[f"cvt.{mode}.satfinite.ue8m0x2.f32"] = _narrow_f32(e8m0, 8)
        ops[f"cvt.{mode}.satfinite.ue8m0x2.bf16x2"] = _narrow_packed(e8m0, 8, exact.BF16)
    ops["cvt.rn.bf16x2.ue8m0x2"] = _widen_packed(exact.decode_e8m0, 8, exact.BF16)
    for name, half in (("f16", exact.FP16), ("bf16", exact.BF16)):
        ops[f"cvt.rn.{name}x2.f32"] = _narrow_f32(_encoder(half), 16)
        ops[f"cvt.rn.{name}.f32"] = _Op(
            16, (32,), lambda a, half=half: exact.encode(_f32(a), half).astype(np.uint64)
        )
        ops[f"cvt.f32.{name}"] = _Op(
            32, (16,), lambda a, half=half: _bits(exact.decode(a.astype(np.uint16), half))
        )
    for small, large in ((8, 16), (8, 32), (16, 32), (32, 64)):
        ops[f"cvt.u{large}.u{small}"] = _Op(large, (small,), lambda a: a)
        ops[f"cvt.u{small}.u{large}"] = _Op(small, (large,), lambda a: a)
    return ops


def _arithmetic() -> dict[str, _Op]:
    def fused(x: Array, y: Array, z: Array) -> Array:
        return exact.fma(x, y, z).astype(np.float32)

    def extremum(largest: bool, propagate: bool) -> _Op:
        return _float_op(
            lambda a, b: exact.extremum(a, b, largest=largest, propagate_nan=propagate), 2
        )

    ops = {
        "add.f32": _float_op(np.add, 2),
        "sub.f32": _float_op(np.subtract, 2),
        "mul.f32": _float_op(np.multiply, 2),
        "div.rn.f32": _float_op(np.divide, 2),
        "fma.rn.f32": _float_op(fused, 3),
        "max.f32": extremum(True, False),
        "min.f32": extremum(False, False),
        "max.NaN.f32": extremum(True, True),
        "min.NaN.f32": extremum(False, True),
        "abs.f32": _Op(32, (32,), lambda a: a & np.uint64(0x7FFFFFFF)),
        "neg.f32": _Op(32, (32,), lambda a: a ^ np.uint64(0x80000000)),
        "prmt.b32": _Op(32, (32, 32, 32), _prmt),
    }
    ops |= {f"{op}.rn.f32": ops[f"{op}.f32"] for op in ("add", "sub", "mul")}
    for bits in (16, 32, 64):
        both = (bits, bits)
        ops[f"and.b{bits}"] = _Op(bits, both, np.bitwise_and)
        ops[f"or.b{bits}"] = _Op(bits, both, np.bitwise_or)
        ops[f"xor.b{bits}"] = _Op(bits, both, np.bitwise_xor)
        ops[f"not.b{bits}"] = _Op(bits, (bits,), np.bitwise_not)
        ops[f"shl.b{bits}"] = _shift(True, bits)
        ops[f"shr.b{bits}"] = ops[f"shr.u{bits}"] = _shift(False, bits)
        for kind in "us":
            ops[f"add.{kind}{bits}"] = _Op(bits, both, np.add)
            ops[f"sub.{kind}{bits}"] = _Op(bits, both, np.subtract)
            ops[f"mul.lo.{kind}{bits}"] = _Op(bits, both, np.multiply)
    for name, bits in _TYPE_BITS.items():
        ops[f"mov.{name}"] = _Op(bits, (bits,), lambda a: a)
    return ops


_OPS = _conversions() | _arithmetic()


@dataclass
class _Machine:
    """Registers of one assembly block: their widths, and the values written so far."""

    widths: dict[str, int]
    values: dict[str, Array] = field(default_factory=dict)

    def declare(self, kind: str, names: str) -> None:
        if kind not in _TYPE_BITS:
            msg = f"inline ptx: register type .{kind} is not known"
            raise PtxError(msg)
        for name in names.split(","):
            many = re.fullmatch(r"(\S+)<(\d+)>", name.strip())
            found = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
            self.widths |= dict.fromkeys(found, _TYPE_BITS[kind])

    def width(self, name: str) -> int:
        if name not in self.widths:
            msg = f"inline ptx: {name!r} is neither a declared register nor an operand"
            raise PtxError(msg)
        return self.widths[name]

    def read(self, token: str, bits: int) -> Array:
        literal = _literal(token)
        if literal is not None:
            return np.array([literal & ((1 << bits) - 1)], np.uint64)
        self._match(token, bits)
        if token not in self.values:
            msg = f"inline ptx: {token} is read before it is written"
            raise PtxError(msg)
        return self.values[token]

    def write(self, token: str, bits: int, value: Array) -> None:
        self._match(token, bits)
        self.values[token] = np.asarray(value, np.uint64) & np.uint64((1 << bits) - 1)

    def _match(self, token: str, bits: int) -> None:
        if self.width(token) != bits:
            msg = f"inline ptx: {token} is {self.width(token)} bits wide where {bits} are needed"
            raise PtxError(msg)


def _literal(token: str) -> int | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
        return int(token[2:], 16)
    if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", token):
        return int(np.float32(token).view(np.uint32))
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", token):
        return int(token, 0)
    return None


def _step(machine: _Machine, statement: str) -> None:
    if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement):
        machine.declare(declared[1], declared[2])
        return
    name, _, rest = statement.partition(" ")
    operands = [o.strip() for o in re.findall(r"\{[^}]*\}|[^,{}\s][^,{}]*", rest)]
    vectors = [o.startswith("{") for o in operands]
    if name.startswith("mov.") and len(operands) == 2 and any(vectors):
        _move_vector(machine, name, operands, packing=vectors[1])
        return
    if name not in _OPS or any(vectors):
        msg = f"inline ptx: {statement!r} is not emulated; add {name} to te_proto.testing._ptx"
        raise PtxError(msg)
    op = _OPS[name]
    if len(operands) != 1 + len(op.sources):
        msg = f"inline ptx: {name} takes {1 + len(op.sources)} operands, got {len(operands)}"
        raise PtxError(msg)
    sources = [machine.read(o, b) for o, b in zip(operands[1:], op.sources, strict=True)]
    machine.write(operands[0], op.out, op.run(*sources))


def _move_vector(machine: _Machine, name: str, operands: list[str], *, packing: bool) -> None:
    """``mov.b32 d, {a, b}`` and its inverse; the first element is the least significant."""
    whole = _TYPE_BITS[name.removeprefix("mov.")]
    parts = [p.strip() for p in operands[1 if packing else 0].strip("{}").split(",")]
    width = whole // len(parts)
    if packing:
        total = np.zeros(1, np.uint64)
        for i, part in enumerate(parts):
            total = total | (machine.read(part, width) << np.uint64(i * width))
        machine.write(operands[0], whole, total)
        return
    value = machine.read(operands[1], whole)
    for i, part in enumerate(parts):
        machine.write(part, width, value >> np.uint64(i * width))


def _statements(asm: str) -> list[str]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", asm, flags=re.DOTALL).strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    return [" ".join(s.split()) for s in text.split(";") if s.strip()]


def elementwise(
    asm: str, constraints: str, inputs: Sequence[Array], outputs: Sequence[np.dtype[Any]], pack: int
) -> list[Array]:
    """Return what the assembly gives for every element, as ``tl.inline_asm_elementwise`` does.

    One instance handles ``pack`` consecutive elements. Outputs are numbered first; elements
    narrower than 32 bits share a register, the first in the lowest bits.

    Args:
        asm: the text, with operands ``$0, $1, ...``.
        constraints: LLVM's list, outputs first.
        inputs: arrays of one shape, stored as the interpreter stores them.
        outputs: numpy type of each result.
        pack: elements an instance.

    Raises:
        PtxError: the text does not fit its constraints, or uses an instruction that is not
            emulated.
    """
    widths = _operand_widths(constraints)
    shape = np.shape(inputs[0])
    machine = _Machine(widths=widths)
    produced = sum(_registers(d.itemsize * 8, pack) for d in outputs)
    given = sum(_registers(a.dtype.itemsize * 8, pack) for a in inputs)
    if len(widths) != produced + given or constraints.count("=") != produced:
        msg = (
            f"inline ptx: pack={pack} needs {produced} output and {given} input registers, "
            f"got constraints {constraints!r}"
        )
        raise PtxError(msg)
    number = produced
    for array in inputs:
        for register in _pack_registers(array, pack):
            name = f"${number}"
            _check_operand(machine, name, array.dtype.itemsize * 8, pack)
            machine.values[name] = register
            number += 1
    with np.errstate(all="ignore"):
        for statement in _statements(asm):
            _step(machine, statement)
    return _unpack_registers(machine, outputs, shape, pack)


def _operand_widths(constraints: str) -> dict[str, int]:
    widths = {}
    for i, constraint in enumerate(c.strip() for c in constraints.split(",")):
        letter = constraint.lstrip("=&")
        if letter not in _CONSTRAINT_BITS:
            msg = f"inline ptx: constraint {constraint!r} is not one of {sorted(_CONSTRAINT_BITS)}"
            raise PtxError(msg)
        widths[f"${i}"] = _CONSTRAINT_BITS[letter]
    return widths


def _registers(bits: int, pack: int) -> int:
    return max(1, pack * bits // 32) if bits < 32 else pack


def _check_operand(machine: _Machine, name: str, bits: int, pack: int) -> None:
    need = bits if bits >= 32 else min(32, bits * pack)
    # an 8-bit element alone travels in a 16-bit register: there is no narrower one
    need = max(need, 16)
    if machine.width(name) != need:
        msg = f"inline ptx: the constraint of {name} means {machine.width(name)} bits, need {need}"
        raise PtxError(msg)


def _pack_registers(array: Array, pack: int) -> list[Array]:
    bits = array.dtype.itemsize * 8
    raw = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(-1, pack)
    raw = raw.astype(np.uint64)
    count = _registers(bits, pack)
    each = pack // count
    return [
        sum(
            (raw[:, r * each + j] << np.uint64(bits * j) for j in range(each)),
            start=np.zeros(len(raw), np.uint64),
        )
        for r in range(count)
    ]


def _unpack_registers(
    machine: _Machine, outputs: Sequence[np.dtype[Any]], shape: tuple[int, ...], pack: int
) -> list[Array]:
    results, number = [], 0
    instances = int(np.prod(shape)) // pack
    for dtype in outputs:
        bits = dtype.itemsize * 8
        count = _registers(bits, pack)
        columns = []
        for _ in range(count):
            name = f"${number}"
            _check_operand(machine, name, bits, pack)
            value = np.broadcast_to(machine.read(name, machine.width(name)), (instances,))
            columns += [value >> np.uint64(bits * j) for j in range(pack // count)]
            number += 1
        raw = np.stack(columns, axis=1).astype(f"u{dtype.itemsize}")
        results.append(raw.view(dtype).reshape(shape))
    return results
