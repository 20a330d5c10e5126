# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from te_toy import ToyQuantizer, values
from torch import Tensor

from te_proto import graphs
from te_proto.testing import count_compiles

Q = ToyQuantizer()


def derive(x: Tensor) -> tuple[Tensor, bool]:
    """Use a quantizer made here, and tell who runs this."""
    made = Q.replace(ceiling=1.0).quantize(x).dequantize()
    return made, torch.compiler.is_compiling()


def test_function_is_returned_as_it_is_where_graphs_can_use_new_quantizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "TRACES_NEW_QUANTIZERS", True)
    assert graphs.uses_new_quantizers(derive) is derive


def test_elsewhere_a_graph_breaks_and_what_is_inside_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "TRACES_NEW_QUANTIZERS", False)
    kept_out = graphs.uses_new_quantizers(derive)
    assert kept_out.__doc__ == derive.__doc__
    x = values(8, 12)
    assert torch.equal(kept_out(x)[0], derive(x)[0])

    def run(x: Tensor) -> tuple[Tensor, bool]:
        made, traced = kept_out(x * 2)
        return made + 1, traced

    with count_compiles() as counts:
        found, traced = torch.compile(run, backend="aot_eager")(x)
        assert counts.graphs == 2  # before and behind
    assert not traced
    assert torch.equal(found, derive(x * 2)[0] + 1)
    message = "derive makes quantizers, which graphs cannot use before torch 2.12, got 2."
    with count_compiles(), pytest.raises(Exception, match=message):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)
