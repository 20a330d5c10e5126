# SPDX-License-Identifier: Apache-2.0
"""The wheels as a user gets them.

They are installed in a fresh environment that borrows torch, what torch needs and pip from the one
that runs the tests, through links to all of its packages but ours.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
IDS = [project.name for project in PROJECTS]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, by the name of its folder."""
    out = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=project)
    built = {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in out.iterdir()}
    assert sorted(built) == IDS
    return built


@pytest.fixture(scope="module")
def fresh_python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheels of te-proto and te-mxfp8, and torch."""
    home = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", home / "env")
    python = home / "env" / "bin" / "python"

    borrowed = home / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("te_") and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "borrowed.pth").write_text(f"{borrowed}\n")

    # without an index, so whatever the wheels require must already be there
    install = ("-m", "pip", "install", "--no-index", "--disable-pip-version-check")
    run(python, *install, wheels["te-proto"], wheels["te-mxfp8"])
    return python


@pytest.mark.parametrize("project", PROJECTS, ids=IDS)
def test_wheel_holds_the_package_and_nothing_else(project: Path, wheels: dict[str, Path]) -> None:
    (source,) = (project / "src").iterdir()
    files = {
        file.relative_to(project / "src").as_posix()
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = zipfile.ZipFile(wheels[project.name]).namelist()
    info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
    assert {name for name in names if not name.startswith(info)} == files
    assert {f"{source.name}/py.typed", f"{source.name}/__about__.py"} <= files
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.parametrize("project", PROJECTS, ids=IDS)
def test_metadata_says_what_the_package_needs(project: Path, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[project.name]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == project.name
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = {r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    core = set() if project.name == "te-proto" else {"te-proto<0.2,>=0.1"}
    assert needed == {"torch>=2.11", *core}


def test_fresh_environment_sees_the_two_wheels_and_no_other_package_of_ours(
    fresh_python: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, te_proto\n"
        "from importlib.metadata import distributions\n"
        "print(*sorted(d.name for d in distributions() if d.name.startswith('te-')))\n"
        "print(te_proto.__file__.startswith(sys.prefix), *te_proto.available_formats())\n"
    )
    assert run(fresh_python, "-c", code, cwd=tmp_path) == "te-mxfp8 te-proto\nTrue mxfp8\n"


def test_example_of_the_readme_runs_in_the_fresh_environment(
    fresh_python: Path, tmp_path: Path
) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(example.splitlines()) <= 12
    printed = run(fresh_python, "-c", example, cwd=tmp_path)
    assert printed.startswith("('mxfp8',)\n")
