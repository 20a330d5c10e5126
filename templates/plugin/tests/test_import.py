# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from importlib.metadata import version

import te_example
from te_proto.testing import assert_lazy_package


def test_version_is_that_of_the_installed_distribution() -> None:
    assert te_example.__version__ == version("te-example")


def test_import_loads_no_torch_and_every_public_name_resolves_without_triton() -> None:
    assert_lazy_package("te_example", "te_example._format")
