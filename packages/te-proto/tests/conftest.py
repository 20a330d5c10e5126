# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.register_assert_rewrite("te_toy")
sys.path.insert(0, str(HERE))  # te_toy is no distribution: tests and fresh processes import it so


@pytest.fixture(autouse=True)
def fallbacks_refused() -> Iterator[None]:
    """No test dequantizes by accident; one that means to says so."""
    from te_proto import fallback

    with fallback("error"):
        yield


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., str]:
    """Run code in a process of its own, where te-toy is installed, and return what it prints."""
    from te_toy_site import install

    site = install(tmp_path / "site")

    def run(code: str, **environment: str) -> str:
        paths = [str(site), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env=env,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
