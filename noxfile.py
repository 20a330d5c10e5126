# SPDX-License-Identifier: Apache-2.0
"""Every check of this repository, each in an environment of its own: ``nox -l`` lists them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import nox
from nox.project import load_toml

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "types", "tests"]

# each torch that is tried, with the triton it was released with; the first is what CI uses
MATRIX = {
    "2.13.0": "3.7.1",
    "2.11.0": "3.6.0",
    "2.12.1": "3.7.1",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}
TORCH, TRITON = (f"torch=={next(iter(MATRIX))}", f"triton=={next(iter(MATRIX.values()))}")
# with "error" on warnings, torch wants numpy
PYTEST = ("pytest==9.2.0", "pytest-xdist==3.8.0", "hypothesis==6.155.2", "numpy==2.2.6")
HATCHLING = "hatchling==1.33.0"
TORCHAO = "torchao==0.18.0"  # the peer of the benchmarks
DEMO = ("matplotlib==3.11.2", "tqdm==4.70.1")
MODELS = "transformers==5.24.0"

# What this shell sets must not change what is tested. Small tensors gain nothing from threads.
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": None, "TRITON_INTERPRET": None}


class Project(NamedTuple):
    """A folder with a distribution in it."""

    name: str
    path: str
    extras: tuple[str, ...]


def projects(pattern: str) -> tuple[Project, ...]:
    """Return the distributions whose folder matches ``pattern``."""
    root = Path(__file__).parent
    found = []
    for file in sorted(root.glob(f"{pattern}/pyproject.toml")):
        project = load_toml(file)["project"]
        path = file.parent.relative_to(root).as_posix()
        extras = tuple(project.get("optional-dependencies", ()))
        found.append(Project(project["name"], path, extras))
    return tuple(found)


PACKAGES = projects("packages/*")
TEMPLATES = projects("templates/*")
TESTED = (*PACKAGES, *TEMPLATES)
CORE = next(project for project in PACKAGES if project.name == "te-proto")
INTEGRATION = nox.param(None, id="integration")


def install(session: nox.Session, *requirements: str, editable: tuple[Project, ...] = ()) -> None:
    """Install everything in one call, so that our packages satisfy each other."""
    flags = [part for project in editable for part in ("-e", project.path)]
    # not silent: the first install of torch takes minutes where it has to be downloaded
    session.install("--disable-pip-version-check", *requirements, *flags, silent=False, env=ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting (ruff)."""
    install(session, "ruff==0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages and of the benchmarks (mypy, strict)."""
    install(session, "mypy==2.4.1", TORCH, *PYTEST)
    session.run("mypy", *(f"{project.path}/src" for project in TESTED), "benchmarks", env=ENV)


@nox.session
@nox.parametrize("project", [*(nox.param(p, id=p.name) for p in TESTED), INTEGRATION])
def tests(session: nox.Session, project: Project | None) -> None:
    """Test a package with only te-proto of ours beside it; as "integration", all of them."""
    if project is None:
        install(session, TORCH, TRITON, *PYTEST, HATCHLING, *DEMO, MODELS, editable=PACKAGES)
        folder = "tests-integration"
    else:
        triton = [TRITON] if "triton" in project.extras else []
        install(session, TORCH, *triton, *PYTEST, editable=tuple(dict.fromkeys([CORE, project])))
        folder = f"{project.path}/tests"
    _pytest(session, folder)


def _pytest(session: nox.Session, *arguments: str) -> None:
    # one thread each, see ENV: the second core takes other files
    workers = str(min(os.cpu_count() or 1, 4))
    session.run(
        "pytest", "-n", workers, "--dist", "loadfile", *arguments, *session.posargs, env=ENV
    )


@nox.session
@nox.parametrize("torch", [nox.param(version, id=version) for version in MATRIX])
def matrix(session: nox.Session, torch: str) -> None:
    """Test every package on another torch: ``nox -s "matrix(2.14.1)"``; pip may take gigabytes."""
    needed = (f"torch=={torch}", f"triton=={MATRIX[torch]}", *PYTEST, HATCHLING, *DEMO, MODELS)
    install(session, *needed, editable=TESTED)
    for project in TESTED:
        _pytest(session, f"{project.path}/tests")
    # integration takes every format that is installed, and the template is none
    session.run("python", "-m", "pip", "uninstall", "-y", *(t.name for t in TEMPLATES))
    _pytest(session, "tests-integration")


def _kits() -> list[str]:
    files = [f"{project.path}/tests/test_conformance.py" for project in TESTED]
    return [file for file in files if Path(file).exists()]


@nox.session
def conformance(session: nox.Session) -> None:
    """Look further than the tests do for what breaks a format; takes an hour, or pass -k."""
    install(session, TORCH, TRITON, *PYTEST, editable=TESTED)
    _pytest(session, "--te-profile=long", *_kits())


@nox.session
def coverage(session: nox.Session) -> None:
    """Count the lines of te-proto and of each format that the conformance kit alone runs."""
    install(session, TORCH, TRITON, *PYTEST, "coverage==7.17.5", editable=TESTED)
    session.run("coverage", "erase")
    for file in _kits():  # one at a time: a worker keeps what dynamo has compiled
        session.run("coverage", "run", "-m", "pytest", "-n", "2", file, env=ENV)
    session.run("coverage", "combine", "--quiet")
    for file in _kits():
        module = Path(file).parents[1] / "src/*/*"
        session.run("coverage", "report", f"--include=*/{module}", "--fail-under=95")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model in low precision; arguments go to examples/train_gpt.py."""
    install(session, TORCH, "numpy", *DEMO, editable=PACKAGES)
    session.run("python", "examples/train_gpt.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Time every format beside torchao and a copy; arguments go to benchmarks/."""
    install(session, TORCH, "numpy", TORCHAO, editable=PACKAGES)
    session.run("python", "-m", "benchmarks", *session.posargs, env={"PYTHONPATH": None})


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the sdist of each package, and from it the wheel, into dist/."""
    install(session, "build==1.6.1", HATCHLING)
    for project in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", project.path)
