# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallel layers of real processes, against the layer of one process.

Ranks are started once for each size; each compares its part with the layer on the whole data, which
it computes too, and prints what differed. Operands are those of one process bit for bit. Products
are sums of the same terms in another order, some of them rounded to the dtype between ranks.
"""

from __future__ import annotations

import itertools
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import te_proto
from te_linear import Linear, execute
from te_proto import Recipe
from te_proto.storage import QuantizedStorage
from te_proto.testing import new_quantizer_in_graph, run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed"
)

FORMATS = te_proto.available_formats()
ROLES = ("input", "weight", "grad_output")
LAYERS = [f"{mode}{sp}" for mode in ("column", "row") for sp in ("", "-sequence")]
EAGER = [
    f"{name}/{layer}/{mode}"
    for name, layer, mode in itertools.product(FORMATS, LAYERS, ("traced", "opaque"))
]
COMPILED = [
    *(f"{name}/{layer}/opaque-graph" for name in FORMATS for layer in ("column-sequence", "row")),
    *(f"{name}/{layer}/traced-graph" for name in FORMATS[:2] for layer in LAYERS[1::2]),
]
OTHERS = [
    "unaligned",
    *(f"sent/{n}/{layer}" for n in FORMATS for layer in LAYERS[1::2]),
    *(f"sent-plain/{layer}" for layer in LAYERS[1::2]),
]
CASES = {2: [*EAGER, *COMPILED, *OTHERS], 4: EAGER}
M, K, N = 128, 128, 128  # of each rank: whole blocks, and scale tiles, of every format


# -- what a rank does -----------------------------------------------------------------------------


def recipe(name: str, *, reduces: bool) -> Recipe:
    """Return the default without chance, whose tensor-wide scales are those of all ranks."""
    default = te_proto.get_recipe(name)
    quantizers = {}
    for role in ROLES:
        quantizer = getattr(default, role)
        options = {"with_amax_reduction": reduces, "stochastic_rounding": False}
        mine = {option: value for option, value in options.items() if hasattr(quantizer, option)}
        quantizers[role] = quantizer.replace(**mine)
    return Recipe(name=name, **quantizers)


class Rank:
    """One of the processes, and its part of every tensor."""

    def __init__(self, rank: int, size: int, group: str) -> None:
        self.rank, self.size, self.group = rank, size, group

    def part(self, x: Tensor, axis: int) -> Tensor:
        return x.detach().chunk(self.size, axis)[self.rank].contiguous()

    def layers(self, name: str, layer: str, mode: str) -> tuple[Linear, Linear]:
        """Return the layer of one process and this rank's part of it."""
        torch.manual_seed(0)
        kind, _, sequence = layer.partition("-")
        sizes = (K * self.size, N * self.size)
        whole = Linear(*sizes, recipe=recipe(name, reduces=False), dtype=torch.bfloat16)
        mine = Linear(
            *sizes,
            recipe=recipe(name, reduces=True),
            dtype=torch.bfloat16,
            mode=mode,
            parallel_mode=kind,
            tp_size=self.size,
            tp_group=self.group,
            sequence_parallel=bool(sequence),
        )
        with torch.no_grad():
            column = kind == "column"
            mine.weight.copy_(self.part(whole.weight, 0 if column else 1))
            mine.bias.copy_(self.part(whole.bias, 0) if column else whole.bias)
        return whole, mine

    def axes(self, layer: str) -> tuple[int | None, int | None]:
        """Return the axes by which input and output of a layer are cut, None for whole ones."""
        first = 0 if layer.endswith("sequence") else None
        return (first, 1) if layer.startswith("column") else (1, first)

    def compare(self, name: str, layer: str, way: str) -> None:
        mode, _, graph = way.partition("-")
        whole, mine = self.layers(name, layer, mode)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(M * self.size, K * self.size, generator=g).bfloat16()
        dy = torch.randn(M * self.size, N * self.size, generator=g).bfloat16()
        in_axis, out_axis = self.axes(layer)
        my_x = x if in_axis is None else self.part(x, in_axis)
        my_dy = dy if out_axis is None else self.part(dy, out_axis)
        torch._dynamo.reset()
        run: Any = torch.compile(mine, fullgraph=True, backend="aot_eager") if graph else mine
        operands: list[dict[str, Tensor]] = []
        if way == "traced":
            record_operands(operands)
        found = step(run, mine, my_x, my_dy)
        of_rank, operands[:] = list(operands), []
        expected = step(whole, whole, x, dy)
        if way == "traced":
            execute.matmul = MATMUL
            self.same_operands(layer, of_rank, operands)
        column = layer.startswith("column")
        w_axis, b_axis = (0, 0) if column else (1, None)
        cuts = {"y": out_axis, "dx": in_axis, "dw": w_axis, "db": b_axis}
        bounds = self.bounds(whole, x, dy)
        for what, cut in cuts.items():
            a, b, bound = found[what], expected[what], bounds[what]
            if cut is not None:
                b, bound = self.part(b, cut), self.part(bound, cut)
            assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} is not {tuple(b.shape)}"
            off = ((a.double() - b.double()).abs() / bound).max().item()
            assert off <= 1.0, f"{what}: off by {off} of the bound"

    def bounds(self, layer: Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        """Return how far sums of the same products may be apart.

        Of n terms in float32, each of both sums is off by up to n u; then each of the ranks' parts
        is rounded to bfloat16, and so are their sums, the bias and the result.
        """

        def plane(value: Tensor, role: str, *, rowwise: bool) -> Tensor:
            quantizer = getattr(layer.config, role)
            quantizer = quantizer.with_usage(rowwise=rowwise, columnwise=not rowwise)
            values: Tensor = quantizer.quantize(value.detach()).dequantize(torch.float32).double()
            return values.abs()

        def bound(magnitude: Tensor, terms: int) -> Tensor:
            return magnitude * (2 * terms * 2.0**-24 + (self.size + 3) * 2.0**-8) + 1e-30

        w, b = layer.weight, layer.bias.detach().double().abs()
        y = plane(x, "input", rowwise=True) @ plane(w, "weight", rowwise=True).t() + b
        dx = plane(dy, "grad_output", rowwise=True) @ plane(w, "weight", rowwise=False)
        dw = plane(dy, "grad_output", rowwise=False).t() @ plane(x, "input", rowwise=False)
        terms = {"y": K * self.size, "dx": N * self.size, "dw": M * self.size}
        made = {"y": y, "dx": dx, "dw": dw, "db": dy.double().abs().sum(0)}
        return {what: bound(made[what], terms.get(what, M * self.size)) for what in made}

    def same_operands(self, layer: str, found: list[Any], expected: list[Any]) -> None:
        """Both operands of the three products, against the part of those of the whole."""
        column = layer.startswith("column")
        # axes of input, weight, gradient and weight, gradient and input by which they are cut
        cuts = (None, 0, 1, 0, 1, None) if column else (1, 1, None, 1, None, 1)
        assert len(found) == len(expected) == len(cuts)
        for at, (a, b, cut) in enumerate(zip(found, expected, cuts, strict=True)):
            part = b if cut is None else self.part(b, cut)
            assert torch.equal(a, part), f"operand {at} of the products differs"

    def sent(self, name: str, layer: str, rows: int = M) -> list[tuple[torch.dtype, int]]:
        """Return dtype and bytes of all that a step gathers, which must be all that it sends."""
        _, mine = self.layers(name, layer, "traced")
        column = layer.startswith("column")
        x = torch.randn(rows if column else rows * self.size, K * (self.size if column else 1))
        dy = torch.randn(rows * (self.size if column else 1), N * (1 if column else self.size))
        with Sent() as calls:
            step(mine, mine, x.bfloat16(), dy.bfloat16())
        return [(t, size) for op, t, size in calls.seen if op == "all_gather_into_tensor"]

    def check_sent(self, name: str, layer: str) -> None:
        _, mine = self.layers(name, layer, "traced")
        shape = (M, K * self.size) if layer.startswith("column") else (M * self.size, K)
        plan = mine.plan(torch.empty(shape, dtype=torch.bfloat16, requires_grad=True))
        if layer.startswith("column"):
            steps = [plan.input, plan.saved_input_operand]
            protos = [plan.input.local, plan.saved_input_operand.local]
        else:
            steps, protos = [plan.grad_output], [plan.grad_output.local]
        assert [s.gather for s in steps] == ["quantized"] * len(steps)
        sent = self.sent(name, layer)
        expected = [
            (spec.dtype, spec.nbytes)
            for s, proto in zip(steps, protos, strict=True)
            for spec, axis in zip(proto.inner_specs().values(), s.axes, strict=True)
            if axis is not None
        ]
        assert sent == expected, f"sent {sent}, expected {expected}"
        plain = M * K * self.size * 2 * len(steps)
        # codes of both usages, and a byte or four of scale for each block
        assert sum(size for _, size in sent) < 1.2 * plain

    def check_sent_plain(self, layer: str) -> None:
        rows = 32  # both planes would have padded scales
        sent = self.sent("nvfp4", layer, rows)
        size = rows * K * self.size * 2
        # the input again in backward
        count = 2 if layer.startswith("column") else 1
        assert sent == [(torch.bfloat16, size)] * count, f"sent {sent}"

    def check_unaligned(self) -> None:
        _, mine = self.layers("mxfp8", "column-sequence", "traced")
        x = torch.zeros(16, K * self.size, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(te_proto.errors.ShapeError) as raised:
            mine(x)
        assert f"must be a multiple of 32 x TP = {32 * self.size}" in str(raised.value)

    def run(self, case: str) -> None:
        kind, *rest = case.split("/")
        if kind == "unaligned":
            self.check_unaligned()
        elif kind == "sent":
            self.check_sent(*rest)
        elif kind == "sent-plain":
            self.check_sent_plain(*rest)
        else:
            self.compare(kind, *rest)


class Sent(TorchDispatchMode):
    """Names, dtypes and bytes of what collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and isinstance(args[0], Tensor):
            self.seen.append((func._opname, args[0].dtype, args[0].nbytes))
        return func(*args, **(kwargs or {}))


MATMUL = execute.matmul


def record_operands(seen: list[Any]) -> None:
    """Have products put the values of both operands, as matrices, into ``seen``."""

    def record(a: Any, b: Any, *, a_columnwise: bool, b_columnwise: bool) -> Tensor:
        for operand, columnwise in ((a, a_columnwise), (b, b_columnwise)):
            drop = {"rowwise" if columnwise else "columnwise": False}
            seen.append(QuantizedStorage.with_usage(operand, **drop).dequantize(torch.float32))
        return MATMUL(a, b, a_columnwise=a_columnwise, b_columnwise=b_columnwise)

    execute.matmul = record


def step(run: Any, layer: Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


def attempt(me: Rank, case: str) -> str:
    try:
        me.run(case)
    except Exception:
        return traceback.format_exc()  # shown by the test of the case
    return ""


def main(rank: int, size: int, group: str) -> None:
    me = Rank(rank, size, group)
    print(json.dumps({case: attempt(me, case) for case in CASES[size]}))


# -- what is tested -------------------------------------------------------------------------------


def outcome(size: int, folder: Path) -> list[dict[str, str]]:
    program = (
        "import sys; sys.path.insert(0, *arguments); import test_parallel; "
        "test_parallel.main(rank, size, group)"
    )
    ended = run_ranks(program, folder, str(Path(__file__).parent), size=size)
    assert [rank.code for rank in ended] == [0] * size, [rank.err for rank in ended]
    return [json.loads(rank.out.splitlines()[-1]) for rank in ended]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcome(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcome(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=new_quantizer_in_graph if c in COMPILED else ()) for c in CASES[2]],
)
def test_two_ranks(case: str, two: list[dict[str, str]]) -> None:
    assert [results[case] for results in two] == [""] * 2


@pytest.mark.parametrize("case", CASES[4])
def test_four_ranks(case: str, four: list[dict[str, str]]) -> None:
    assert [results[case] for results in four] == [""] * 4
