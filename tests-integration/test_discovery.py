# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import te_proto
from te_proto import registry

PACKAGES = Path(__file__).parents[1] / "packages"
# each format package of this repository, by the one file that makes it one
CARDS = sorted(PACKAGES.glob("*/src/*/_format.py"))
FORMATS = te_proto.available_formats()


def test_each_format_package_of_the_repository_is_listed_under_one_name() -> None:
    assert CARDS
    modules = sorted(f"{card.parent.name}._format" for card in CARDS)
    assert sorted(_card_module(name) for name in FORMATS) == modules


def _card_module(name: str) -> str:
    entries = distribution(te_proto.describe(name).distribution).entry_points
    return entries.select(group=registry.GROUP)[name].module


def test_listing_and_describing_all_formats_loads_neither_torch_nor_a_format() -> None:
    code = (
        "import sys, te_proto\n"
        "cards = [te_proto.describe(name) for name in te_proto.available_formats()]\n"
        "heavy = {'numpy', 'torch', 'triton'} | {card.quantizer.split(':')[0] for card in cards}\n"
        "print(len(cards), sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"{len(CARDS)} []", "")


@pytest.mark.parametrize("name", FORMATS)
def test_card_leads_to_classes_of_its_own_distribution(name: str) -> None:
    card = te_proto.describe(name)
    assert card.name == name
    package = card.distribution.replace("-", "_")
    for import_string in (card.quantizer, card.tensor, card.storage):
        cls = registry.resolve(import_string)
        assert isinstance(cls, type)
        assert f"{cls.__module__}:{cls.__qualname__}" == import_string
        assert cls.__module__.split(".")[0] == package
    assert issubclass(te_proto.get_quantizer(name), te_proto.Quantizer)
    assert isinstance(te_proto.get_recipe(name), te_proto.Recipe)
