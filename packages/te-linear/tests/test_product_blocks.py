# SPDX-License-Identifier: Apache-2.0
"""Products of operands with a scale a block, which a GPU computes: what it is given, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

from te_linear import product
from te_proto.gemm import GemmOperand
from te_proto.numerics import decode_e2m1, unpack_e2m1

E4M3 = torch.float8_e4m3fn
BLOCKS = {
    ScalingType.BlockWise1x16: (1, 16),
    ScalingType.BlockWise1x32: (1, 32),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
}
PAIRS = [pair for pair in product._NEEDS if ScalingType.TensorWise not in pair]


def named(pair: tuple[ScalingType, ScalingType]) -> str:
    return "-".join(scaling.name for scaling in pair)


LAID_OUT = ["plain", "strided", "swizzled"]


def whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def blocks(
    scaling: ScalingType, m: int, k: int, laid_out: str = "plain"
) -> tuple[GemmOperand, Tensor]:
    """Return an operand of this scaling and its values in float64."""
    rows, columns = BLOCKS[scaling]
    down, across = whole(m, rows) // rows, whole(k, columns) // columns
    scale = torch.rand(down, across) + 0.5
    swizzle, factor = SwizzleType.NO_SWIZZLE, None
    if scaling == ScalingType.BlockWise1x16:
        packed = torch.randint(0, 256, (m, k // 2), dtype=torch.uint8)
        data, values = packed.view(torch.float4_e2m1fn_x2), decode_e2m1(unpack_e2m1(packed))
        scale, factor = scale.to(E4M3), torch.rand(1) + 0.5
    else:
        data = torch.randn(m, k).to(E4M3)
        values = data.float()
    if scaling == ScalingType.BlockWise1x32:
        scale = torch.randint(120, 134, (down, across), dtype=torch.uint8)
        scale = scale.view(torch.float8_e8m0fnu)
    spread = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values = values.double() * spread[:m, :k] * (1.0 if factor is None else factor.double())
    if scaling == ScalingType.BlockWise128x128:
        scale = torch.nn.functional.pad(scale, (0, whole(across, 4) - across))
    elif scaling != ScalingType.BlockWise1x128:
        padding = (0, whole(across, 4) - across, 0, whole(m, 128) - m)
        scale = torch.nn.functional.pad(scale.view(torch.uint8), padding).view(scale.dtype)
    if laid_out == "strided":
        scale = scale.t().contiguous().t()
    elif laid_out == "swizzled" and scale.dtype != torch.float32:
        scale, swizzle = tiled(scale), SwizzleType.SWIZZLE_32_4_4
    made = GemmOperand(data, scale, scaling, swizzle, factor)
    return made, values


FAKE = FakeTensorMode()


def on_cuda(operand: GemmOperand) -> GemmOperand:
    """Return fake tensors of the same memory layout."""

    def like(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    with FAKE:
        return operand._replace(
            data=like(operand.data), scale=like(operand.scale), factor=like(operand.factor)
        )


def tiled(scale: Tensor) -> Tensor:
    """Return scales in tiles of 128 x 4, the 32 x 4 quarters of each side by side."""
    rows, columns = scale.shape
    tiles = scale.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


def cublas(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    scaling_a: list[ScalingType],
    scale_b: list[Tensor],
    scaling_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    output_dtype: torch.dtype,
) -> Tensor:
    """Return the product as a GPU computes it from the memory that it is given."""

    def values(
        data: Tensor, scales: list[Tensor], scalings: list[ScalingType], swizzle: list[SwizzleType]
    ) -> Tensor:
        assert data.is_contiguous()
        (m, k), scaling, held = data.shape, scalings[0], scales[0]
        rows, columns = BLOCKS[scaling]
        assert len(scales) == len(scalings) == len(swizzle)
        if scaling == ScalingType.BlockWise1x16:
            k, found = 2 * k, decode_e2m1(unpack_e2m1(data.view(torch.uint8))).double()
            assert scalings[1:] == [ScalingType.TensorWise]
        else:
            found = data.double()
        i, j = torch.arange(m).unsqueeze(1) // rows, torch.arange(k) // columns
        if held.dtype == torch.float32:  # read down the columns, those of squares along rows
            assert swizzle == [SwizzleType.NO_SWIZZLE]
            memory = held.as_strided((held.untyped_storage().nbytes() // 4,), (1,), 0)
            line = whole(k // 128, 4) if rows == 128 else m
            offset = i * line + j if rows == 128 else j * line + i
            return found * memory[offset].double()
        assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4
        assert held.is_contiguous()
        tile = i // 128 * (whole(k // columns, 4) // 4) + j // 4
        offset = tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
        found = found * held.double().flatten()[offset]
        return found * scales[1].double() if len(scales) == 2 else found

    left = values(a, scale_a, scaling_a, swizzle_a)
    return (left @ values(b.t(), scale_b, scaling_b, swizzle_b).t()).to(output_dtype)


@pytest.mark.parametrize("pair", PAIRS, ids=named)
@pytest.mark.parametrize("laid_out", LAID_OUT)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 384), (256, 384, 640), (384, 128, 128)])
def test_scales_are_put_where_the_gpu_reads_them(
    pair: tuple[ScalingType, ScalingType],
    laid_out: str,
    m: int,
    n: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(m)
    (a, left), (b, right) = (blocks(s, r, k, laid_out) for s, r in zip(pair, (m, n), strict=True))
    monkeypatch.setattr(product, "scaled_mm", cublas)
    found = product._scaled(product._ordered(a), product._ordered(b))
    torch.testing.assert_close(found.double(), left @ right.t(), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("pair", PAIRS, ids=named)
@pytest.mark.parametrize("laid_out", LAID_OUT)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (128, 256, 384),
        (5, 128, 128),
        (256, 16, 128),
        (128, 128, 160),
        (33, 48, 64),
        (130, 128, 128),
        (128, 24, 128),
        (0, 128, 128),
    ],
)
def test_torch_accepts_on_cuda_what_is_taken(
    pair: tuple[ScalingType, ScalingType],
    laid_out: str,
    m: int,
    n: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product, "_has_gemm", lambda pair, device: True)
    squares = [ScalingType.BlockWise128x128 == s for s in pair]
    aligned = k % 128 == 0 or pair[0] in (ScalingType.BlockWise1x32, ScalingType.BlockWise1x16)
    expected = aligned and n % 16 == 0 and m > 0
    expected = expected and not (squares[0] and m % 128) and not (squares[1] and n % 128)
    a, b = (blocks(s, r, k, laid_out)[0] for s, r in zip(pair, (m, n), strict=True))
    assert product._takes(on_cuda(a), on_cuda(b)) == expected
    if expected:  # what torch accepts of a CUDA tensor it says for a fake one too
        ordered = [on_cuda(product._ordered(operand)) for operand in (a, b)]
        with FAKE:
            found = product._scaled(*ordered)
        assert (tuple(found.shape), found.dtype) == ((m, n), torch.float32)
    assert not product._takes(on_cuda(a), on_cuda(b._replace(transform="of one only")))


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_blocks_are_not_taken_in_a_graph(
    pair: tuple[ScalingType, ScalingType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "_has_gemm", lambda pair, device: True)
    a, b = (on_cuda(blocks(s, 128, 128)[0]) for s in pair)
    assert product._takes(a, b)
    monkeypatch.setattr(product, "is_compiling", lambda: True)
    assert not product._takes(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=named)
@pytest.mark.parametrize("laid_out", LAID_OUT)
def test_cuda_gives_the_product(pair: tuple[ScalingType, ScalingType], laid_out: str) -> None:
    torch.manual_seed(0)
    (a, left), (b, right) = (
        blocks(s, r, 384, laid_out) for s, r in zip(pair, (128, 256), strict=True)
    )
    a, b = (
        o._replace(**{n: t.cuda() for n, t in o._asdict().items() if isinstance(t, Tensor)})
        for o in (a, b)
    )
    if not product._takes(a, b):
        pytest.skip(f"{torch.cuda.get_device_name()} does not multiply {named(pair)}")
    found = product._scaled(product._ordered(a), product._ordered(b)).cpu().double()
    # tensor cores keep fewer bits of a sum than float32 has
    torch.testing.assert_close(found, left @ right.t(), rtol=1e-2, atol=1e-1)
