# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import te_fp8_block


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_version_is_that_of_the_installed_distribution() -> None:
    assert te_fp8_block.__version__ == version("te-fp8-block")


@pytest.mark.parametrize("module", ["te_fp8_block", "te_fp8_block._format"])
def test_import_loads_no_torch(module: str) -> None:
    heavy = "sorted({'numpy', 'torch', 'triton'} & set(sys.modules))"
    assert run(f"import sys, {module}; print({heavy})") == "[]"


def test_every_public_name_resolves_without_triton() -> None:
    code = (
        "import sys, te_fp8_block as package\n"
        "missing = [name for name in package.__all__ if not hasattr(package, name)]\n"
        "print(missing, dir(package) == sorted(package.__all__), 'triton' in sys.modules)"
    )
    assert run(code) == "[] True False"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'te_fp8_block' has no attribute 'absent'$"):
        te_fp8_block.absent  # noqa: B018
