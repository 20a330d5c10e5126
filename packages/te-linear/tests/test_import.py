# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from importlib.metadata import version

import te_linear
from te_proto.testing import assert_lazy_package


def test_version_is_that_of_the_installed_distribution() -> None:
    assert te_linear.__version__ == version("te-linear")


def test_import_loads_no_torch_and_every_public_name_resolves_without_triton() -> None:
    assert_lazy_package("te_linear")
