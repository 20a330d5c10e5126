# SPDX-License-Identifier: Apache-2.0
"""A format from outside this repository: docs/add-a-format.md followed as it is written."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from environments import ROOT, build_wheel, make_environment, run

from te_proto.testing import new_quantizer_in_graph

PAGE = (ROOT / "docs" / "add-a-format.md").read_text()
NAME = "int8_rows"
COPY, INSTALL, TEST, TRAIN = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Walk:
    """A fresh environment and the folder of the new format, where steps of the page are run."""

    def __init__(self, home: Path, wheels: dict[str, Path]) -> None:
        self.folder = home / "te-int8-rows"
        self.python = make_environment(home, wheels["te-proto"], wheels["te-linear"])

    def follow(self, step: str) -> str:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        return run("sh", "-ec", step, TE_NEW=str(self.folder), PATH=path, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def walk(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Walk:
    walk = Walk(tmp_path_factory.mktemp("walk"), wheels)
    walk.follow(COPY)
    assert walk.follow(INSTALL).splitlines()[-1] == NAME
    return walk


def test_copy_keeps_no_name_of_the_template(walk: Walk) -> None:
    left = [
        file
        for file in walk.folder.rglob("*")
        if "dist" not in file.parts
        and ("example" in file.name.lower() or (file.is_file() and b"xample" in file.read_bytes()))
    ]
    assert left == []


def test_format_is_under_a_hundred_lines(walk: Walk) -> None:
    own = ("_format.py", "quantizer.py", "recipe.py", "reference.py", "tensor.py")
    sources = [walk.folder / "src" / "te_int8_rows" / name for name in own]
    assert sum(lines_of_code(source.read_text()) for source in sources) < 100


def lines_of_code(source: str) -> int:
    """Count lines of statements, without imports, docstrings, comments and blank lines."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not docstring:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            lines.update(range(node.lineno, (end or node.lineno) + 1))
    texts = source.splitlines()
    return sum(1 for n in lines if texts[n - 1].strip() and not _is_prose(texts[n - 1]))


def _is_prose(line: str) -> bool:
    return line.strip().startswith(('"""', "#"))


def test_core_has_not_one_line_for_it() -> None:
    known = ("example", "int8_rows", "te_int8", "Int8Rows")
    for package in ("te-proto", "te-linear"):
        for source in (ROOT / "packages" / package / "src").rglob("*.py"):
            text = source.read_text()
            assert not any(f"te_{name}" in text or f'"{name}"' in text for name in known), source


def test_it_passes_the_kit(walk: Walk) -> None:
    printed = walk.follow(TEST)
    assert re.search(r"^\d+ passed", printed.splitlines()[-1])


@new_quantizer_in_graph
def test_it_trains_in_the_demo(walk: Walk) -> None:
    printed = walk.follow(TRAIN)
    assert NAME in printed
    assert (walk.folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


@new_quantizer_in_graph
def test_it_trains_in_a_linear_layer(walk: Walk) -> None:
    code = f"""
import torch, te_proto
from te_linear import Linear
from te_proto.testing import count_compiles
torch.manual_seed(0)
layer = Linear(64, 32, recipe="{NAME}")
target = torch.nn.Linear(64, 32)
adam = torch.optim.Adam(layer.parameters(), 1e-2)
losses = []
with count_compiles() as counts:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for step in range(60):
        x = torch.randn(128, 64)
        loss = (compiled(x) - target(x).detach()).square().mean()
        adam.zero_grad(); loss.backward(); adam.step()
        losses.append(loss.item())
print(losses[-1] < losses[0] / 20, counts.graphs, counts.breaks, counts.recompiles)
"""
    assert walk.follow(f"python - <<'END'\n{code}\nEND").strip() == "True 1 0 0"


# -- what can go wrong ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def troubled(walk: Walk, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with te-mxfp8, four plugins in trouble, and int8_rows twice."""
    home = tmp_path_factory.mktemp("troubled")
    edits = {
        "twin": [("_format.py", "te-int8-rows", "te-twin")],
        "future": [("_format.py", "protocol=1", "protocol=2")],
        "torn": [("_format.py", "FORMAT =", 'raise RuntimeError("no disk")\nFORMAT =')],
        "late": [("quantizer.py", "import torch\n", "import torch\nimport not_there\n")],
    }
    made = [next((walk.folder / "dist").glob("*.whl"))]
    for name, changes in edits.items():
        copy = home / f"te-{name}"
        shutil.copytree(walk.folder, copy, ignore=shutil.ignore_patterns("dist", "*.png"))
        (copy / "src" / "te_int8_rows").rename(copy / "src" / f"te_{name}")
        for file in (copy / "pyproject.toml", *(copy / "src").rglob("*.py")):
            text = file.read_text().replace("te_int8_rows", f"te_{name}")
            text = text.replace("te-int8-rows", f"te-{name}")
            file.write_text(text if name == "twin" else text.replace(NAME, name))
        for file, old, new in changes:
            path = copy / "src" / f"te_{name}" / file
            assert name == "twin" or old in path.read_text()
            path.write_text(path.read_text().replace(old, new))
        made.append(build_wheel(copy, home / "dist"))
    return make_environment(home, wheels["te-proto"], wheels["te-mxfp8"], *made)


def asked(python: Path, name: str) -> str:
    code = (
        "import te_proto\n"
        f"try: print(te_proto.get_quantizer({name!r}).__name__)\n"
        "except te_proto.errors.TeError as error: print(type(error).__name__, error)\n"
    )
    return run(python, "-c", code, cwd=python.parent).strip()


TROUBLE = {
    NAME: f"PluginError {NAME}: provided by te-int8-rows 0.1.0 and te-twin 0.1.0, and a format has "
    "one; uninstall all but one",
    "future": "PluginError future: te-future 0.1.0 was written for protocol 2, te-proto 0.1.0 has "
    "protocol 1; python -m pip install --upgrade te-proto",
    "torn": "PluginError torn: te-torn 0.1.0 (te_torn._format:FORMAT) cannot be imported, "
    "RuntimeError: no disk; repair or uninstall it",
    "late": "PluginError late: te-late 0.1.0 cannot load its quantizer "
    "'te_late.quantizer:LateQuantizer', ModuleNotFoundError: No module named 'not_there'; repair "
    "or uninstall it",
}


@pytest.mark.parametrize("name", TROUBLE)
def test_each_trouble_has_its_error(name: str, troubled: Path) -> None:
    expected = TROUBLE[name].replace("LateQuantizer", "Int8RowsQuantizer")
    assert asked(troubled, name) == expected


def test_the_others_are_listed_and_work(troubled: Path) -> None:
    code = "import te_proto; print(*te_proto.available_formats())"
    listed = run(troubled, "-c", code, cwd=troubled.parent).split()
    assert listed == sorted([*TROUBLE, "mxfp8"])
    assert asked(troubled, "mxfp8") == "MXFP8Quantizer"


def test_checkpoint_of_a_format_that_is_not_installed_says_what_to_install(
    walk: Walk, wheels: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "weights.pt"
    save = (
        "import sys, te_proto, torch\n"
        f"q = te_proto.get_quantizer({NAME!r})()\n"
        "torch.save({'w': q.quantize(torch.ones(4, 8))}, sys.argv[1])\n"
    )
    run(walk.python, "-c", save, file)
    python = make_environment(tmp_path, wheels["te-proto"])
    load = "import sys, te_proto, torch; torch.load(sys.argv[1], weights_only=True)"
    done = subprocess.run(
        [python, "-c", load, file], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert (
        "no installed format provides the class 'te_int8_rows.tensor:Int8RowsTensor'; install it "
        "with: pip install te-int8-rows"
    ) in done.stderr
