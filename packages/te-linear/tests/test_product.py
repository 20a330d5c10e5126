# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from linear_toy import RECIPE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

from te_linear import LinearConfig, linear, product
from te_linear.product import matmul
from te_proto.gemm import GemmOperand
from te_proto.numerics import decode_e2m1, unpack_e2m1
from te_proto.testing import assert_same_bits, count_compiles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(32, 48, 64), (5, 16, 32), (33, 24, 40), (1, 3, 7), (0, 16, 32), (8, 16, 0), (8, 0, 16)]


@dataclass
class Operand:
    """Codes ``[..., K]`` under one scale; ``plain`` has no operand for scaled_mm."""

    codes: Tensor
    scale: Tensor
    plain: bool = False
    scaling: ScalingType = ScalingType.TensorWise

    def gemm_operand(self, *, columnwise: bool) -> GemmOperand | None:
        matrix = self.codes.reshape(-1, self.codes.shape[-1]) if self.codes.numel() else self.codes
        if self.plain:
            return None
        return GemmOperand(matrix.t() if columnwise else matrix, self.scale, self.scaling)

    def with_usage(self, **usage: bool) -> Operand:
        assert list(usage.values()) == [False]  # the other plane is dropped
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.float() * self.scale).to(dtype)


def operand(rows: int, columns: int, dtype: torch.dtype = E4M3, **fields: Any) -> Operand:
    g = torch.Generator().manual_seed(rows + 1000 * columns)
    codes = torch.randn(rows, columns, generator=g).to(dtype)
    return Operand(codes, torch.rand(1, generator=g) + 0.5, **fields)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Return a list of the matrices that every later scaled_mm was given."""
    seen: list[tuple[Tensor, Tensor]] = []
    real = product.scaled_mm

    def record(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((a, b))
        return real(a, b, *args, **kwargs)

    monkeypatch.setattr(product, "scaled_mm", record)
    return seen


def test_this_torch_has_the_product_on_cpu() -> None:
    assert product._ON_CPU


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product((E4M3, E5M2), repeat=2)))
@pytest.mark.parametrize("columnwise", list(itertools.product((False, True), repeat=2)), ids=str)
def test_both_ways_give_the_product(
    m: int,
    n: int,
    k: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    columnwise: tuple[bool, bool],
    calls: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = operand(*((k, m) if columnwise[0] else (m, k)), a_dtype)
    b = operand(*((k, n) if columnwise[1] else (n, k)), b_dtype)
    left, right = ((o.codes.double() * o.scale.double()) for o in (a, b))
    exact = (left.t() if columnwise[0] else left) @ (right if columnwise[1] else right.t())
    usage = {"a_columnwise": columnwise[0], "b_columnwise": columnwise[1]}
    scaled = matmul(a, b, **usage)
    assert len(calls) == 1
    assert [t.is_contiguous() for t in (calls[0][0], calls[0][1].t())] == [True, True]
    monkeypatch.setattr(product, "_ON_CPU", False)
    values = matmul(a, b, **usage)
    assert len(calls) == 1
    for found in (scaled, values):
        assert (found.dtype, tuple(found.shape)) == (torch.float32, (m, n))
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("plain", [(True, False), (False, True), (True, True)], ids=str)
def test_one_operand_without_the_form_is_enough_to_dequantize(
    plain: tuple[bool, bool], calls: list[tuple[Tensor, Tensor]]
) -> None:
    a, b = operand(32, 64, plain=plain[0]), operand(16, 64, plain=plain[1])
    expected = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    assert_same_bits(matmul(a, b, a_columnwise=False, b_columnwise=False), expected)
    assert calls == []


@pytest.mark.parametrize("side", [0, 1])
def test_scaling_that_no_device_is_known_to_take_is_dequantized(
    side: int, calls: list[tuple[Tensor, Tensor]]
) -> None:
    pair = [operand(32, 64), operand(16, 64)]
    pair[side].scaling = ScalingType.RowWise
    expected = pair[0].dequantize(torch.float32) @ pair[1].dequantize(torch.float32).t()
    assert_same_bits(matmul(*pair, a_columnwise=False, b_columnwise=False), expected)
    assert calls == []


def test_one_summed_element_is_no_scaled_product(calls: list[tuple[Tensor, Tensor]]) -> None:
    a, b = operand(32, 1), operand(16, 1)
    expected = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    assert_same_bits(matmul(a, b, a_columnwise=False, b_columnwise=False), expected)
    assert calls == []


def test_leading_axes_are_rows() -> None:
    a, b = operand(6, 16), operand(8, 16)
    whole = matmul(a, b, a_columnwise=False, b_columnwise=False)
    for plain in (False, True):
        folded = Operand(a.codes.view(2, 3, 16), a.scale, plain)
        found = matmul(folded, b, a_columnwise=False, b_columnwise=False)
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "n", "k", "a_dtype", "b_dtype", "taken"),
    [
        pytest.param(32, 48, 64, E4M3, E4M3, True, id="whole"),
        pytest.param(5, 48, 64, E4M3, E5M2, True, id="any-rows"),
        pytest.param(32, 48, 64, E5M2, E4M3, True, id="gradient-first"),
        pytest.param(32, 48, 40, E4M3, E4M3, False, id="summed-axis"),
        pytest.param(32, 24, 64, E4M3, E4M3, False, id="columns"),
        pytest.param(32, 48, 64, E5M2, E5M2, False, id="e5m2-twice"),
        pytest.param(0, 48, 64, E4M3, E4M3, False, id="no-rows"),
        pytest.param(32, 0, 64, E4M3, E4M3, False, id="no-columns"),
        pytest.param(32, 48, 0, E4M3, E4M3, False, id="nothing-summed"),
    ],
)
def test_cuda_multiplies_what_its_gemm_takes(
    m: int,
    n: int,
    k: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    taken: bool,
    calls: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        a, b = (
            Operand(torch.empty(s, k, dtype=d, device="cuda"), torch.empty(1, device="cuda"))
            for s, d in ((m, a_dtype), (n, b_dtype))
        )
        for able in (False, True):
            monkeypatch.setattr(product, "_has_gemm", lambda pair, device, able=able: able)
            found = matmul(a, b, a_columnwise=False, b_columnwise=False)
            assert (found.shape, found.dtype, found.device.type) == ((m, n), torch.float32, "cuda")
            assert len(calls) == (taken and able)


def test_other_devices_dequantize(calls: list[tuple[Tensor, Tensor]]) -> None:
    a, b = (
        Operand(torch.empty(16, 16, dtype=E4M3, device="meta"), torch.empty(1, device="meta")),
    ) * 2
    assert matmul(a, b, a_columnwise=False, b_columnwise=False).shape == (16, 16)
    assert calls == []


@pytest.mark.parametrize(
    ("pair", "able"),
    [
        ("TensorWise TensorWise", {(8, 9), (9, 0), (10, 0), (12, 0)}),
        ("BlockWise1x128 BlockWise1x128", {(9, 0)}),
        ("BlockWise1x128 BlockWise128x128", {(9, 0)}),
        ("BlockWise128x128 BlockWise1x128", {(9, 0)}),
        ("BlockWise128x128 BlockWise128x128", set()),
        ("BlockWise1x32 BlockWise1x32", {(10, 0), (12, 0)}),
        ("BlockWise1x16 BlockWise1x16", {(10, 0), (12, 0)}),
        ("BlockWise1x16 BlockWise1x32", set()),
        ("RowWise RowWise", set()),
    ],
)
def test_gemm_is_there_from_a_compute_capability_and_cuda_on(
    pair: str, able: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Properties:
        major: int
        minor: int

    def found(
        capability: tuple[int, int] | None, cuda: tuple[int, int] = (13, 0), hip: str | None = None
    ) -> bool:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(product, "_CUDA", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: Properties(*(capability or (0, 0)))
        )
        first, second = (getattr(ScalingType, name) for name in pair.split())
        return product._has_gemm((first, second), torch.device("cuda", 0))

    capabilities = [(8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert {c for c in capabilities if found(c)} == able
    assert not found(None)
    for capability in able:
        assert not found(capability, hip="6.2")
        assert found(capability, (12, 6)) == (pair == "TensorWise TensorWise")


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
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not product._takes(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(32, 48, 64), (5, 16, 32), (33, 24, 40)])
def test_cuda_gives_the_product(m: int, n: int, k: int) -> None:
    a, b = operand(m, k), operand(n, k, E5M2)
    on_cuda = [Operand(o.codes.cuda(), o.scale.cuda()) for o in (a, b)]
    found = matmul(*on_cuda, a_columnwise=False, b_columnwise=False).cpu()
    expected = matmul(a, b, a_columnwise=False, b_columnwise=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_quantized_weight_is_an_input_of_one_graph() -> None:
    config = LinearConfig.from_recipe(RECIPE)
    weight = torch.nn.Parameter(config.weight.quantize(torch.randn(24, 64)))
    with count_compiles() as counted:
        compiled = torch.compile(
            lambda x, w: linear(x, w, config=config),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        for m in (32, 64, 96, 160):
            x = torch.randn(m, 64, requires_grad=True)
            weight.grad = None
            y = compiled(x, weight)
            y.sum().backward()
            expected = linear(x, weight, config=config)
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)
            assert weight.grad is not None
    assert (counted.graphs, counted.breaks, counted.recompiles) == (1, 0, 0)
