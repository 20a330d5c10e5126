# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import te_linear
import te_proto
from te_proto.testing import count_compiles, new_quantizer_in_graph

DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"
FORMATS = te_proto.available_formats()
TRAINING = (
    *("format", "first", "last", "distance", "stated"),
    *("graphs", "breaks", "recompiles", "first_step", "speed"),
)
MEMORY = ("format", "weights_planned", "weights_measured", "saved_planned", "saved_measured")


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
    done = run("--quick", "--out", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    training, memory = (i + 1 for i, line in enumerate(lines) if line.startswith("format "))
    rows = []
    for i in range(1 + len(FORMATS)):
        cells = zip(TRAINING, lines[training + i].split(), strict=True)
        row = dict(zip(MEMORY, lines[memory + i].split(), strict=True))
        rows.append(row | dict(cells))
        assert rows[-1]["format"] == row["format"]
    return rows, picture, done.stderr


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the demo can be imported."""
    monkeypatch.syspath_prepend(str(DEMO.parent))


@new_quantizer_in_graph
def test_there_is_a_row_for_bf16_and_one_for_each_installed_format(quick) -> None:
    rows, _, _ = quick
    assert FORMATS
    assert [row["format"] for row in rows] == ["bf16", *FORMATS]


@new_quantizer_in_graph
def test_each_format_is_one_graph_without_breaks_and_recompiles(quick) -> None:
    rows, _, _ = quick
    counts = {(row["graphs"], row["breaks"], row["recompiles"]) for row in rows}
    assert counts == {("1", "0", "0")}


@new_quantizer_in_graph
@pytest.mark.parametrize("name", FORMATS)
def test_inductor_compiles_a_layer_inside_a_region_as_the_demo_has_it(name: str) -> None:
    torch.manual_seed(0)
    layer = te_linear.Linear(64, 64, recipe=name, dtype=torch.bfloat16)
    region = torch.compiler.nested_compile_region(lambda x: layer(x))
    x = torch.randn(64, 64, dtype=torch.bfloat16)

    def step(fn) -> list[torch.Tensor]:
        torch.manual_seed(1)  # a format may round stochastically
        leaf = x.detach().requires_grad_()
        layer.zero_grad()
        fn(leaf).square().sum().backward()
        return [leaf.grad, layer.weight.grad]

    with count_compiles() as counted:
        found = step(torch.compile(lambda x: region(x), fullgraph=True, dynamic=False))
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
    for a, b in zip(found, step(layer), strict=True):
        # sums in another order, and roundings to bfloat16
        torch.testing.assert_close(a, b, rtol=2.0**-6, atol=2.0**-6 * float(b.abs().max()))


@new_quantizer_in_graph
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


@new_quantizer_in_graph
def test_the_loss_falls_and_stays_within_the_stated_distance_of_bf16(quick) -> None:
    rows, _, _ = quick
    for row in rows:
        assert 5.0 < float(row["first"]) < 6.5
        assert float(row["last"]) < float(row["first"]) - 1.0
    assert (rows[0]["distance"], rows[0]["stated"]) == ("-", "-")
    for row in rows[1:]:
        assert 0.0 < float(row["distance"]) < float(row["stated"]) <= 0.2


def test_distances_are_stated_for_the_sizes_they_were_seen_at(examples: None) -> None:
    from gpt_checks import stated_distance
    from train_gpt import parse

    assert all(stated_distance(name) is not None for name in FORMATS)
    for arguments in ([], ["--quick"], ["--seed", "7"]):
        assert parse(arguments).has_stated_distances
    for arguments in (["--steps", "20"], ["--quick", "--width", "64"], ["--lr", "1"]):
        assert not parse(arguments).has_stated_distances


def test_distance_is_that_of_the_curves_where_they_are_farthest(examples: None) -> None:
    from gpt_checks import distance

    flat = [2.0] * 100
    assert distance(flat, flat) == 0.0
    assert distance([2.0] * 90 + [2.5] * 10, flat) == pytest.approx(0.5)
    # one step is no curve: it is averaged with the two on either side
    assert distance([2.0] * 50 + [1.5] + [2.0] * 49, flat) == pytest.approx(0.1)


def test_each_broken_claim_is_a_sentence(examples: None) -> None:
    from gpt_bytes import LinearBytes
    from gpt_checks import faults
    from gpt_report import Result
    from gpt_training import Training

    def result(name: str, losses: list[float], graphs: int = 1, saved: int = 20) -> Result:
        return Result(
            name=name,
            planned=LinearBytes(weights=10, saved=20),
            measured=LinearBytes(weights=10, saved=saved),
            training=Training(
                losses=losses,
                first_step_seconds=1.0,
                tokens_per_second=1.0,
                graphs=graphs,
                graph_breaks=0,
                recompiles=graphs - 1,
            ),
            stated=None if name == "bf16" else 0.1,
        )

    good = [result("bf16", [3.0, 2.0]), result("near", [3.0, 2.05])]
    assert faults(good) == []
    assert faults([*good, result("far", [3.0, 2.25]), result("nan", [3.0, float("nan")])]) == [
        "far: the loss is up to 0.250 nats a byte from that of bf16, stated are 0.1",
        "nan: a loss is not finite",
    ]
    assert faults(
        [*good, result("twice", [3.0, 2.0], graphs=2), result("fat", [3.0, 2.0], 1, 21)]
    ) == [
        "twice: must be one graph without breaks and recompiles, got 2 graphs, 0 breaks, "
        "1 recompiles",
        "fat: prototypes plan 20 bytes of saved tensors, a forward holds 21",
    ]


@new_quantizer_in_graph
def test_a_broken_claim_is_printed_and_exit_code_1(
    examples: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import gpt_checks
    from train_gpt import main

    monkeypatch.setattr(gpt_checks, "STATED", dict.fromkeys(gpt_checks.STATED, 1e-6))
    name = "fp8_current" if "fp8_current" in FORMATS else FORMATS[0]
    assert main(["--quick", "--formats", name, "--out", str(tmp_path / "x.png")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"train_gpt.py: FAILED: {name}: the loss is up to 0.0")
    assert last.endswith(" nats a byte from that of bf16, stated are 1e-06")


@new_quantizer_in_graph
def test_the_picture_is_a_png(quick) -> None:
    _, picture, _ = quick
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@new_quantizer_in_graph
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


def test_no_compiler_at_all_says_how_to_do_without() -> None:
    done = run("--quick", "--backend", "inductor", CXX="no-such-compiler")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "train_gpt.py: error: torch.compile needs a C++ compiler; install g++, or pass "
        "--backend aot_eager\n"
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
