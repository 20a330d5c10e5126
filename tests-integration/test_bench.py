# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_proto.numerics.formats import E2M1, E4M3

# benchmarks are run from the root of the repository, not installed
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import run
from benchmarks.cases import CASES, DEFAULT, Case
from benchmarks.check import Bound, WrongResultError, bound_element, check_same_bits
from benchmarks.report import header, lines
from benchmarks.subjects import PEERS, Subject, our_bound, our_quantizer, our_subject
from benchmarks.timing import Effort, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[1]
FORMATS = te_proto.available_formats()
INSTALLED = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in FORMATS
    for case in CASES.get(name, DEFAULT)
]
X = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=ROOT,
    )


class Clock:
    """Seconds that pass only in the actions it makes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def action(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        """An action whose n-th call takes ``seconds(n)``."""

        def act() -> None:
            self.now += seconds(self.calls.count(name))
            self.calls.append(name)

        return act


class Forbidden(Stopwatch):
    def time(self, actions: Mapping[str, Any], copy: Any, nbytes: int) -> Any:
        pytest.fail("timed what it should have refused")


QUICK = Effort(rounds=3, attempts=4, sample=0.0, look=0.0, patience=1e9)
CALIBRATION = 3  # calls of an action before the first round


# -- a run ---------------------------------------------------------------------------------------


def test_a_run_writes_what_it_prints_for_each_case_of_each_installed_format(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    done = bench("--quick", "--modes", "eager", "--shapes", "128x256", "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    result = json.loads(path.read_text())
    wanted = [
        (name, case.name, op)
        for name in FORMATS
        for case in CASES.get(name, DEFAULT)
        for op in (("quantize",) if case.columnwise else ("quantize", "dequantize"))
    ]
    rows = result["rows"]
    assert [(row["format"], row["case"], row["op"]) for row in rows] == wanted
    for row in rows:
        assert (row["shape"], row["mode"], row["failure"]) == ([128, 256], "eager", None)
        assert row["ms"] > 0
        assert row["ours_over_copy"] == pytest.approx(row["ms"] / row["copy_ms"])
        assert re.search(rf"{row['format']} .*{row['op']} +{row['ms']:.3f} ", done.stdout)
    assert result["machine"]["heap_kept"] is (sys.platform == "linux")
    assert result["versions"]["torch"] == version("torch")  # a CUDA build adds to __version__


def test_bytes_of_a_row_are_those_of_the_plain_and_the_quantized_tensor() -> None:
    row = run.measure_one("mxfp8", CASES["mxfp8"][0], X, "eager", "quantize", Stopwatch(QUICK))
    assert row.nbytes == 128 * 256 * 2 + 128 * 256 + 128 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "mxfp9"], "--formats must be among those installed"),
        (["--shapes", "4096"], "must read like 4096x4096, got '4096'"),
        (["--shapes", "0x32"], "must read like 4096x4096, got '0x32'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), INSTALLED)
def test_a_case_is_a_quantizer_of_the_recipe_whose_values_are_within_the_bound(
    name: str, case: Case
) -> None:
    quantizer = our_quantizer(name, case)
    assert (quantizer.rowwise, quantizer.columnwise) == (True, case.columnwise)
    run.prepare(
        our_subject(quantizer, case), our_bound(quantizer, case), X, "eager", "quantize", exact=True
    )


def test_every_peer_of_the_table_exists() -> None:
    assert {peer for cases in CASES.values() for case in cases for peer in case.peers} == set(PEERS)


def test_a_format_without_an_entry_is_timed_with_its_defaults(monkeypatch) -> None:
    monkeypatch.setattr(run, "CASES", {})
    rows = list(run.measure(["mxfp8"], [(32, 64)], ["eager"], Stopwatch(QUICK)))
    assert [(row.case, row.op, row.failure) for row in rows] == [
        ("rowwise", "quantize", None),
        ("rowwise", "dequantize", None),
        ("both planes", "quantize", None),
    ]


# -- what may be timed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        pytest.param(1.0 + 2**-4, True, id="half-a-step"),
        pytest.param(1.0 + 2**-4 + 2**-6, False, id="more-than-half"),
        pytest.param(float("nan"), False, id="nan"),
        pytest.param(float("inf"), False, id="inf"),
        pytest.param(0.0, False, id="lost"),
    ],
)
def test_a_value_may_be_half_a_step_from_the_input(value: float, accepted: bool) -> None:
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    values = x.clone()
    values[1, 7] = value
    bound = Bound(element=E4M3, block=(1, 32))
    if accepted:
        bound.check(x, values)
    else:
        with pytest.raises(WrongResultError, match="1 of 128 rowwise values are further from"):
            bound.check(x, values)


def test_small_values_are_bounded_by_the_maximum_of_their_own_block() -> None:
    x = torch.full((2, 64), 2.0**-20, dtype=torch.bfloat16)
    x[0, 0] = 448.0
    values = x.clone()
    values[0, :32] = torch.tensor([448.0] + [0.0] * 31)
    Bound(element=E4M3, block=(1, 32)).check(x, values)
    values[0, 32] = 0.0
    with pytest.raises(WrongResultError, match="1 of 128 rowwise values"):
        Bound(element=E4M3, block=(1, 32)).check(x, values)
    Bound(element=E4M3, block=(0, 0)).check(x, values)


def test_columnwise_blocks_run_along_the_rows_and_may_be_ragged() -> None:
    x = torch.full((48, 2), 2.0**-20, dtype=torch.bfloat16)
    x[40, 1] = 448.0
    values = x.clone()
    values[32:40, 1] = 0.0
    Bound(element=E4M3, block=(1, 32)).check(x, values, columnwise=True)
    values[0, 1] = 0.0
    with pytest.raises(WrongResultError, match="1 of 96 columnwise values"):
        Bound(element=E4M3, block=(1, 32)).check(x, values, columnwise=True)


def test_an_element_format_that_is_not_known_is_held_to_the_coarsest() -> None:
    assert bound_element("int8") is E2M1
    assert bound_element("e4m3") is E4M3


def test_bytes_that_differ_are_counted_and_named() -> None:
    made = our_quantizer("mxfp8", DEFAULT[0]).quantize(X)
    other = made.clone()
    other.rowwise_data[3, 5] ^= 1
    check_same_bits(made, made.clone())
    with pytest.raises(WrongResultError, match=r"^1 of 32768 bytes of compiled rowwise_data are"):
        check_same_bits(made, other)


@pytest.mark.parametrize("plane", ["rowwise", "columnwise"])
def test_a_wrong_plane_of_ours_is_shown_and_not_timed(monkeypatch, plane: str) -> None:
    def broken(*args: Any) -> Subject:
        subject = our_subject(*args)
        key = "dequantize" if plane == "rowwise" else "columnwise_values"
        return replace(subject, **{key: lambda t: getattr(subject, key)(t) * 1.2})

    monkeypatch.setattr(run, "our_subject", broken)
    case = replace(DEFAULT[1], peers=("MXTensor rceil",))
    row = run.measure_one("mxfp8", case, X, "eager", "quantize", Forbidden(QUICK))
    assert row.ms is None
    assert re.fullmatch(
        rf"\d+ of 32768 {plane} values are further from the input than e4m3 rounds, by up to "
        r"0\.\d+ of the block's maximum",
        row.failure or "",
    )
    assert next(iter(lines(row))).endswith(f"fails: {row.failure}")


def test_a_compiled_result_that_is_not_eager_s_is_not_timed(monkeypatch) -> None:
    def compile_wrongly(function: Any, **options: Any) -> Any:
        return lambda x: function(-x)

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    row = run.measure_one("mxfp8", DEFAULT[0], X, "compiled", "quantize", Forbidden(QUICK))
    assert re.match(r"\d+ of 32768 bytes of compiled rowwise_data are not", row.failure or "")


def test_a_shape_the_format_refuses_is_a_row_with_its_message() -> None:
    row = run.measure_one("mxfp8", DEFAULT[0], X[:, :40], "eager", "quantize", Forbidden(QUICK))
    assert row.failure == (
        "mxfp8: the last axis of x must be a multiple of 32, got 40 in shape (128, 40); "
        "pad it to 64 first"
    )


def test_a_peer_that_fails_is_shown_with_its_first_line_beside_one_that_works(monkeypatch) -> None:
    def fails() -> Any:
        msg = "no such cast\nand forty lines more"
        raise NotImplementedError(msg)

    ours = our_subject(our_quantizer("mxfp8", DEFAULT[0]), DEFAULT[0])
    works = (ours.quantize, ours.dequantize)
    off = (ours.quantize, lambda t: t.dequantize() * 1.2)
    for name, peer in (("fails", fails), ("works", lambda: works), ("off", lambda: off)):
        monkeypatch.setitem(PEERS, name, peer)
    monkeypatch.setattr(run, "has_peers", lambda: True)
    case = replace(DEFAULT[0], peers=("fails", "works", "off"))
    row = run.measure_one("mxfp8", case, X, "eager", "quantize", Stopwatch(QUICK))
    broken, timed, wrong = row.peers
    assert (broken.failure, broken.ms) == ("NotImplementedError: no such cast", None)
    assert wrong.ms is None
    assert "values are further from the input than e4m3 rounds" in (wrong.failure or "")
    assert row.ms is not None
    assert timed.ms is not None
    assert timed.ours_over_peer == pytest.approx(row.ms / timed.ms)
    column = header().index("peer ")
    assert [line[column:].split()[:2] for line in lines(row)] == [
        ["fails", "fails:"],
        ["works", f"{timed.ms:.3f}"],
        ["off", "fails:"],
    ]


# -- timing --------------------------------------------------------------------------------------


def test_rounds_beside_a_slow_copy_do_not_count() -> None:
    clock = Clock()
    # the copies of rounds 0 and 2, two a round, are slow; so is what runs beside them
    slow = {CALIBRATION + i for i in (1, 4)}
    copy = clock.action("copy", lambda n: 2.0 if n in slow else 1.0)
    ours = clock.action(
        "ours", lambda n: 90.0 if n in {CALIBRATION, CALIBRATION + 2} else 5.0 + n / 8
    )
    timing = Stopwatch(QUICK, clock, clock.sleep).time({"ours": ours}, copy, 8)
    assert timing.seconds == {"ours": 5.0 + (CALIBRATION + 3) / 8}
    assert (timing.copy, timing.rounds, timing.discarded, timing.disturbed) == (1.0, 3, 2, False)
    assert clock.slept == pytest.approx(2 * QUICK.pause)


def test_a_round_with_a_slow_call_does_not_count_for_anybody() -> None:
    clock = Clock()
    a = clock.action("a", lambda n: 5.0 if n == CALIBRATION + 1 else 2.0)
    b = clock.action("b", lambda n: 9.0 if n == CALIBRATION + 1 else 4.0 + n / 100)
    timing = Stopwatch(QUICK, clock, clock.sleep).time(
        {"a": a, "b": b}, clock.action("copy", lambda n: 1.0), 8
    )
    assert timing.seconds == {"a": 2.0, "b": pytest.approx(4.05)}  # of rounds 0, 2 and 3
    assert (timing.rounds, timing.discarded, timing.disturbed) == (3, 1, False)


def test_a_quicker_copy_later_discards_rounds_made_before_it() -> None:
    clock = Clock()
    copy = clock.action("copy", lambda n: 2.0 if n < CALIBRATION + 4 else 1.0)
    ours = clock.action("ours", lambda n: 9.0 if n < CALIBRATION + 2 else 5.0)
    timing = Stopwatch(QUICK, clock, clock.sleep).time({"ours": ours}, copy, 8)
    assert (timing.seconds, timing.discarded) == ({"ours": 5.0}, 2)


def test_the_quickest_copy_is_remembered_for_its_size_alone() -> None:
    clock = Clock()
    stopwatch = Stopwatch(QUICK, clock, clock.sleep)
    ours = clock.action("ours", lambda n: 5.0)
    stopwatch.time({"ours": ours}, clock.action("quick", lambda n: 1.0), 8)
    assert stopwatch.time({"ours": ours}, clock.action("slow", lambda n: 2.0), 8).disturbed
    assert not stopwatch.time({"ours": ours}, clock.action("large", lambda n: 2.0), 16).disturbed


def test_a_machine_that_stays_busy_ends_in_the_quietest_rounds_and_says_so() -> None:
    clock = Clock()
    stopwatch = Stopwatch(QUICK, clock, clock.sleep)
    stopwatch.time({"x": clock.action("x", lambda n: 1.0)}, clock.action("c", lambda n: 1.0), 8)
    copy = clock.action("copy", lambda n: 10.0 - (n - CALIBRATION) / 10)
    ours = clock.action("ours", lambda n: 100.0 - (n - CALIBRATION))
    timing = stopwatch.time({"ours": ours}, copy, 8)
    assert (timing.rounds, timing.discarded, timing.disturbed) == (3, 9, True)
    assert timing.seconds == {"ours": 90.0}  # the middle one of 91, 90 and 89


def test_patience_ends_the_retries_but_not_the_rounds() -> None:
    clock = Clock()
    stopwatch = Stopwatch(replace(QUICK, patience=20.0), clock, clock.sleep)
    stopwatch.time({"x": clock.action("x", lambda n: 1.0)}, clock.action("c", lambda n: 1.0), 8)
    slow = clock.action("copy", lambda n: 9.0)
    timing = stopwatch.time({"ours": clock.action("ours", lambda n: 50.0)}, slow, 8)
    assert (timing.rounds, timing.discarded, timing.disturbed) == (3, 0, True)


def test_actions_take_turns_in_rotating_order_with_a_copy_around_each() -> None:
    clock = Clock()
    names = ("a", "b", "copy")
    a, b, copy = (clock.action(name, lambda n: 1.0) for name in names)
    Stopwatch(QUICK, clock, clock.sleep).time({"a": a, "b": b}, copy, 8)
    played = clock.calls[3 * CALIBRATION :]
    assert played == [
        *("copy", "a", "copy", "b", "copy"),
        *("copy", "b", "copy", "a", "copy"),
        *("copy", "a", "copy", "b", "copy"),
    ]


def test_a_short_call_is_repeated_until_the_sample_is_long_enough() -> None:
    clock = Clock()
    ours = clock.action("ours", lambda n: 0.5)
    copy = clock.action("copy", lambda n: 3.0)
    timing = Stopwatch(replace(QUICK, sample=2.0), clock, clock.sleep).time({"ours": ours}, copy, 8)
    assert timing.seconds == {"ours": 0.5}
    calibration = 1 + 20
    assert clock.calls.count("ours") == calibration + 3 * 4


def test_a_machine_that_is_busy_from_the_first_round_is_seen_by_a_quick_copy_before_it() -> None:
    clock = Clock()
    copy = clock.action("copy", lambda n: 1.0 if n == 40 else 8.0)
    effort = replace(QUICK, look=400.0)
    timing = Stopwatch(effort, clock, clock.sleep).time(
        {"ours": clock.action("ours", lambda n: 50.0)}, copy, 8
    )
    assert timing.disturbed
