# SPDX-License-Identifier: Apache-2.0
"""From cases to rows: check what is to be timed, then time it beside its peers and a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases import CASES, DEFAULT
from benchmarks.check import WrongResultError, check_same_bits
from benchmarks.report import PeerResult, Row
from benchmarks.subjects import has_peers, our_bound, our_quantizer, our_subject, peer_subject
from te_proto.errors import TeError
from te_proto.proto import TensorProto

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from benchmarks.cases import Case
    from benchmarks.check import Bound
    from benchmarks.subjects import Subject
    from benchmarks.timing import Action, Stopwatch

OPS = ("quantize", "dequantize")


def measure(
    formats: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    modes: Sequence[str],
    stopwatch: Stopwatch,
) -> Iterator[Row]:
    """Yield a row for each case, shape, mode and operation; what fails is a row too."""
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        for name in formats:
            for case in CASES.get(name, DEFAULT):
                for mode in modes:
                    for op in OPS[:1] if case.columnwise else OPS:
                        with torch.no_grad():
                            yield measure_one(name, case, x, mode, op, stopwatch)


def measure_one(name: str, case: Case, x: Tensor, mode: str, op: str, stopwatch: Stopwatch) -> Row:
    """Return the row of one operation."""
    torch.compiler.reset()  # the graphs of other rows would be tried first, and count as recompiles
    m, k = x.shape
    row = Row(format=name, case=case.name, shape=(m, k), mode=mode, op=op)
    try:
        quantizer = our_quantizer(name, case)
        bound = our_bound(quantizer, case)
        ours = prepare(our_subject(quantizer, case), bound, x, mode, op, exact=True)
    except Exception as error:  # a plugin's fault is its own row, and hides no other
        return replace(row, failure=first_line(error))
    peers = {
        peer: _prepare_peer(peer, case, bound, x, mode, op)
        for peer in (case.peers if has_peers() else ())
    }
    actions = {
        "ours": ours,
        **{p: ready for p, ready in peers.items() if not isinstance(ready, str)},
    }
    proto = TensorProto(shape=(m, k), dtype=x.dtype, quantizer=quantizer, device=x.device)
    source = torch.ones((x.nbytes + proto.nbytes) // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    timing = stopwatch.time(actions, lambda: target.copy_(source), source.nbytes)
    taken = timing.seconds["ours"]
    return replace(
        row,
        nbytes=x.nbytes + proto.nbytes,
        ms=taken * 1e3,
        copy_ms=timing.copy * 1e3,
        ours_over_copy=taken / timing.copy,
        peers=tuple(
            _peer_result(
                peer + (", 2 casts" if case.columnwise else ""),
                ready,
                taken,
                timing.seconds.get(peer),
            )
            for peer, ready in peers.items()
        ),
        rounds=timing.rounds,
        discarded=timing.discarded,
        disturbed=timing.disturbed,
    )


def prepare(
    subject: Subject, bound: Bound, x: Tensor, mode: str, op: str, *, exact: bool
) -> Action:
    """Return the operation of ``subject``, checked, ready to be timed.

    Args:
        subject: whose operation.
        bound: error that its values may have.
        x: the input.
        mode: one of ``cases.MODES``.
        op: one of :data:`OPS`.
        exact: compiled must give the bytes of eager. torchao does not promise that.

    Raises:
        WrongResultError: a value is further from ``x`` than the format's error, or compiled and
            eager differ.
        Exception: whatever the subject raises.
    """
    held = subject.quantize(x)
    _check_planes(subject, bound, x, held)
    quantizes = op == "quantize"
    function: Callable[[Any], Any] = subject.quantize if quantizes else subject.dequantize
    argument = x if quantizes else held
    if mode == "compiled":
        eager = function(argument)
        function = torch.compile(function, fullgraph=True, dynamic=False)
        made = function(argument)
        if exact:
            check_same_bits(made, eager)
        elif quantizes:
            _check_planes(subject, bound, x, made)
        else:
            bound.check(x, made)
    return lambda: function(argument)


def _prepare_peer(
    peer: str, case: Case, bound: Bound, x: Tensor, mode: str, op: str
) -> Action | str:
    """Return the operation of ``peer``, or why it cannot be timed."""
    try:
        subject = peer_subject(peer, columnwise=case.columnwise)
        return prepare(subject, bound, x, mode, op, exact=False)
    except Exception as error:  # shown, not hidden: it is what a user of the peer meets
        return first_line(error)


def _peer_result(name: str, ready: Action | str, ours: float, peer: float | None) -> PeerResult:
    if isinstance(ready, str):
        return PeerResult(name=name, failure=ready)
    assert peer is not None  # what was ready was timed
    return PeerResult(name=name, ms=peer * 1e3, ours_over_peer=ours / peer)


def _check_planes(subject: Subject, bound: Bound, x: Tensor, held: Any) -> None:
    bound.check(x, subject.dequantize(held))
    if subject.columnwise_values is not None:
        bound.check(x, subject.columnwise_values(held), columnwise=True)


def first_line(error: Exception) -> str:
    """Return the kind of ``error`` and the first line of what it says."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, (TeError, WrongResultError)):
        return text
    return f"{type(error).__name__}: {text}"
