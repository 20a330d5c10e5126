# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from te_proto import registry
from te_proto.__about__ import __version__
from te_proto.errors import PluginError, UnknownFormatError
from te_proto.spec import PROTOCOL, FormatSpec

CARD = """\
from te_proto.spec import FormatSpec

FORMAT = FormatSpec(
    name="{name}", distribution="te-{name}", protocol={protocol}, summary="a fake",
    elements=("e4m3",), scale="e8m0", block=(1, 32), quantizer="te_{name}_q:Quantizer",
    tensor="te_{name}_q:Tensor", storage="te_{name}_q:Storage", recipe="te_{name}_q:recipe",
)
"""
CLASSES = "class Quantizer: ...\ndef recipe(): return 'a recipe'\n"


class Site:
    """A folder of fake distributions, the only ones that the tests of this file see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def module(self, name: str, source: str) -> None:
        (self.path / f"{name}.py").write_text(textwrap.dedent(source))

    def distribution(self, name: str, entry: str, version: str = "1.2") -> None:
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[te_proto.formats]\n{entry}\n")

    def plugin(self, name: str, protocol: int = PROTOCOL, classes: str = CLASSES) -> None:
        self.distribution(f"te-{name}", f"{name} = te_{name}_f:FORMAT")
        self.module(f"te_{name}_f", CARD.format(name=name, protocol=protocol))
        self.module(f"te_{name}_q", classes)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    before = set(sys.modules)
    not_installed = [entry for entry in sys.path if Path(entry).name != "site-packages"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *not_installed])
    importlib.invalidate_caches()
    monkeypatch.delenv(registry.ALLOWED, raising=False)
    registry.clear_cache()
    yield Site(tmp_path)
    registry.clear_cache()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def whole(message: str) -> str:
    return f"^{re.escape(message)}$"


def test_names_come_sorted_from_metadata_alone(site: Site) -> None:
    site.distribution("te-b", "beta = te_b_missing:FORMAT")
    site.distribution("te-a", "alpha = te_a_missing:FORMAT\ngamma = te_a_missing:OTHER")
    assert registry.available_formats() == ("alpha", "beta", "gamma")


def test_card_is_loaded_once_and_names_where_the_classes_are(site: Site) -> None:
    site.plugin("fine")
    card = registry.describe("fine")
    assert isinstance(card, FormatSpec)
    assert (card.name, card.distribution, card.quantizer) == (
        "fine",
        "te-fine",
        "te_fine_q:Quantizer",
    )
    assert registry.describe("fine") is card
    assert "te_fine_q" not in sys.modules


def test_quantizer_and_recipe_are_resolved_from_the_card(site: Site) -> None:
    site.plugin("fine")
    assert registry.get_quantizer("fine") is sys.modules["te_fine_q"].Quantizer
    assert registry.get_recipe("fine") == "a recipe"


def test_unknown_name_lists_what_is_installed(site: Site) -> None:
    site.plugin("one")
    site.plugin("two")
    message = (
        "mxfp9: no installed distribution provides this format, installed formats: one, two; "
        "pip install the distribution that provides it"
    )
    with pytest.raises(UnknownFormatError, match=whole(message)):
        registry.describe("mxfp9")


def test_unknown_name_says_none_where_nothing_is_installed(site: Site) -> None:
    assert registry.available_formats() == ()
    message = (
        "mxfp8: no installed distribution provides this format, installed formats: none; "
        "pip install the distribution that provides it"
    )
    with pytest.raises(UnknownFormatError, match=whole(message)):
        registry.get_quantizer("mxfp8")


def test_two_distributions_of_one_name_are_both_named(site: Site) -> None:
    site.distribution("te-first", "twin = te_first_f:FORMAT", "1.0")
    site.distribution("te-second", "twin = te_second_f:FORMAT", "2.0")
    site.plugin("other")
    message = (
        "twin: provided by te-first 1.0 and te-second 2.0, and a format has one; "
        "uninstall all but one"
    )
    with pytest.raises(PluginError, match=whole(message)):
        registry.describe("twin")
    assert registry.available_formats() == ("other", "twin")
    assert registry.describe("other").name == "other"


@pytest.mark.parametrize(
    ("protocol", "upgrade"),
    [
        pytest.param(PROTOCOL + 1, "te-proto", id="plugin-newer"),
        pytest.param(PROTOCOL - 1, "te-skewed", id="plugin-older"),
    ],
)
def test_other_protocol_names_both_and_the_older_to_upgrade(
    site: Site, protocol: int, upgrade: str
) -> None:
    site.plugin("skewed", protocol=protocol)
    message = (
        f"skewed: te-skewed 1.2 was written for protocol {protocol}, te-proto {__version__} "
        f"has protocol {PROTOCOL}; python -m pip install --upgrade {upgrade}"
    )
    with pytest.raises(PluginError, match=whole(message)):
        registry.describe("skewed")


def test_plugin_that_raises_at_import_is_kept_and_hides_nobody(site: Site) -> None:
    site.plugin("fine")
    site.distribution("te-broken", "broken = te_broken_f:FORMAT")
    site.module("te_broken_f", "raise RuntimeError('no disk left')")
    message = (
        "broken: te-broken 1.2 (te_broken_f:FORMAT) cannot be imported, RuntimeError: "
        "no disk left; repair or uninstall it"
    )
    causes = []
    for _ in range(2):
        with pytest.raises(PluginError, match=whole(message)) as raised:
            registry.describe("broken")
        assert isinstance(raised.value.__cause__, RuntimeError)
        causes.append(raised.value.__cause__)
    assert causes[0] is causes[1]
    assert registry.available_formats() == ("broken", "fine")
    assert registry.describe("fine").name == "fine"


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        pytest.param(
            "odd = te_odd_f:FORMAT",
            CARD.format(name="even", protocol=PROTOCOL),
            "odd: te-odd 1.2 (te_odd_f:FORMAT) must carry the name of its entry point, "
            "got 'even'; report it there",
            id="other-name",
        ),
        pytest.param(
            "odd = te_odd_f:FORMAT",
            "FORMAT = {'name': 'odd'}",
            "odd: te-odd 1.2 (te_odd_f:FORMAT) must be a te_proto.FormatSpec, got dict; "
            "report it there",
            id="not-a-card",
        ),
        pytest.param(
            "odd = te_odd_f:FORMAT",
            "FORMATS = ()",
            "odd: te-odd 1.2 (te_odd_f:FORMAT) cannot be imported, PluginError: "
            "'te_odd_f:FORMAT' cannot be resolved: module 'te_odd_f' has no attribute 'FORMAT'; "
            "repair or uninstall it",
            id="no-such-attribute",
        ),
        pytest.param(
            "odd = te_odd_f",
            "",
            "odd: te-odd 1.2 (te_odd_f) cannot be imported, PluginError: an import string reads "
            "'package.module:Name', got 'te_odd_f'; repair or uninstall it",
            id="no-colon",
        ),
        pytest.param(
            "odd = te_odd_gone:FORMAT",
            "",
            "odd: te-odd 1.2 (te_odd_gone:FORMAT) cannot be imported, ModuleNotFoundError: "
            "No module named 'te_odd_gone'; repair or uninstall it",
            id="module-gone",
        ),
    ],
)
def test_card_at_fault_is_refused(site: Site, entry: str, source: str, message: str) -> None:
    site.distribution("te-odd", entry)
    site.module("te_odd_f", source)
    with pytest.raises(PluginError, match=whole(message)):
        registry.describe("odd")


def test_class_that_cannot_be_loaded_names_its_owner(site: Site) -> None:
    site.plugin("lame", classes="import te_lame_needs_this")
    message = (
        "lame: te-lame 1.2 cannot load its quantizer 'te_lame_q:Quantizer', ModuleNotFoundError: "
        "No module named 'te_lame_needs_this'; repair or uninstall it"
    )
    with pytest.raises(PluginError, match=whole(message)) as raised:
        registry.get_quantizer("lame")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    assert registry.describe("lame").name == "lame"


def test_environment_restricts_what_is_listed_and_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        site.plugin(name)
    monkeypatch.setenv(registry.ALLOWED, "three, one,absent")
    assert registry.available_formats() == ("one", "three")
    assert registry.describe("one").name == "one"
    message = (
        "two: the environment allows only TE_PROTO_FORMATS=three, one,absent; "
        "add two to it, or unset it"
    )
    with pytest.raises(UnknownFormatError, match=whole(message)):
        registry.describe("two")
    assert "te_two_f" not in sys.modules

    monkeypatch.setenv(registry.ALLOWED, "")
    assert registry.available_formats() == ("one", "three", "two")


def test_distribution_installed_later_is_seen_after_clear_cache(site: Site) -> None:
    site.plugin("early")
    assert registry.available_formats() == ("early",)
    site.plugin("late")
    assert registry.available_formats() == ("early",)
    registry.clear_cache()
    assert registry.available_formats() == ("early", "late")


def test_resolve_follows_dots_and_names_what_is_missing() -> None:
    assert registry.resolve("te_proto.errors:PluginError") is PluginError
    assert registry.resolve("te_proto.errors:PluginError.__name__") == "PluginError"
    with pytest.raises(
        PluginError,
        match=whole(
            "'te_proto.errors:Gone' cannot be resolved: "
            "module 'te_proto.errors' has no attribute 'Gone'"
        ),
    ):
        registry.resolve("te_proto.errors:Gone")


def test_eight_threads_get_one_card_and_import_it_once(site: Site) -> None:
    site.plugin("slow")
    source = "import time\nfrom te_slow_count import runs\nruns.append(1)\ntime.sleep(0.2)\n"
    site.module("te_slow_count", "runs = []")
    site.module("te_slow_f", source + CARD.format(name="slow", protocol=PROTOCOL))
    together = threading.Barrier(8)

    def ask(_: int) -> tuple[tuple[str, ...], FormatSpec, type]:
        together.wait(timeout=10)
        return (
            registry.available_formats(),
            registry.describe("slow"),
            registry.get_quantizer("slow"),
        )

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert {names for names, _, _ in answers} == {("slow",)}
    assert len({id(card) for _, card, _ in answers}) == 1
    assert len({id(quantizer) for _, _, quantizer in answers}) == 1
    assert sys.modules["te_slow_count"].runs == [1]


def run(site: Site, code: str) -> str:
    path = os.pathsep.join([str(site.path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_plugin_may_ask_the_registry_while_another_thread_loads_it(site: Site) -> None:
    site.plugin("chatty")
    card = CARD.format(name="chatty", protocol=PROTOCOL)
    asks = "import time; time.sleep(0.5)\nfrom te_proto import available_formats as ask; ask()\n"
    site.module("te_chatty_f", asks + card)
    code = (
        "import importlib, threading, time\n"
        "from te_proto import registry\n"
        "load = threading.Thread(\n"
        "    target=importlib.import_module, args=['te_chatty_f'], daemon=True\n"
        ")\n"
        "load.start()\n"
        "time.sleep(0.1)\n"
        "print(registry.describe('chatty').name)\n"
    )
    assert run(site, code) == "chatty"


def test_listing_and_describing_load_neither_torch_nor_triton(site: Site) -> None:
    site.plugin("fine")
    code = (
        "import sys, te_proto\n"
        "assert 'fine' in te_proto.available_formats()\n"
        "assert te_proto.describe('fine').name == 'fine'\n"
        "print(sorted({'torch', 'triton', 'numpy', 'te_fine_q'} & set(sys.modules)))\n"
    )
    assert run(site, code) == "[]"
