# SPDX-License-Identifier: Apache-2.0
"""The kit over the toy format, which has options and shapes that the four formats do not have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from te_toy import ToyQuantizer
from te_toy_site import install

from te_proto import Quantizer, registry
from te_proto.testing import FormatConformance


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
