# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_proto._compat import SUPPORTED, check_torch

if sys.version_info >= (3, 11):
    import tomllib


@pytest.mark.parametrize(
    ("version", "minor"), [("2.10.1", (2, 10)), ("1.13.0", (1, 13)), ("2.16.0.dev1+cpu", (2, 16))]
)
def test_version_out_of_range_is_an_import_error_that_names_the_range(
    version: str, minor: tuple[int, int]
) -> None:
    with pytest.raises(ImportError) as raised:
        check_torch(version, minor)
    assert str(raised.value) == (
        f'te-proto needs torch 2.11 to 2.15, got {version}; pip install "torch>=2.11,<2.16", '
        "or a te-proto that knows this one"
    )


@pytest.mark.parametrize("name", ["TensorProto", "custom_op", "QuantizedTensor", "fallback"])
def test_whatever_is_imported_first_says_so(name: str) -> None:
    code = f"import torch; torch.__version__ = '2.10.1'; from te_proto import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: te-proto needs torch 2.11 to 2.15, got 2.10.1; " in done.stderr


def test_this_version_is_in_the_range() -> None:
    minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert SUPPORTED[0] <= minor <= SUPPORTED[1]
    check_torch(torch.__version__, minor)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_the_distribution_asks_for_the_same_range() -> None:
    file = Path(__file__).parents[1] / "pyproject.toml"
    (first, last), after = SUPPORTED, SUPPORTED[1][1] + 1
    wanted = f"torch>={first[0]}.{first[1]},<{last[0]}.{after}"
    assert tomllib.loads(file.read_text())["project"]["dependencies"] == [wanted]


def test_import_warns_of_nothing() -> None:
    code = "import te_proto.proto, te_proto.custom_ops"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
