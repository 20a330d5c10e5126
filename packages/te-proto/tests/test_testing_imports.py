# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from te_proto.testing import assert_lazy_package

GOOD = """\
from te_proto import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, {"thing": "things"})
__all__ = ["thing"]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the package ``te_lazy``, and stand-ins for what is slow to import or not installed."""
    folder = tmp_path / "te_lazy"
    folder.mkdir()
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").touch()
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def write(init: str = GOOD, things: str = "import torch\nthing = 1\n", card: str = "") -> None:
        (folder / "__init__.py").write_text(init)
        (folder / "things.py").write_text(things)
        (folder / "card.py").write_text(card)

    return write


def test_a_lazy_package_passes(write: Callable[..., None]) -> None:
    write()
    assert_lazy_package("te_lazy", "te_lazy.card")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param(
            {"init": GOOD + "import torch\n"},
            "import te_lazy loads torch\nimport te_lazy.card loads torch",
            id="torch in the package",
        ),
        pytest.param(
            {"card": "import torch, triton"},
            "import te_lazy.card loads torch, triton\nthe public names of te_lazy load triton",
            id="torch in a module said to be free of it",
        ),
        pytest.param(
            {"things": "import triton\nthing = 1\n"},
            "the public names of te_lazy load triton",
            id="triton behind a name",
        ),
        pytest.param(
            {"things": "other = 1\n"},
            "te_lazy.thing: cannot import 'thing' from 'te_lazy.things': "
            "module 'te_lazy.things' has no attribute 'thing'",
            id="a name that is not there",
        ),
        pytest.param(
            {"init": GOOD.replace("__getattr__, __dir__", "__getattr__, _")},
            r"dir\(te_lazy\) is \[.*'__all__'.*\], its __all__ sorted \['thing'\]",
            id="dir",
        ),
        pytest.param(
            {"init": "__all__ = []\ndef __dir__(): return []\ndef __getattr__(name): return 1\n"},
            "te_lazy.absent is 1, expected: raises AttributeError: "
            "module 'te_lazy' has no attribute 'absent'",
            id="any name goes",
        ),
        pytest.param(
            {"init": GOOD + "import warnings\nwarnings.warn('old')\n"},
            r"import te_lazy: exit status 0\n(?s:.*)UserWarning: old(?s:.*)",
            id="a warning",
        ),
        pytest.param(
            {"things": "1 / 0"},
            r"import te_lazy: exit status 1\n(?s:.*)ZeroDivisionError: division by zero\n",
            id="an exception behind a name",
        ),
    ],
)
def test_each_fault_is_named(
    write: Callable[..., None], files: dict[str, str], message: str
) -> None:
    write(**files)
    with pytest.raises(AssertionError) as raised:
        assert_lazy_package("te_lazy", "te_lazy.card")
    assert re.fullmatch(message, str(raised.value))
