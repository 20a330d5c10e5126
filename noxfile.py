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

TORCH = f"torch=={os.environ.get('TE_TORCH', '2.13.0')}"
TRITON = f"triton=={os.environ.get('TE_TRITON', '3.7.1')}"
# with "error" on warnings, torch wants numpy
PYTEST = ("pytest==9.2.0", "pytest-xdist==3.8.0", "numpy==2.2.6")
HATCHLING = "hatchling==1.33.0"
TORCHAO = "torchao==0.18.0"  # the peer of the benchmarks
DEMO = ("matplotlib==3.11.2", "tqdm==4.70.1")

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
TESTED = (*PACKAGES, *projects("templates/*"))
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
        install(session, TORCH, TRITON, *PYTEST, HATCHLING, *DEMO, editable=PACKAGES)
        folder = "tests-integration"
    else:
        triton = [TRITON] if "triton" in project.extras else []
        install(session, TORCH, *triton, *PYTEST, editable=tuple(dict.fromkeys([CORE, project])))
        folder = f"{project.path}/tests"
    # one thread each, see ENV: the second core takes other files
    workers = str(min(os.cpu_count() or 1, 4))
    session.run("pytest", "-n", workers, "--dist", "loadfile", folder, *session.posargs, env=ENV)


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
