# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT in bf16 and in every installed format, and compare them.

    pip install te-proto te-linear te-mxfp8 matplotlib tqdm
    python examples/train_gpt.py

The model is the same for all: same weights at the start, same batches, only the linear layers of
its blocks differ. A format takes part by being installed; this program knows none by name.

Prints what training and torch.compile did, and the bytes that prototypes predict beside those that
a run holds. Draws the loss curves. Each format must be one graph without breaks and recompiles,
take the bytes that were planned, and stay within a stated distance of bf16; README.md beside this
file says which and why. Exit status: 0; 1 if a format broke one of these, with a line on stderr
for each; 2 if an argument or an installation is at fault, in one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpt_bytes import LinearBytes
    from gpt_model import GPT, LinearFactory

# torch and all that needs it are imported once the arguments are known to be right

NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
    "te_proto": "te-proto",
    "te_linear": "te-linear",
}
"""Import name of what this program needs -> what to ``pip install``."""

SIZES = {"steps": 300, "layers": 2, "width": 128, "context": 64, "batch": 16}
QUICK = {"steps": 8, "layers": 1, "width": 128, "context": 64, "batch": 2}
LEARNING_RATE = 4e-3
BACKENDS = ("inductor", "aot_eager")
"""What torch.compile hands its graph to; the second runs it as it is, and is there in seconds."""


class UserError(Exception):
    """What the user has to put right; its text is the line that is printed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments, checked one by one.

    Attributes:
        formats: names asked for, or None for all that are installed.
        text: path of the training text, or None for Python's own help topics.
        out: path of the picture.
        steps: optimizer steps.
        layers: blocks of the model.
        width: channels of the residual stream.
        context: bytes in a sequence.
        batch: sequences in a batch.
        lr: peak of the learning rate.
        seed: of weights and batches.
        threads: CPU threads; more than one gains a model this small little, and costs it much where
            other programs want the same cores.
        backend: of torch.compile, one of :data:`BACKENDS`.
    """

    formats: list[str] | None
    text: Path | None
    out: Path
    steps: int
    layers: int
    width: int
    context: int
    batch: int
    lr: float
    seed: int
    threads: int
    backend: str

    @property
    def has_stated_distances(self) -> bool:
        """Whether this is a run for which distances to bf16 are stated: with any seed."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return sizes in (SIZES, QUICK) and self.lr == LEARNING_RATE and self.text is None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _at_least(low: int) -> type[int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            msg = f"must be a whole number >= {low}, got {text!r}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return parse  # type: ignore[return-value]  # argparse takes any callable


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        msg = f"must be a number > 0, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return value


def parse(arguments: Sequence[str] | None) -> Options:
    """Return the options that ``arguments`` stand for.

    Raises:
        UserError: an argument is not one this program has, or not a value it takes.
    """
    summary, _, details = (__doc__ or "").partition("\n")
    parser = _Parser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    default = "default: %(default)s"
    add("--formats", metavar="A,B", help="formats to train in; default: all installed")
    add("--text", type=Path, help="file to train on; default: Python's help topics")
    add("--out", type=Path, default=Path("demo-loss.png"), help=f"picture to write; {default}")
    for name, meaning in (
        ("steps", "optimizer steps"),
        ("layers", "blocks of the model"),
        ("width", "channels, a multiple of 32"),
        ("context", "bytes in a sequence"),
        ("batch", "sequences in a batch"),
    ):
        sizes = f"default: {SIZES[name]}, with --quick {QUICK[name]}"
        add(f"--{name}", type=_at_least(1), metavar="N", help=f"{meaning}; {sizes}")
    add(
        "--lr",
        type=_rate,
        default=LEARNING_RATE,
        metavar="X",
        help=f"peak learning rate; {default}",
    )
    add("--seed", type=_at_least(0), default=0, metavar="N", help=f"of the run; {default}")
    add("--threads", type=_at_least(1), default=1, metavar="N", help=f"CPU threads; {default}")
    add(
        "--backend",
        choices=BACKENDS,
        help=f"of torch.compile; default: {BACKENDS[0]}, with --quick {BACKENDS[1]}",
    )
    add("--quick", action="store_true", help="a tiny run, to see that it works")
    given = vars(parser.parse_args(arguments))
    quick = given.pop("quick")
    defaults = {**(QUICK if quick else SIZES), "backend": BACKENDS[quick]}
    given.update({name: value for name, value in defaults.items() if given[name] is None})
    if given["formats"] is not None:
        given["formats"] = [name.strip() for name in given["formats"].split(",") if name.strip()]
    return Options(**given)


def read_text(path: Path | None) -> bytes:
    """Return the training text: a file's bytes, or all help topics of the Python that runs.

    Raises:
        UserError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics  # large, and not needed for another text

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return path.read_bytes()
    except OSError as error:
        msg = f"argument --text: cannot read {str(path)!r}, {error.strerror}"
        raise UserError(msg) from error


def check(options: Options, text: bytes) -> None:
    """Refuse what would only fail after minutes of training.

    Raises:
        UserError: arguments do not fit together or to this machine.
    """
    if options.width % 32:
        near = -(-options.width // 32) * 32
        msg = (
            f"argument --width: must be a multiple of 32, one head, got {options.width}; use {near}"
        )
        raise UserError(msg)
    if len(text) < options.context + 2:
        msg = (
            f"argument --text: must hold at least context + 2 = {options.context + 2} bytes, "
            f"got {len(text)}; use a longer text or a smaller --context"
        )
        raise UserError(msg)
    if options.out.is_dir() or not options.out.parent.is_dir():
        msg = f"argument --out: must be a file in a folder that exists, got {str(options.out)!r}"
        raise UserError(msg)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        install = " ".join(NEEDED[name] for name in missing)
        msg = f"cannot import {', '.join(missing)}; pip install {install}"
        raise UserError(msg)


def choose_formats(wanted: list[str] | None) -> list[str]:
    """Return the formats to train in.

    Raises:
        UserError: one is not installed, or none is.
    """
    import te_proto

    installed = te_proto.available_formats()
    if not installed:
        msg = "no format is installed; pip install one, such as te-mxfp8"
        raise UserError(msg)
    if wanted is None:
        return list(installed)
    if not wanted:
        msg = f"argument --formats: must name a format, installed are {', '.join(installed)}"
        raise UserError(msg)
    if unknown := [name for name in wanted if name not in installed]:
        install = " ".join(f"te-{name.replace('_', '-')}" for name in unknown)
        msg = (
            f"argument --formats: {', '.join(unknown)} not installed, installed are "
            f"{', '.join(installed)}; pip install {install}"
        )
        raise UserError(msg)
    return list(dict.fromkeys(wanted))


def check_compiler(options: Options) -> None:
    """Refuse to start where Inductor would find no compiler.

    Raises:
        UserError: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if options.backend == "inductor":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            msg = "torch.compile needs a C++ compiler; install g++, or pass --backend aot_eager"
            raise UserError(msg) from error


def make_models(
    options: Options, formats: list[str]
) -> tuple[dict[str, GPT], dict[str, LinearBytes]]:
    """Return the model of the baseline and of each format, and the bytes each is planned to take.

    All before the first is trained: a shape that a format cannot hold is found in seconds.

    Raises:
        UserError: a format cannot be loaded or cannot hold this model.
    """
    import functools

    from gpt_bytes import planned_bytes
    from gpt_model import GPT, Bf16Linear
    from gpt_report import BASELINE

    import te_linear
    from te_proto.errors import TeError

    factories: dict[str, LinearFactory] = {BASELINE: Bf16Linear}
    for name in formats:
        factories[name] = functools.partial(te_linear.Linear, recipe=name)
    models, planned = {}, {}
    size = {"layers": options.layers, "width": options.width, "context": options.context}
    try:
        for name, factory in factories.items():
            models[name] = GPT(linear=factory, **size)
            models[name].initialize(options.seed)
            planned[name] = planned_bytes(
                models[name], batch=options.batch, context=options.context
            )
    except TeError as error:
        raise UserError(str(error)) from error
    return models, planned


def run(options: Options, text: bytes, formats: list[str]) -> int:
    """Train and report; return the exit status.

    Raises:
        UserError: a format cannot be loaded or cannot hold this model.
    """
    import torch
    from gpt_bytes import measured_bytes
    from gpt_checks import faults, stated_distance
    from gpt_report import BASELINE, Result, draw, tables
    from gpt_training import Batches, train

    torch.set_num_threads(options.threads)
    batches = Batches(
        text=text,
        steps=options.steps,
        batch=options.batch,
        context=options.context,
        seed=options.seed,
    )
    models, planned = make_models(options, formats)
    parameters = sum(p.numel() for p in models[BASELINE].parameters())
    title = (
        f"GPT of {options.layers} layers, width {options.width}, {parameters:,} parameters; "
        f"{options.steps} steps of {options.batch} x {options.context} bytes"
    )
    print(f"{title} out of {len(text):,}", f"Formats: {', '.join(models)}", sep="\n", flush=True)
    judged = formats if options.has_stated_distances else []
    results = []
    for name, model in models.items():
        measured = measured_bytes(model, *next(iter(batches)))
        training = train(name, model, batches, lr=options.lr, backend=options.backend)
        results.append(
            Result(
                name=name,
                planned=planned[name],
                measured=measured,
                training=training,
                stated=stated_distance(name) if name in judged else None,
            )
        )
    draw(results, title, options.out)
    print("", tables(results), "", f"Loss curves: {options.out}", sep="\n", flush=True)
    wrong = faults(results)
    for sentence in wrong:
        print(f"train_gpt.py: FAILED: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    try:
        options = parse(arguments)
        text = read_text(options.text)
        check(options, text)
        formats = choose_formats(options.formats)
        check_compiler(options)
        return run(options, text, formats)
    except UserError as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
