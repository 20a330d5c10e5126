# SPDX-License-Identifier: Apache-2.0
"""The kit over the toy format, which has options and shapes that the four formats do not have."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from te_toy import ToyQuantizer
from te_toy_site import install

from te_proto import Quantizer, registry
from te_proto.errors import TeError
from te_proto.testing import FormatConformance, _profile, plugin
from te_proto.testing.conformance import Case
from te_proto.testing.conformance.draws import cases, quantizers


@pytest.fixture(scope="module", autouse=True)
def toy_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In this process and those it starts."""
    site = install(tmp_path_factory.mktemp("toy") / "site")
    paths = [str(site), str(Path(__file__).parent)]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        known = filter(None, [os.environ.get("PYTHONPATH")])
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, *known]))
        registry.clear_cache()
        yield
    sys.modules.pop("te_toy_card", None)
    registry.clear_cache()


class TestToy(FormatConformance):
    format_name = "toy"
    quantizers = (
        ToyQuantizer(),
        ToyQuantizer(block=8, note="wide"),
        ToyQuantizer(optimize_for_gemm=True, ceiling=3.4e38),
    )
    shapes = ((), (3, 5), (12, 8))
    nonfinite = False  # torch leaves open what int8 becomes of NaN

    def namespace(self) -> str:
        return "toy"  # that of te_toy_ops is for tests of ops

    def error_bound(self, quantizer: Quantizer, *, columnwise: bool) -> float:
        return 1.001 / 127  # a whole step, where codes are cut


# -- how it looks ----------------------------------------------------------------------------------


def test_failure_is_the_smallest_case_and_names_it() -> None:
    seen = []

    def check(case: Case) -> None:
        seen.append(case)
        assert case.proto().numel < 20, f"{case}: too large"

    kit = TestToy()
    with pytest.raises(AssertionError, match="too large") as caught:
        kit.explore(check, cases(kit, internal=(False,)))
    named = [case for case in seen if str(caught.value).startswith(f"{case}: ")]
    assert named
    assert named[0].proto().numel < 65
    assert len({case.shape for case in seen}) > 3


def test_fixed_case_is_named_by_what_it_raises() -> None:
    kit = TestToy()
    case = kit.fixed()[0]
    with pytest.raises(ZeroDivisionError) as caught:
        kit.explore(lambda case: print(1 / 0), None, [case])
    assert getattr(caught.value, "__notes__", [f"with {case}"]) == [f"with {case}"]


def test_options_are_drawn_from_what_the_format_accepts() -> None:
    kit, seen = TestToy(), set()

    def check(case: Case) -> None:
        seen.add((case.quantizer.rounding, case.quantizer.optimize_for_gemm))  # type: ignore[attr-defined]

    kit.explore(check, cases(kit), examples=60)
    assert len(seen) == 4
    assert quantizers(kit).validate() is None


@pytest.mark.parametrize("name", ["ci", "long"])
def test_profile_is_that_of_the_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_profile, "_active", None)
    given = {"--te-profile": name, "--te-device": "cpu"}
    config = types.SimpleNamespace(addinivalue_line=print, getoption=given.__getitem__)
    plugin.pytest_configure(config)  # type: ignore[arg-type]
    assert _profile.active() is _profile.PROFILES[name]
    assert _profile.PROFILES["ci"].examples < _profile.PROFILES["long"].examples


def test_elements_without_a_known_error_ask_for_the_bound() -> None:
    class Unknown(FormatConformance):
        format_name = "toy"

    quantizer = types.SimpleNamespace(dtype="e3m4", call_arguments=tuple)
    with pytest.raises(TeError, match="no bound is known for 'e3m4'; override error_bound"):
        Unknown().error_bound(quantizer, columnwise=False)  # type: ignore[arg-type]
