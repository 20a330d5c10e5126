# SPDX-License-Identifier: Apache-2.0
"""Swizzled scales against the formula, written out; padding and cutting, eager and compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from te_proto.blocks import matrix_shape, round_up
from te_proto.numerics import cut, materialize, swizzle, unswizzle, whole_tiles
from te_proto.testing import assert_same_bits, count_compiles


def off(i: int, j: int, tiles: int) -> int:
    """Return the byte of scale ``(i, j)``, as the specification writes it."""
    return ((i // 128) * tiles + (j // 4)) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + (j % 4)


@pytest.mark.parametrize(("outer", "inner"), [(128, 4), (256, 12), (384, 8)])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_swizzle_puts_each_scale_where_the_formula_says(
    outer: int, inner: int, columnwise: bool
) -> None:
    g = torch.Generator().manual_seed(11)
    scale = torch.randint(256, (outer, inner), dtype=torch.uint8, generator=g)
    expected = torch.empty(outer * inner, dtype=torch.uint8)
    for i in range(outer):
        for j in range(inner):
            expected[off(i, j, inner // 4)] = scale[i, j]
    compact = scale.t() if columnwise else scale
    swizzled = swizzle(compact, columnwise=columnwise)
    assert_same_bits(swizzled, expected.view(compact.shape))
    back = unswizzle(swizzled, columnwise=columnwise)
    assert back.is_contiguous()
    assert_same_bits(back, compact)


def test_swizzle_takes_the_blocks_along_the_last_axis_by_default() -> None:
    scale = torch.arange(128 * 8).remainder(251).to(torch.uint8).view(128, 8)
    assert_same_bits(swizzle(scale), swizzle(scale, columnwise=False))
    assert_same_bits(unswizzle(swizzle(scale)), scale)


def test_block_arithmetic_needs_no_torch() -> None:
    code = "import sys, te_proto.blocks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert [round_up(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    assert [matrix_shape(s) for s in ((5,), (2, 3, 4), (0, 7))] == [(1, 5), (6, 4), (0, 7)]


@pytest.mark.parametrize(("m", "k"), [(1, 5), (128, 256), (130, 100), (0, 64)])
def test_whole_tiles_are_padded_with_zeros_and_cut_off_again(m: int, k: int) -> None:
    x = torch.randn(m, k)
    tiles = whole_tiles(x)
    assert tiles.shape == (round_up(m, 128), round_up(k, 128))
    assert tiles.count_nonzero() == x.count_nonzero()
    assert_same_bits(cut(tiles, m, k), x)


def test_compiled_padding_is_one_graph_and_gives_memory_of_its_own() -> None:
    def there_and_back(x: Tensor) -> Tensor:
        m, k = x.shape
        blocks = whole_tiles(x).view(-1, 32, k)
        inverse = materialize(blocks.amax(1)).unsqueeze(1)
        return cut((blocks + inverse).reshape(-1, k), m, k)

    with count_compiles() as counts:
        compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True)
        for m in (32, 64, 96, 128, 160):
            x = torch.randn(m, 128)
            out = compiled(x)
            assert_same_bits(out, x + x.view(-1, 32, 128).amax(1).repeat_interleave(32, 0))
            assert out.untyped_storage().nbytes() == x.nbytes
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, 0)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_value_may_have_any_last_axis(dtype: torch.dtype, width: int) -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def scaled(x: Tensor) -> Tensor:
        scale = materialize(x.unflatten(1, (-1, 32)).amax(2) * 2)
        return x.unflatten(1, (-1, 32)) * scale.unsqueeze(2)

    with count_compiles() as counts:
        for m in (5, 6, 8):
            x = torch.randn(m, 32 * width, dtype=dtype)
            blocks = x.view(m, width, 32)
            assert_same_bits(scaled(x), blocks * (blocks.amax(2) * 2).unsqueeze(2))
    assert (counts.graphs, counts.recompiles) == (1, 0)
