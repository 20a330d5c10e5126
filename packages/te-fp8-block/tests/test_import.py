# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from importlib.metadata import version

import te_fp8_block
from te_proto.testing import assert_lazy_package


def test_version_is_that_of_the_installed_distribution() -> None:
    assert te_fp8_block.__version__ == version("te-fp8-block")


def test_import_loads_no_torch_and_every_public_name_resolves_without_triton() -> None:
    assert_lazy_package("te_fp8_block", "te_fp8_block._format")
