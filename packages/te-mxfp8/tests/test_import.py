# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from importlib.metadata import version

import te_mxfp8
from te_proto.testing import assert_lazy_package


def test_version_is_that_of_the_installed_distribution() -> None:
    assert te_mxfp8.__version__ == version("te-mxfp8")


def test_import_loads_no_torch_and_every_public_name_resolves_without_triton() -> None:
    assert_lazy_package("te_mxfp8", "te_mxfp8._format", "te_mxfp8.layout")
