# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from importlib.metadata import version

import te_proto
from te_proto.testing import assert_lazy_package


def test_version_is_that_of_the_installed_distribution() -> None:
    assert te_proto.__version__ == version("te-proto")


def test_import_loads_no_torch_and_every_public_name_resolves_without_triton() -> None:
    assert_lazy_package("te_proto", "te_proto.errors", "te_proto.registry")


def test_the_test_kit_loads_no_torch_and_its_names_resolve() -> None:
    assert_lazy_package("te_proto.testing", "te_proto.testing.plugin")
