# SPDX-License-Identifier: Apache-2.0
"""The wheels as a user gets them."""

from __future__ import annotations

import re
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from environments import PROJECTS, ROOT, make_environment, run


@pytest.fixture(scope="module")
def fresh_python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheels of te-proto and te-mxfp8, and torch."""
    home = tmp_path_factory.mktemp("fresh")
    return make_environment(home, wheels["te-proto"], wheels["te-mxfp8"])


@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS)
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


@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS)
def test_metadata_says_what_the_package_needs(project: Path, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[project.name]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == project.name
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = {r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    core = project.name == "te-proto"  # which alone knows the last version it was tried on
    assert needed == ({"torch<2.16,>=2.11"} if core else {"torch>=2.11", "te-proto<0.2,>=0.1"})


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
