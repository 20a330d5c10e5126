# SPDX-License-Identifier: Apache-2.0
"""From the name of a format to its card, its quantizer class and its recipe.

Three prices: the names come from the metadata of what is installed, a card loads one torch-free
module of the plugin, and only a class loads torch. What went wrong with one plugin is kept, and
raised when that format is asked for, so it hides no other.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from te_proto.__about__ import __version__
from te_proto.errors import PluginError, UnknownFormatError
from te_proto.spec import PROTOCOL, FormatSpec

if TYPE_CHECKING:
    from te_proto.quantizer import Quantizer
    from te_proto.recipe import Recipe

GROUP = "te_proto.formats"
ALLOWED = "TE_PROTO_FORMATS"

_scan_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a plugin cannot be used; each caller gets an exception of its own made from it."""

    message: str
    cause: Exception | None = None


def available_formats() -> tuple[str, ...]:
    """Return the names of the installed formats, sorted, without importing any of them.

    A plugin that is installed but broken is listed: the error is for those who ask for it. Where
    the environment variable ``TE_PROTO_FORMATS`` names formats (``a,b``), no other is listed.
    """
    allowed = _allowed()
    return tuple(sorted(name for name in _claims() if allowed is None or name in allowed))


def describe(name: str) -> FormatSpec:
    """Return the card of the format ``name``; loads its plugin's torch-free module, once.

    Raises:
        UnknownFormatError: no installed distribution provides ``name``, or ``TE_PROTO_FORMATS``
            leaves it out.
        PluginError: two distributions provide it, the plugin was written for another protocol,
            cannot be imported, or its card is not the card of ``name``.
    """
    allowed = _allowed()
    if name not in _claims():
        installed = ", ".join(sorted(_claims())) or "none"
        msg = (
            f"{name}: no installed distribution provides this format, installed formats: "
            f"{installed}; pip install the distribution that provides it"
        )
        raise UnknownFormatError(msg)
    if allowed is not None and name not in allowed:
        msg = (
            f"{name}: the environment allows only {ALLOWED}={os.environ[ALLOWED]}; "
            f"add {name} to it, or unset it"
        )
        raise UnknownFormatError(msg)
    card = _load(name)
    if isinstance(card, _Fault):
        raise PluginError(card.message) from card.cause
    return card


def get_quantizer(name: str) -> type[Quantizer]:
    """Return the quantizer class of the format ``name``; loads torch.

    Raises:
        UnknownFormatError, PluginError: as :func:`describe`, or the class cannot be loaded.
    """
    quantizer: type[Quantizer] = _resolve_field(name, "quantizer")
    return quantizer


def get_recipe(name: str) -> Recipe:
    """Return the recipe of the format ``name`` with its defaults; loads torch.

    Raises:
        UnknownFormatError, PluginError: as :func:`describe`, or the recipe cannot be loaded.
    """
    recipe: Recipe = _resolve_field(name, "recipe")()
    return recipe


def resolve(import_string: str) -> Any:
    """Import what ``"package.module:Name"`` stands for; ``Name`` may be dotted.

    Raises:
        PluginError: the string does not read like that, or the module has no such name. What the
            module itself raises while it is imported is passed on.
    """
    module_name, colon, path = import_string.partition(":")
    if not (module_name and colon and path):
        msg = f"an import string reads 'package.module:Name', got {import_string!r}"
        raise PluginError(msg)
    module = importlib.import_module(module_name)
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as error:
        msg = f"{import_string!r} cannot be resolved: {error}"
        raise PluginError(msg) from error


def clear_cache() -> None:
    """Forget what was found and loaded, for tests and after ``sys.path`` changed."""
    with _scan_lock:
        _scan.cache_clear()
    _load.cache_clear()


def _allowed() -> frozenset[str] | None:
    listed = os.environ.get(ALLOWED, "").replace(",", " ").split()
    return frozenset(listed) or None


def _claims() -> dict[str, tuple[EntryPoint, ...]]:
    # The lock is held for metadata only. A plugin is imported without it: a plugin that asks the
    # registry while another thread waits for its import would otherwise deadlock.
    with _scan_lock:
        return _scan()


@functools.cache
def _scan() -> dict[str, tuple[EntryPoint, ...]]:
    claims: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=GROUP):
        claims[entry.name] = (*claims.get(entry.name, ()), entry)
    return claims


@functools.cache
def _load(name: str) -> FormatSpec | _Fault:
    """Return the card of ``name`` or why there is none; both are kept."""
    entries = _claims()[name]
    if len(entries) > 1:
        owners = " and ".join(sorted(_owner(entry) for entry in entries))
        return _Fault(f"{name}: provided by {owners}, and a format has one; uninstall all but one")
    (entry,) = entries
    owner = f"{_owner(entry)} ({entry.value})"
    try:
        card = resolve(entry.value)
    except Exception as error:  # whatever a plugin raises is its own fault, not its neighbours'
        reason = f"{type(error).__name__}: {error}"
        return _Fault(
            f"{name}: {owner} cannot be imported, {reason}; repair or uninstall it", error
        )
    if not isinstance(card, FormatSpec):
        got = type(card).__name__
        return _Fault(f"{name}: {owner} must be a te_proto.FormatSpec, got {got}; report it there")
    if card.protocol != PROTOCOL:
        older = "te-proto" if card.protocol > PROTOCOL else _distribution(entry)
        return _Fault(
            f"{name}: {_owner(entry)} was written for protocol {card.protocol}, te-proto "
            f"{__version__} has protocol {PROTOCOL}; python -m pip install --upgrade {older}"
        )
    if card.name != name:
        return _Fault(
            f"{name}: {owner} must carry the name of its entry point, got {card.name!r}; "
            "report it there"
        )
    return card


def _resolve_field(name: str, field: str) -> Any:
    import_string: str = getattr(describe(name), field)
    try:
        return resolve(import_string)
    except Exception as error:  # as in _load: anything may happen in a plugin's module
        owner = _owner(_claims()[name][0])
        msg = (
            f"{name}: {owner} cannot load its {field} {import_string!r}, "
            f"{type(error).__name__}: {error}; repair or uninstall it"
        )
        raise PluginError(msg) from error


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unnamed distribution"


def _owner(entry: EntryPoint) -> str:
    return f"{_distribution(entry)} {entry.dist.version}" if entry.dist is not None else "?"
