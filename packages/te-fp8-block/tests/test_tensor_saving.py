# SPDX-License-Identifier: Apache-2.0
"""Deep copies, pickles, checkpoints: the same bytes and class, in memory that stays where it is."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import te_proto
from te_fp8_block.quantizer import Float8BlockQuantizer
from te_fp8_block.tensor import Float8BlockwiseStorage, Float8BlockwiseTensor
from te_proto.testing import assert_same_bits, hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from te_proto import QuantizedStorage

    Options = list[dict[str, Any]]
    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with te_proto.fallback("error"):
        yield


def pointers(tensor: QuantizedStorage) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.inner_tensors().values()]


def run(code: str, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **env},
    )
    return done.returncode, done.stdout.strip(), done.stderr


def make_leaf(fields: dict[str, Any]) -> Float8BlockwiseTensor:
    leaf: Float8BlockwiseTensor = Float8BlockQuantizer(**fields).quantize(hostile((64, 96)))
    leaf = leaf.requires_grad_()
    leaf.note = ["kept"]  # type: ignore[attr-defined]
    return leaf


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda t: pickle.loads(pickle.dumps(t)), id="pickle"),
    ],
)
def test_copy_is_independent_and_complete(
    again: Callable[[Any], Any], options: Options, known: Known, assert_same_planes: Same
) -> None:
    for fields in options:
        leaf = make_leaf(fields)
        copied = again(leaf)
        assert known(copied) == known(leaf)
        assert copied.is_leaf
        assert copied.note == ["kept"]
        assert copied.note is not leaf.note
        assert not set(pointers(copied)) & set(pointers(leaf))
        assert_same_planes(copied, leaf)


def test_storage_survives_deepcopy_and_pickle(known: Known, assert_same_planes: Same) -> None:
    q = Float8BlockQuantizer(internal=True, rowwise=False).quantize(hostile((64, 96)))
    for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert type(copied) is Float8BlockwiseStorage
        assert known(copied) == known(q)
        assert_same_planes(copied, q)


def test_deepcopy_keeps_ties_and_gradients() -> None:
    weight = torch.nn.Parameter(Float8BlockQuantizer().quantize(torch.ones(64, 64)))
    weight.dequantize().sum().backward()
    tied = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(2)])
    for layer in tied:
        layer.weight = weight
    copied = copy.deepcopy(tied)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not weight
    assert_same_bits(copied[0].weight.grad, weight.grad)


@pytest.mark.parametrize("imports", ["torch, te_proto", "te_proto, torch"])
def test_checkpoint_loads_where_only_the_core_was_imported(
    imports: str, tmp_path: Path, options: Options, assert_same_planes: Same
) -> None:
    file, back = tmp_path / "model.pt", tmp_path / "back.pt"
    saved = {str(i): make_leaf(fields) for i, fields in enumerate(options)}
    torch.save(saved, file)
    code = (
        f"import sys, {imports}\n"
        "assert 'te_fp8_block' not in sys.modules\n"
        f"state = torch.load({str(file)!r}, weights_only=True)\n"
        "print(sorted({type(t).__name__ for t in state.values()}), len(state))\n"
        f"torch.save(state, {str(back)!r})"
    )
    assert run(code) == (0, f"['Float8BlockwiseTensor'] {len(options)}", "")
    for name, tensor in torch.load(back, weights_only=True).items():
        assert tensor.requires_grad
        assert tensor.quantizer == saved[name].quantizer
        assert_same_planes(tensor, saved[name])


def test_checkpoint_without_its_plugin_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(Float8BlockQuantizer().quantize(torch.ones(32, 32)), file)
    code = (
        "import torch; from te_proto import TensorProto\n"
        f"torch.load({str(file)!r}, weights_only=True)"
    )
    status, _, err = run(code, TE_PROTO_FORMATS="none_of_them")
    assert status == 1
    assert (  # torch wraps the message in its own advice
        "no installed format provides the class 'te_fp8_block.tensor:Float8BlockwiseTensor'; "
        "install it with: pip install te-fp8-block"
    ) in err


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda x: x, id="plain"),
        pytest.param(lambda x: x.bfloat16(), id="bfloat16"),
        pytest.param(Float8BlockQuantizer().quantize, id="quantized"),
        pytest.param(Float8BlockQuantizer(columnwise=False).quantize, id="less-planes"),
        pytest.param(Float8BlockQuantizer(block_scaling_dim=1).quantize, id="1x128"),
    ],
)
def test_load_state_dict_keeps_the_memory_and_writes_every_plane(
    source: Callable[[Tensor], Any], assert_same_planes: Same
) -> None:
    layer = torch.nn.Linear(96, 64, bias=False)
    layer.weight = torch.nn.Parameter(Float8BlockQuantizer().quantize(torch.full((64, 96), 7.0)))
    before, value = pointers(layer.weight), source(hostile((64, 96), torch.float32))
    assert list(layer.state_dict()) == ["weight"]
    layer.load_state_dict({"weight": value})
    assert pointers(layer.weight) == before
    if getattr(value, "quantizer", None) == Float8BlockQuantizer():
        assert_same_planes(layer.weight, value)
    else:
        plain = value.dequantize() if isinstance(value, Float8BlockwiseTensor) else value
        assert_same_planes(layer.weight, Float8BlockQuantizer().quantize(plain))
