# SPDX-License-Identifier: Apache-2.0
"""Wheels, and fresh environments that hold nothing of ours but wheels.

An environment borrows torch, what torch needs, the test tools and pip from the one that runs the
tests, through links to all of its packages but ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = {
    file.parent.name: file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(project: Path, out: Path) -> Path:
    """Return the wheel of the project in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=project)
    (wheel,) = set(out.iterdir()) - before
    return wheel


def make_environment(home: Path, *wheels: Path) -> Path:
    """Make a fresh environment in ``home``, install the wheels and return its python."""
    run(sys.executable, "-m", "venv", "--without-pip", home / "env")
    python = home / "env" / "bin" / "python"
    borrowed = home / "borrowed"
    borrowed.mkdir()
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for entry in folder.iterdir():
            link = borrowed / entry.name
            ours = entry.name.startswith(("te_", "_te_")) or entry.suffix == ".pth"
            if not ours and not link.exists():
                link.symlink_to(entry)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "borrowed.pth").write_text(f"{borrowed}\n")
    # without an index, so whatever the wheels require must already be there
    run(python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", *wheels)
    return python
