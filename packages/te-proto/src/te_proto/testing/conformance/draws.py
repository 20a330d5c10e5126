# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: option sets that the format itself accepts, and shapes."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

from hypothesis import assume
from hypothesis import strategies as st

from te_proto.errors import QuantizerError
from te_proto.layout import INPUT_DTYPES
from te_proto.testing.conformance.base import USAGES, Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto.quantizer import Quantizer
    from te_proto.testing.conformance.base import Kit

_BASE = ("rowwise", "columnwise", "internal")
_LARGEST = 1 << 16


def choices(kit: Kit, quantizer: Quantizer) -> dict[str, tuple[Any, ...]]:
    """Return the options whose values are known without the format: flags, enums, elements."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, kind in type(quantizer)._field_types().items():
        if name in _BASE:
            continue
        if kind is bool:
            found[name] = (False, True)
        elif issubclass(kind, enum.Enum):
            found[name] = tuple(kind)
        elif name == "dtype":
            found[name] = kit.card().elements
    return found


@st.composite
def quantizers(
    draw: Callable[..., Any], kit: Kit, *, internal: tuple[bool, ...] = (False, True)
) -> Quantizer:
    """Draw a start and change up to three options of it, to what the format accepts."""
    quantizer: Quantizer = draw(st.sampled_from(kit.starts()))
    options = choices(kit, quantizer)
    if options:
        names = st.lists(st.sampled_from(sorted(options)), max_size=3, unique=True)
        for name in draw(names):
            value = draw(st.sampled_from(options[name]))
            try:
                quantizer = quantizer.replace(**{name: value})
            except QuantizerError:
                continue  # it does not go with the others; that it says so is a test of its own
    row, column = draw(st.sampled_from(USAGES))
    bare = draw(st.sampled_from(internal))
    return quantizer.replace(rowwise=row, columnwise=column, internal=bare)


@st.composite
def shapes(
    draw: Callable[..., Any],
    kit: Kit,
    quantizer: Quantizer | None = None,
    *,
    empty: bool = True,
    rank: tuple[int, int] = (0, 4),
) -> tuple[int, ...]:
    """Draw a shape of 0 to 4 axes; if for a quantizer, one that its alignment allows.

    Args:
        draw: given by Hypothesis.
        kit: its tile is a size at which something happens.
        quantizer: None for shapes that may be refused.
        empty: let axes have size 0.
        rank: fewest and most axes.
    """
    if kit.shapes and quantizer is None and draw(st.booleans()):
        return draw(st.sampled_from(tuple(kit.shapes)))  # type: ignore[no-any-return]
    rows, columns = quantizer.alignment() if quantizer else (1, 1)
    axes = draw(st.integers(max(rank[0], 1) if quantizer else rank[0], rank[1]))
    if axes == 0:
        return ()
    tile = kit.tile()
    around = sorted({1, 2, tile - 1, tile, tile + 1, 2 * tile + 3})
    size = st.one_of(st.sampled_from(around), st.integers(1, tile + 7))
    leading = [draw(st.integers(1, 4) if axes > 2 else size) for _ in range(axes - 1)]
    # the rows of all leading axes together are what must be aligned
    if axes > 1:
        at = draw(st.integers(0, axes - 2))
        others = math.prod(leading) // leading[at]
        unit = rows // math.gcd(rows, others)
        leading[at] = -(-leading[at] // unit) * unit
    else:
        assume(rows == 1)
    last = -(-draw(size) // columns) * columns
    shape = [*leading, last]
    if empty and draw(st.integers(0, 5)) == 0:
        shape[draw(st.integers(0, axes - 1))] = 0
    assume(math.prod(shape) <= _LARGEST)
    return tuple(shape)


@st.composite
def cases(
    draw: Callable[..., Any],
    kit: Kit,
    *,
    internal: tuple[bool, ...] = (False, True),
    empty: bool = True,
    rank: tuple[int, int] = (1, 4),
) -> Case:
    """Draw a case that the format takes."""
    quantizer = draw(quantizers(kit, internal=internal))
    shape = draw(shapes(kit, quantizer, empty=empty, rank=rank))
    taken = kit.taken(quantizer, shape)
    assume(taken)
    return Case(quantizer, shape, draw(st.sampled_from(taken)))


@st.composite
def any_cases(draw: Callable[..., Any], kit: Kit) -> Case:
    """Draw a case that the format may refuse."""
    quantizer = draw(quantizers(kit))
    return Case(quantizer, draw(shapes(kit)), draw(st.sampled_from(INPUT_DTYPES)))
