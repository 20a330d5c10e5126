# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from linear_toy import RECIPE
from torch import Tensor, nn

from te_linear import Linear, convert
from te_proto.errors import UnknownFormatError, UsageError


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.again = self.down
        self.norm = nn.LayerNorm(8)
        self.scaled = Scaled(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.again(self.down(self.up(x)).repeat(1, 2)))
        out: Tensor = self.head(self.scaled(x))
        return out


def test_layers_are_swapped_and_the_rest_is_named_with_the_reason() -> None:
    model = Block()
    report = convert(model, RECIPE, filter=lambda name, module: name != "up")
    assert report.converted == ("down", "again", "head")
    assert report.kept == {
        "embed": "Embedding is no nn.Linear",
        "up": "filter",
        "scaled": "Scaled is a subclass of nn.Linear, whose forward may differ",
    }
    assert str(report).splitlines() == [
        "down    quantized, toy",
        "again   quantized, toy",
        "head    quantized, toy",
        "embed   kept: Embedding is no nn.Linear",
        "up      kept: filter",
        "scaled  kept: Scaled is a subclass of nn.Linear, whose forward may differ",
        "3 of 6 modules with a weight matrix are quantized",
    ]
    assert [type(m) is Linear for m in (model.up, model.down, model.head)] == [False, True, True]


def test_parameters_ties_hooks_and_attributes_stay() -> None:
    model = Block()
    model.down.note = "mine"
    model.down.register_buffer("mask", torch.ones(3))
    seen: list[str] = []
    model.down.register_forward_hook(lambda *args: seen.append("down"))
    model.eval()
    model.up.weight.requires_grad_(False)  # ao#1873: frozen ones were not any more
    before = dict(model.named_parameters(remove_duplicate=False))
    keys = list(model.state_dict())
    convert(model, RECIPE)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [name for name, p in after.items() if not p.requires_grad] == ["up.weight"]
    assert list(model.state_dict()) == keys
    assert model.down is model.again
    assert model.head.weight is model.embed.weight
    assert (model.down.note, model.down.training, model.down.recipe) == ("mine", False, RECIPE)
    model(torch.arange(4))
    assert seen == ["down"] * 2


def test_converted_model_computes_what_layers_made_so_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    made = nn.Sequential(Linear(8, 16, recipe=RECIPE), nn.GELU(), Linear(16, 4, recipe=RECIPE))
    made.load_state_dict(model.state_dict())
    x = torch.randn(5, 8)
    plain = model(x)
    convert(model, RECIPE)
    assert torch.equal(model(x), made(x))
    assert not torch.equal(model(x), plain)
    assert convert(model, RECIPE).kept == dict.fromkeys("02", "a te_linear.Linear already")


def test_mode_is_that_of_the_layers() -> None:
    model = Block()
    convert(model, RECIPE, mode="opaque")
    assert {m.mode for m in model.modules() if isinstance(m, Linear)} == {"opaque"}
    with pytest.raises(UsageError, match="mode must be 'traced' or 'opaque', got 'other'"):
        convert(Block(), RECIPE, mode="other")


def test_dry_run_only_reports() -> None:
    model = Block()
    report = convert(model, RECIPE, mode="opaque", dry_run=True)
    assert report.converted == ("up", "down", "again", "head")
    assert not any(isinstance(module, Linear) for module in model.modules())


def test_layer_that_the_format_cannot_hold_is_kept_with_the_format_s_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8))
    report = convert(model, RECIPE)
    assert report.converted == ("1",)
    assert report.kept == {
        "0": "linear: input must be float32, bfloat16 or float16, got float64; cast it first"
    }


def test_nothing_is_swapped_if_something_is_wrong() -> None:
    with pytest.raises(UsageError) as raised:
        convert(nn.Linear(8, 8), RECIPE)
    assert str(raised.value) == (
        "linear: model must hold the layers that are swapped, got Linear itself; "
        "make a te_linear.Linear instead"
    )
    model = Block()
    with pytest.raises(UnknownFormatError):
        convert(model, "nothing")

    def fail_late(name: str, module: nn.Linear) -> bool:
        if name == "head":
            raise RuntimeError
        return True

    with pytest.raises(RuntimeError):
        convert(model, RECIPE, filter=fail_late)
    assert not any(isinstance(module, Linear) for module in model.modules())
