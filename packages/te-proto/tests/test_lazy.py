# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

INIT = """\
from te_proto import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"thing": "things", "typo": "things", "absent": "nowhere", "broken": "broken", "odd": "odd"},
)
__all__ = ["typo", "thing", "eager"]
eager = 1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "te_lazy"
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "things.py").write_text("thing = object()\n")
    (folder / "broken.py").write_text("import sys\nbroken = sys.no_such_thing\n")
    (folder / "odd.py").write_text("odd = 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("te_lazy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "te_lazy"]:
        del sys.modules[name]


def test_a_module_is_imported_when_its_name_is_first_used_and_the_value_kept(
    package: ModuleType,
) -> None:
    assert "te_lazy.things" not in sys.modules
    assert "thing" not in vars(package)
    thing = package.thing
    assert thing is sys.modules["te_lazy.things"].thing
    assert vars(package)["thing"] is thing


def test_names_and_modules_can_be_imported_from_the_package(package: ModuleType) -> None:
    scope: dict[str, object] = {}
    exec("from te_lazy import thing, things, eager", scope)
    assert scope["thing"] is scope["things"].thing  # type: ignore[attr-defined]
    assert scope["eager"] == 1


def test_dir_lists_the_public_names(package: ModuleType) -> None:
    assert dir(package) == ["eager", "thing", "typo"]


def test_an_unknown_name_is_the_usual_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"^module 'te_lazy' has no attribute 'other'$"):
        package.other  # noqa: B018
    assert not hasattr(package, "other")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "broken",
            ImportError,
            r"^cannot import 'broken' from 'te_lazy\.broken': "
            r"module 'sys' has no attribute 'no_such_thing'$",
        ),
        (
            "typo",
            ImportError,
            r"^cannot import 'typo' from 'te_lazy\.things': "
            r"module 'te_lazy\.things' has no attribute 'typo'$",
        ),
        ("absent", ModuleNotFoundError, r"^No module named 'te_lazy\.nowhere'$"),
        ("odd", ZeroDivisionError, r"^division by zero$"),
    ],
)
def test_what_goes_wrong_in_a_module_is_not_taken_for_an_unknown_name(
    package: ModuleType, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hasattr(package, name)
    with pytest.raises(error, match=message):
        exec(f"from te_lazy import {name}")
