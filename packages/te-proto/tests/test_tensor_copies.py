# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from te_toy import (
    Rounding,
    ToyQuantizer,
    ToyTensor,
    codes_of,
    pointers,
    quantized,
    values,
)
from torch.nn import Module, Parameter

from te_proto import to_tensor_proto

Q = ToyQuantizer()
ROW = Q.with_usage(columnwise=False)


class Layer(Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = Parameter(quantized(8, 8, seed=seed))
        self.bias = Parameter(values(8))


# -- copies -------------------------------------------------------------------------------------


def test_deepcopy_has_memory_of_its_own_and_keeps_everything_else() -> None:
    q = quantized(8, 8, dtype=torch.float16).requires_grad_()
    q.grad = values(8, 8, seed=1).half()
    q.tag = {"name": ["w"]}
    out = copy.deepcopy(q)
    assert to_tensor_proto(out) == to_tensor_proto(q)
    assert out.is_leaf
    assert codes_of(out) == codes_of(q)
    assert not set(pointers(out).values()) & set(pointers(q).values())
    assert torch.equal(out.grad, q.grad)
    assert out.grad is not q.grad
    assert out.tag == q.tag
    assert out.tag["name"] is not q.tag["name"]


def test_deepcopy_of_a_tensor_that_refers_to_itself_ends() -> None:
    q = quantized(8, 8)
    q.me = [q]
    out = copy.deepcopy(q)
    assert out.me[0] is out


def test_deepcopy_of_a_module_keeps_parameters_and_ties() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Layer()
            self.b = Layer()
            self.b.weight = self.a.weight
            self.a.weight.note = "first"

    out = copy.deepcopy(Tied())
    assert out.a.weight is out.b.weight
    assert isinstance(out.a.weight, ToyTensor)
    assert isinstance(out.a.weight, Parameter)
    assert out.a.weight.requires_grad
    assert out.a.weight.note == "first"
    assert len(list(out.parameters())) == 3


def test_copy_shares_the_buffers_and_attributes() -> None:
    q = quantized(8, 8)
    q.tag = ["x"]
    out = copy.copy(q)
    assert pointers(out) == pointers(q)
    assert to_tensor_proto(out) == to_tensor_proto(q)
    assert out.tag is q.tag
    assert isinstance(copy.copy(Parameter(q)), Parameter)


# -- modules ------------------------------------------------------------------------------------


def test_parameter_is_a_quantized_leaf() -> None:
    layer = Layer()
    assert isinstance(layer.weight, ToyTensor)
    assert [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.weight.is_leaf
    assert layer.weight.requires_grad
    assert not Parameter(quantized(4, 8), requires_grad=False).requires_grad


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("meta"), lambda m: m.to(device="meta", dtype=torch.float32)],
    ids=["device", "device-and-dtype"],
)
def test_module_to_device_moves_every_inner_tensor(move: Any) -> None:
    layer = Layer()
    weight = layer.weight
    move(layer)
    assert layer.weight is weight  # an optimizer keeps its hold on it
    assert isinstance(layer.weight, ToyTensor)
    assert {str(t.device) for t in (weight, *weight.inner_tensors().values())} == {"meta"}
    assert weight.requires_grad


def test_module_to_dtype_changes_only_the_nominal_dtype() -> None:
    layer = Layer()
    before = codes_of(layer.weight)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert isinstance(layer.weight, ToyTensor)
    assert codes_of(layer.weight) == before


def test_state_dict_holds_the_quantized_tensor_under_the_modules_own_names() -> None:
    layer = Layer()
    state = layer.state_dict()
    assert list(state) == ["weight", "bias"]
    assert type(state["weight"]) is ToyTensor
    assert pointers(state["weight"]) == pointers(layer.weight)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: quantized(8, 8, seed=1), id="quantized"),
        pytest.param(lambda: values(8, 8, seed=1).bfloat16(), id="bfloat16"),
        pytest.param(lambda: quantized(8, 8, seed=1, quantizer=ROW), id="fewer-planes"),
        pytest.param(
            lambda: quantized(8, 8, seed=1, quantizer=Q.replace(rounding=Rounding.ZERO)),
            id="rounding",
        ),
    ],
)
def test_load_state_dict_keeps_the_memory_and_leaves_no_stale_plane(source: Any) -> None:
    layer, given = Layer(), source()
    at = pointers(layer.weight)
    layer.load_state_dict({"weight": given, "bias": values(8)})
    assert pointers(layer.weight) == at
    plain = given.dequantize() if isinstance(given, ToyTensor) else given
    same = isinstance(given, ToyTensor) and given.quantizer == Q
    assert codes_of(layer.weight) == codes_of(given if same else Q.quantize(plain.float()))


def test_load_state_dict_with_assign_takes_the_tensor() -> None:
    layer, given = Layer(), quantized(8, 8, seed=1)
    layer.load_state_dict({"weight": given, "bias": values(8)}, assign=True)
    assert pointers(layer.weight) == pointers(given)
    assert isinstance(layer.weight, Parameter)


def test_swap_tensors_swaps_everything() -> None:
    a, b = quantized(8, 8, seed=1), quantized(4, 8, quantizer=ROW, seed=2)
    want = [(to_tensor_proto(t), codes_of(t)) for t in (b, a)]
    torch.utils.swap_tensors(a, b)
    assert [(to_tensor_proto(t), codes_of(t)) for t in (a, b)] == want


# -- checkpoints --------------------------------------------------------------------------------

LOAD = """
q, s = torch.load("q.pt", weights_only=True)
assert type(q).__name__ == "ToyTensor" and type(s).__name__ == "ToyStorage"
print(q.dtype, q.requires_grad, isinstance(q, torch.nn.Parameter), q.quantizer.note, s.shape)
print([t.tolist() for t in q.inner_tensors().values()] == torch.load("codes.pt"))
"""


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import torch\nimport te_proto", id="core-after-torch"),
        pytest.param("import te_proto\nimport torch", id="core-before-torch"),
        pytest.param("import torch\nimport te_toy", id="plugin"),
    ],
)
def test_weights_only_load_needs_no_more_than_the_core(
    imports: str, fresh: Callable[..., str], tmp_path: Path
) -> None:
    q = Parameter(ROW.replace(note="saved").quantize(values(4, 8, dtype=torch.bfloat16)))
    torch.save([q, Q.replace(internal=True).quantize(values(4, 8))], tmp_path / "q.pt")
    torch.save(list(codes_of(q).values()), tmp_path / "codes.pt")
    assert fresh(f"{imports}\n{LOAD}") == (
        "torch.bfloat16 True True saved torch.Size([4, 8])\nTrue"
    )


def test_load_without_the_plugin_says_what_to_install(
    fresh: Callable[..., str], tmp_path: Path
) -> None:
    torch.save(quantized(4, 8), tmp_path / "q.pt")
    code = (
        "import sys, torch, te_proto\n"
        "sys.path = [p for p in sys.path if not p.endswith(('site', 'tests'))]\n"
        "try: torch.load('q.pt', weights_only=True)\n"
        "except Exception as e: print(e)"
    )
    message = (
        "no installed format provides the class 'te_toy:ToyTensor'; "
        "install it with: pip install te-toy"
    )
    assert message in fresh(code)


def test_state_dict_round_trip_through_a_file(tmp_path: Path) -> None:
    torch.save(Layer().state_dict(), tmp_path / "state.pt")
    other = Layer(seed=5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert codes_of(other.weight) == codes_of(Layer().weight)
