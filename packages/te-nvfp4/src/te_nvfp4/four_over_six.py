# SPDX-License-Identifier: Apache-2.0
"""4over6: each block maps its maximum to 6 or to 4, whichever gives the smaller error.

E2M1 has nothing between 4 and 6, so a block with values just below its maximum may lose less when
that becomes 4. Errors are sums in a fixed order, since a tie decides: it goes to 6, as NaN does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_nvfp4.layout import BLOCK
from te_nvfp4.scales import BlockScales, TensorScales, fill, scale_blocks
from te_proto.numerics import E2M1_MAX, decode_e2m1, decode_e4m3, encode_e2m1

if TYPE_CHECKING:
    from torch import Tensor

    from te_nvfp4.quantizer import NVFP4Quantizer


class _Candidate(NamedTuple):
    code: Tensor
    elements: Tensor
    error: Tensor


def choose(
    values: Tensor, axis: int, block_amax: Tensor, amax: Tensor, of: TensorScales, q: NVFP4Quantizer
) -> tuple[Tensor, Tensor]:
    """Return the E4M3 code of each block and the E2M1 codes of ``values``.

    Args:
        values: ``[rows, blocks, 16]`` or ``[blocks, 16, columns]``.
        axis: of ``values`` along which a block lies.
        block_amax: float32 maximum of each block, ``values`` without ``axis``.
        amax: float32 amax of the tensor or line, which broadcasts to ``block_amax``.
        of: the scales of ``amax``.
        q: the options.

    Source:
        TransformerEngine, ``common/cast/nvfp4/quantize_4over6_nvfp4.cuh``.
    """
    base = block_amax / fill(block_amax, E2M1_MAX) * of.encode
    six, four = (
        _candidate(values, axis, scale_blocks(scale, of), amax, of, q)
        for scale in (base, base * 1.5)
    )
    # written so that NaN takes 6
    better = _of_tiles(four.error, axis, q) < _of_tiles(six.error, axis, q)
    return (
        torch.where(better, four.code, six.code),
        torch.where(better.unsqueeze(axis), four.elements, six.elements),
    )


def _candidate(
    values: Tensor,
    axis: int,
    scales: BlockScales,
    amax: Tensor,
    of: TensorScales,
    q: NVFP4Quantizer,
) -> _Candidate:
    x = values.float()
    elements = encode_e2m1(x * scales.multiplier.unsqueeze(axis))
    product = decode_e2m1(elements) * decode_e4m3(scales.code).unsqueeze(axis)
    if q.nvfp4_4over6_err_use_fast_math:
        # a product of an E2M1 and an E4M3 number is a float16 number: no rounding is left out
        difference = product - x * of.encode.unsqueeze(axis)
    else:
        bound = fill(x, E2M1_MAX * q.nvfp4_e4m3_max)
        difference = product * amax.unsqueeze(axis) / bound - x
    errors = (
        difference.abs() if q.nvfp4_4over6_err_mode == "MAE" else difference * difference
    ).unbind(axis)
    total = errors[0]
    for error in errors[1:]:
        total = total + error
    return _Candidate(scales.code, elements, total)


def _of_tiles(error: Tensor, axis: int, q: NVFP4Quantizer) -> Tensor:
    """Return the error that decides for each block: with 16x16 blocks, that of all its lines."""
    if not q.with_2d_quantization:
        return error
    rows, columns = error.shape
    if axis == 2:  # lines of a block are rows
        lines = error.view(rows // BLOCK, BLOCK, columns)
        return _tree(lines, 1).expand(-1, BLOCK, -1).reshape(rows, columns)
    lines = error.view(rows, columns // BLOCK, BLOCK)
    return _tree(lines, 2).expand(-1, -1, BLOCK).reshape(rows, columns)


def _tree(lines: Tensor, axis: int) -> Tensor:
    """Return the sum over 16 lines: ``i`` and ``i + 8`` first, then 4, 2 and 1 apart."""
    for half in (8, 4, 2, 1):
        lines = lines.narrow(axis, 0, half) + lines.narrow(axis, half, half)
    return lines
