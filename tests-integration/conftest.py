# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # environments
from environments import PROJECTS, build_wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, by the name of its folder."""
    out = tmp_path_factory.mktemp("wheels")
    return {name: build_wheel(project, out) for name, project in PROJECTS.items()}
