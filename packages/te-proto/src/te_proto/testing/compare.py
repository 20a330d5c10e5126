# SPDX-License-Identifier: Apache-2.0
"""Comparison of plain tensors bit by bit, and inputs that find the edges of a format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_proto.errors import DtypeError, TeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (Tensor, torch.nn.Parameter)


def assert_same_bits(actual: Tensor, expected: Tensor, *, what: str = "") -> None:
    """Raise AssertionError unless two tensors have the same shape, dtype and bytes.

    NaN payloads and signs of zero count. Strides, devices and ``requires_grad`` do not: see
    :func:`assert_same_metadata`.

    Args:
        actual: a plain tensor, any dtype; need not be contiguous.
        expected: the same.
        what: name of the buffer, put in front of the message.

    Raises:
        AssertionError: they differ; it counts the elements and shows the first in hexadecimal.
        TeError: one is a tensor subclass, whose elements are not its bytes.
    """
    label = f"{what}: " if what else ""
    for name, t in (("actual", actual), ("expected", expected)):
        if type(t) not in _PLAIN:
            msg = (
                f"{label}{name} must be a plain tensor, got {type(t).__name__}; "
                f"compare its inner tensors"
            )
            raise TeError(msg)
    for name in ("shape", "dtype"):
        a, b = _shown(actual, name), _shown(expected, name)
        if a != b:
            msg = f"{label}{name} differs: got {a}, expected {b}"
            raise AssertionError(msg)
    left, right = _words(actual), _words(expected)
    differs = left != right
    if differs.ndim > actual.ndim:  # complex128 is two words an element
        differs = differs.any(-1)
    count = int(differs.sum())
    if not count:
        return
    index = tuple(int(i) for i in differs.nonzero()[0])
    msg = (
        f"{label}{count} of {actual.numel()} elements differ, first at index {index}: "
        f"got {_hex(left, actual, index)}, expected {_hex(right, expected, index)}"
    )
    raise AssertionError(msg)


def _words(t: Tensor) -> Tensor:
    plain = t.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    return plain.view(_WORDS[plain.element_size()]).cpu()


def _hex(words: Tensor, t: Tensor, index: tuple[int, ...]) -> str:
    digits = 2 * words.element_size()
    found = words[index].reshape(-1).tolist()
    shown = " ".join(f"0x{w & ((1 << 4 * digits) - 1):0{digits}x}" for w in found)
    if t.dtype.is_floating_point and "x2" not in str(t.dtype):
        shown += f" ({t.detach()[index].to(torch.float64).item()})"
    return shown


def assert_same_metadata(
    actual: Tensor, expected: Tensor, *, what: str = "", ignore: Sequence[str] = ()
) -> None:
    """Raise AssertionError unless two tensors agree in all that can be known without their data.

    That is class, shape, stride, dtype, device and requires_grad; all differences are named at
    once. A meta or fake tensor may stand on either side with ``ignore=("class", "device")``.

    Args:
        actual: any tensor.
        expected: any tensor.
        what: name of the buffer, put in front of the message.
        ignore: fields not to compare.
    """
    if unknown := sorted(set(ignore) - _FIELDS.keys()):
        msg = f"ignore must name fields of {sorted(_FIELDS)}, got {unknown[0]!r}"
        raise TeError(msg)
    pairs = [(n, _shown(actual, n), _shown(expected, n)) for n in _FIELDS if n not in ignore]
    wrong = [f"{n} differs: got {a}, expected {b}" for n, a, b in pairs if a != b]
    if wrong:
        msg = (f"{what}: " if what else "") + "; ".join(wrong)
        raise AssertionError(msg)


_FIELDS: dict[str, Callable[[Tensor], Any]] = {
    "class": lambda t: type(t).__name__,
    "shape": lambda t: tuple(t.shape),
    "stride": lambda t: tuple(t.stride()),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "requires_grad": lambda t: t.requires_grad,
}


def _shown(t: Tensor, name: str) -> Any:
    return _FIELDS[name](t)


def hostile(
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    *,
    block: tuple[int, int] = (1, 32),
    maxima: Sequence[float] = (448.0, 57344.0, 6.0),
    nonfinite: bool = False,
) -> Tensor:
    """Return a CPU tensor whose blocks are the cases that break quantizers, mixed by ``seed``.

    Each block of ``block`` (rows, columns) is of one kind: normal numbers at one exponent, where
    the exponents walk through all that the dtype has, subnormals included; every exponent at once;
    a block maximum of exactly ``m * 2**k`` or ``2**k``, or one ulp off either way; all zeros with
    -0.0 among them; one value among zeros; subnormals only. Every kind appears where there are six
    blocks or more.

    Args:
        shape: any; seen as ``[prod(shape[:-1]), shape[-1]]`` for cutting blocks. Ragged edges are
            cut off.
        dtype: float32, bfloat16 or float16.
        seed: of the generator; same arguments, same bits.
        block: rows and columns that share a scale in the format under test.
        maxima: largest numbers of the formats under test.
        nonfinite: put NaN and both infinities into about every fourth block.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        msg = f"hostile: dtype must be float32, bfloat16 or float16, got {dtype}"
        raise DtypeError(msg)
    g = torch.Generator().manual_seed(seed)
    rows, columns = math.prod(shape[:-1]), shape[-1] if len(shape) else 1
    down, across = -(-rows // block[0]), -(-columns // block[1])
    count, size = down * across, block[0] * block[1]
    kinds = torch.arange(count)[torch.randperm(count, generator=g)] % len(_KINDS)
    blocks = torch.empty(count, size, dtype=dtype)
    for i, kind in enumerate(_KINDS):
        chosen = (kinds == i).nonzero().flatten()
        blocks[chosen] = kind(g, len(chosen), size, dtype, maxima)
    if nonfinite:
        values = torch.tensor([math.nan, math.inf, -math.inf, -math.nan], dtype=dtype)
        for b in torch.randperm(count, generator=g)[: -(-count // 4)].tolist():
            where = torch.randint(size, (), generator=g)
            blocks[b, where] = values[torch.randint(4, (), generator=g)]
    grid = blocks.view(down, across, *block).transpose(1, 2)
    return (
        grid.reshape(down * block[0], across * block[1])[:rows, :columns]
        .reshape(tuple(shape))
        .clone()
    )


def _exponents(dtype: torch.dtype) -> tuple[int, int]:
    """Return the exponents of the smallest subnormal and of the largest number."""
    info = torch.finfo(dtype)
    return round(math.log2(info.smallest_normal * info.eps)), math.frexp(info.max)[1] - 1


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return value.clamp(-largest, largest).to(dtype)


def _one_exponent(
    g: torch.Generator, count: int, size: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Tensor:
    low, high = _exponents(dtype)
    walk = low + torch.arange(count).remainder(high - low + 1)
    walk = walk[torch.randperm(count, generator=g)]
    normal = torch.randn(count, size, generator=g, dtype=torch.float64)
    return _cast(torch.ldexp(normal, walk[:, None]), dtype)


def _all_exponents(
    g: torch.Generator, count: int, size: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Tensor:
    low, high = _exponents(dtype)
    exponent = torch.randint(low, high + 1, (count, size), generator=g)
    mantissa = 1 + torch.rand(count, size, generator=g, dtype=torch.float64)
    return _cast(torch.ldexp(mantissa * _signs(g, count, size), exponent), dtype)


def _boundaries(
    g: torch.Generator, count: int, size: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Tensor:
    """Values below a bound, and the bound itself, or its neighbour, as the block maximum."""
    tops = torch.tensor([1.0, *maxima], dtype=torch.float64)
    top = tops[torch.randint(len(tops), (count,), generator=g)]
    # at every normal exponent but the outermost, where a neighbour would be subnormal or infinite
    lowest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    exponent = torch.randint(lowest, _exponents(dtype)[1], (count,), generator=g)
    bound = torch.ldexp(2 * torch.frexp(top).mantissa, exponent).to(dtype)
    word = _WORDS[dtype.itemsize]
    # one ulp is one in the integer that the bits are, on either side of a power of two too
    off = torch.randint(-1, 2, (count,), generator=g).to(word)
    bound = (bound.view(word) + off).view(dtype)
    below = torch.rand(count, size, generator=g, dtype=torch.float64) * bound[:, None].double()
    out = _cast(below * _signs(g, count, size), dtype)
    place = torch.randint(size, (count,), generator=g)
    sign = _signs(g, count, 1)[:, 0].to(dtype)
    out[torch.arange(count), place] = bound * sign
    return out


def _zeros(
    g: torch.Generator, count: int, size: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Tensor:
    return torch.zeros(count, size, dtype=dtype) * _signs(g, count, size).to(dtype)


def _lonely(
    g: torch.Generator, count: int, size: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Tensor:
    out = _zeros(g, count, size, dtype, maxima)
    place = torch.randint(size, (count,), generator=g)
    out[torch.arange(count), place] = _all_exponents(g, count, 1, dtype, maxima)[:, 0]
    return out


def _subnormals(
    g: torch.Generator, count: int, size: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Tensor:
    word = _WORDS[dtype.itemsize]
    steps = torch.finfo(dtype).smallest_normal / (
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )
    bits = torch.randint(1, int(steps), (count, size), generator=g)
    return bits.to(word).view(dtype) * _signs(g, count, size).to(dtype)


def _signs(g: torch.Generator, count: int, size: int) -> Tensor:
    return torch.randint(2, (count, size), generator=g).double() * 2 - 1


_KINDS = (_one_exponent, _all_exponents, _boundaries, _zeros, _lonely, _subnormals)
