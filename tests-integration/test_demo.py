# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_proto

DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"
FORMATS = te_proto.available_formats()
COLUMNS = (
    *("format", "first", "last", "difference"),
    *("weights_planned", "weights_measured", "saved_planned", "saved_measured"),
    *("graphs", "breaks", "recompiles", "speed"),
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **environment},
    )


def run_without(package: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    source = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['--quick', '--out', "
        f"{str(tmp_path / 'x.png')!r}]; runpy.run_path({str(DEMO)!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Path, str]:
    """The rows of one quick run, its picture, and what it wrote to stderr."""
    picture = tmp_path_factory.mktemp("demo") / "loss.png"
    done = run("--quick", "--steps", "8", "--threads", "1", "--out", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("format "))
    rows = [
        dict(zip(COLUMNS, line.split(), strict=True))
        for line in lines[start + 1 : start + 2 + len(FORMATS)]
    ]
    return rows, picture, done.stderr


def test_there_is_a_row_for_bf16_and_one_for_each_installed_format(quick) -> None:
    rows, _, _ = quick
    assert FORMATS
    assert [row["format"] for row in rows] == ["bf16", *FORMATS]


def test_each_format_is_one_graph_without_breaks_and_recompiles(quick) -> None:
    rows, _, _ = quick
    counts = {(row["graphs"], row["breaks"], row["recompiles"]) for row in rows}
    assert counts == {("1", "0", "0")}


def test_prototypes_predict_the_bytes_that_a_forward_holds(quick) -> None:
    rows, _, _ = quick
    for row in rows:
        assert row["weights_planned"] == row["weights_measured"]
        assert row["saved_planned"] == row["saved_measured"]
    # width 128, 12 * 128 * 128 weights; M = 2 * 64 rows into linears of K = 128, 128, 128 and 512
    weights = 12 * 128 * 128 * 2
    assert rows[0]["weights_planned"] == f"{weights:,}"
    assert rows[0]["saved_planned"] == f"{128 * (3 * 128 + 512) * 2 + weights:,}"
    saved = [int(row["saved_planned"].replace(",", "")) for row in rows]
    assert max(saved[1:]) < saved[0]


def test_the_loss_falls_and_stays_near_bf16(quick) -> None:
    rows, _, _ = quick
    for row in rows:
        assert 5.0 < float(row["first"]) < 6.5
        assert float(row["last"]) < float(row["first"]) - 1.0
        assert abs(float(row["last"]) - float(rows[0]["last"])) < 0.2
    assert [row["difference"] == "-" for row in rows] == [True] + [False] * len(FORMATS)


def test_the_picture_is_a_png(quick) -> None:
    _, picture, _ = quick
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_nothing_but_progress_is_on_stderr(quick) -> None:
    _, _, stderr = quick
    assert [
        line
        for line in stderr.replace("\r", "\n").splitlines()
        if line and "step/s" not in line and "s/step" not in line
    ] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-3"], "argument --steps: must be a whole number >= 1, got '-3'"),
        (["--layers", "two"], "argument --layers: must be a whole number >= 1, got 'two'"),
        (["--lr", "nan"], "argument --lr: must be a number > 0, got 'nan'"),
        (
            ["--width", "100"],
            "argument --width: must be a multiple of 32, one head, got 100; use 128",
        ),
        (
            ["--text", "no/such/file"],
            "argument --text: cannot read 'no/such/file', No such file or directory",
        ),
        (
            ["--text", os.devnull],
            "argument --text: must hold at least context + 2 = 66 bytes, got 0; use a longer text "
            "or a smaller --context",
        ),
        (
            ["--out", "no/such/folder/x.png"],
            "argument --out: must be a file in a folder that exists, got 'no/such/folder/x.png'",
        ),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (
            ["--formats", "fp3_odd"],
            f"argument --formats: fp3_odd not installed, installed are {', '.join(FORMATS)}; "
            "pip install te-fp3-odd",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run("--quick", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"train_gpt.py: error: {message}\n"


def test_a_shape_that_a_format_cannot_hold_is_found_before_training() -> None:
    done = run("--quick", "--formats", "mxfp8", "--batch", "1", "--context", "33")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "train_gpt.py: error: linear: input of shape (1, 33, 128): mxfp8:"
    )
    assert done.stderr.count("\n") == 1


def test_no_format_at_all_says_what_to_install() -> None:
    done = run("--quick", TE_PROTO_FORMATS="none_of_them")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "train_gpt.py: error: no format is installed; pip install one, such as te-mxfp8\n"
    )


@pytest.mark.parametrize(
    ("package", "distribution"), [("torch", "torch"), ("te_linear", "te-linear"), ("tqdm", "tqdm")]
)
def test_a_missing_package_says_what_to_install(
    package: str, distribution: str, tmp_path: Path
) -> None:
    done = run_without(package, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"train_gpt.py: error: cannot import {package}; pip install {distribution}\n"
    )
