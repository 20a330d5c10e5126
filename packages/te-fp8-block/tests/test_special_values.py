# SPDX-License-Identifier: Apache-2.0
"""Special values in each plane and place, through the quantizer, with the bytes written out.

On CUDA (``--te-device``) they are the bytes of the kernels. ``test_reference`` has more of them
for one block. How the bytes here were had from the specification, apart from this code: ``scale``
is ``max(dtype) / amax`` rounded to float32, its mantissa cut off where it is a power of two, and
the bits of ``scale_inv`` are those of its inverse, rounded again; a code is that of ``x * scale``,
ties to even. 448 and 57344 are ``1.75 * 2**8`` and ``1.75 * 2**15``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_fp8_block import Float8BlockQuantizer
from te_proto.testing import count_compiles

E4M3, E5M2 = "e4m3", "e5m2"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)
INF, NAN = math.inf, math.nan
FLT_MAX, BF16_MAX, F16_MAX = (torch.finfo(x_dtype).max for x_dtype in ALL)
TINY = {F32: 2.0**-149, BF16: 2.0**-133, F16: 2.0**-24}
ULP = {F32: 2.0**-23, BF16: 2.0**-7, F16: 2.0**-10}
ONE = 0x3F800000
EDGE = {E4M3: 1.75 * 2.0**-120, E5M2: 1.75 * 2.0**-113}  # max(dtype) / 2**128

elements = pytest.mark.parametrize("dtype", [E4M3, E5M2])
inputs = pytest.mark.parametrize("x_dtype", ALL, ids=lambda d: str(d)[6:])
powers = pytest.mark.parametrize("pow_2", [False, True], ids=["any", "pow-2"])
planes = pytest.mark.parametrize("plane", ["rowwise", "columnwise"])
dims = pytest.mark.parametrize("dim", [1, 2], ids=["1d", "2d"])


@pytest.fixture(autouse=True)
def scales_of_the_device(request: pytest.FixtureRequest) -> None:
    """Skip what a GPU with a GEMM for powers of two alone refuses."""
    device = str(request.config.getoption("--te-device"))
    if (
        device.startswith("cuda")
        and torch.cuda.get_device_capability(device) >= (10, 0)
        and getattr(request.node, "callspec", None)
        and request.node.callspec.params.get("pow_2") is False
    ):
        pytest.skip("scales must be powers of two on this device")


def tensor(values: Any, x_dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(x_dtype)


def held(made: Any, plane: str, dim: int, lines: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the bits of scale_inv of each block of each line, and the codes."""
    scale = getattr(made, f"{plane}_scale_inv").cpu().view(torch.int32)
    scale = scale[:blocks, :lines].t() if dim == 1 else scale[: -(-lines // 128), :blocks]
    return scale, getattr(made, f"{plane}_data").cpu()


def scales_and_codes(
    x: Tensor, plane: str, dim: int, device: torch.device, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the bits of scale_inv and the codes of a matrix whose blocks are cut in rows.

    The columnwise plane, which is stored transposed, is that of the transposed matrix.
    """
    q = Float8BlockQuantizer(
        rowwise=plane == "rowwise",
        columnwise=plane == "columnwise",
        block_scaling_dim=dim,
        **options,
    )
    made = q.quantize((x if plane == "rowwise" else x.t()).to(device))
    return held(made, plane, dim, x.shape[0], -(-x.shape[1] // 128))


# fmt: off
BYTES: dict[str, tuple[Any, ...]] = {
    # element format, input dtypes, values; bits of scale_inv, codes; both with powers of two
    "bf16-max": (E4M3, (BF16,), [BF16_MAX, -BF16_MAX, 1.0],
        0x7B11B6DB, [0x7E, 0xFE, 0x00], 0x7B800000, [0x78, 0xF8, 0x00]),
    "e5m2-bf16-max": (E5M2, (BF16,), [BF16_MAX, -BF16_MAX, 1.0],
        0x7791B6DB, [0x7B, 0xFB, 0x00], 0x78000000, [0x78, 0xF8, 0x00]),
    "e5m2-flt-max": (E5M2, (F32,), [FLT_MAX, 1.0, -FLT_MAX],
        0x77924924, [0x7B, 0x00, 0xFB], 0x78000000, [0x78, 0x00, 0xF8]),
    "f16-all-of-it": (E4M3, (F16,), [F16_MAX, TINY[F16], -1.0],
        0x431236DB, [0x7E, 0x00, 0x84], 0x43800000, [0x78, 0x00, 0x82]),
    "e5m2-f16-all-of-it": (E5M2, (F16,), [F16_MAX, TINY[F16], -1.0],
        0x3F9236DB, [0x7B, 0x00, 0xBB], 0x40000000, [0x78, 0x00, 0xB8]),
    # the quotient overflows: the largest number of the input's dtype, or 2**127
    "smallest-normal-f32": (E4M3, (F32,), [2.0**-126, -(2.0**-126)],
        0x00200000, [0x48, 0xC8], 0x00400000, [0x40, 0xC0]),
    "smallest-normal-bf16": (E4M3, (BF16,), [2.0**-126, -TINY[BF16]],
        0x00202020, [0x48, 0x90], 0x00400000, [0x40, 0x88]),
    "e5m2-overflow-f32": (E5M2, (F32,), [EDGE[E5M2], -TINY[F32]],
        0x00200000, [0x7B, 0x80], 0x00400000, [0x77, 0x80]),
    "e5m2-overflow-bf16": (E5M2, (BF16,), [EDGE[E5M2], -TINY[BF16]],
        0x00202020, [0x7B, 0xA8], 0x00400000, [0x77, 0xA4]),
    "tiny-f32": (E4M3, (F32,), [TINY[F32], -TINY[F32]],
        0x00200000, [0x00, 0x80], 0x00400000, [0x00, 0x80]),
    # one ulp more, and it does not
    "no-overflow-f32": (E4M3, (F32,), [EDGE[E4M3] * (1 + 2.0**-22)],
        0x00200001, [0x7E], 0x00400000, [0x76]),
    "no-overflow-bf16": (E4M3, (BF16,), [EDGE[E4M3] + 2.0**-127],
        0x00202492, [0x7E], 0x00400000, [0x76]),
    "tiny-f16": (E4M3, (F16,), [TINY[F16], -TINY[F16]],
        0x2F124925, [0x7E, 0xFE], 0x2F800000, [0x78, 0xF8]),
    "e5m2-largest-subnormal-f16": (E5M2, (F16,), [2.0**-14 - 2.0**-24],
        0x30922492, [0x7B], 0x31000000, [0x78]),
    "one-and-small": (E4M3, ALL, [1.0, 2.0**-24, -(2.0**-24), -0.0],
        0x3B124925, [0x7E, 0x00, 0x80, 0x80], 0x3B800000, [0x78, 0x00, 0x80, 0x80]),
    "e5m2-one-and-small": (E5M2, ALL, [1.0, 2.0**-24, -(2.0**-24), -0.0],
        0x37924925, [0x7B, 0x1B, 0x9B, 0x80], 0x38000000, [0x78, 0x18, 0x98, 0x80]),
    # infinity: everything else is cast as it is
    "inf-and-all": (E4M3, (F32,), [INF, FLT_MAX, -BF16_MAX, TINY[F32], -0.0, 3.0],
        ONE, [0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x44], ONE, [0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x44]),
    "e5m2-inf-and-f16-max": (E5M2, (F16,), [-INF, F16_MAX, -TINY[F16], 3.0],
        ONE, [0xFB, 0x7B, 0x80, 0x42], ONE, [0xFB, 0x7B, 0x80, 0x42]),
    "e5m2-nan-and-zeros": (E5M2, ALL, [NAN, -0.0, -NAN],
        ONE, [0x7F, 0x80, 0x7F], ONE, [0x7F, 0x80, 0x7F]),
}
# fmt: on


@dims
@planes
@powers
@pytest.mark.parametrize("name", BYTES)
def test_block_that_is_ragged(
    name: str, pow_2: bool, plane: str, dim: int, device: torch.device
) -> None:
    dtype, x_dtypes, values, *expected = BYTES[name]
    bits, line = expected[2:] if pow_2 else expected[:2]
    n = len(values)
    for x_dtype in x_dtypes:
        x = torch.zeros(5, 128 + n, dtype=x_dtype)
        x[3, 128:] = tensor(values, x_dtype)
        scales = torch.full((5, 2) if dim == 1 else (1, 2), ONE, dtype=torch.int32)
        scales[3 if dim == 1 else 0, 1] = bits
        codes = torch.zeros(5, 128 + n, dtype=torch.uint8)
        codes[3, 128:] = torch.tensor(line, dtype=torch.uint8)
        found = scales_and_codes(x, plane, dim, device, dtype=dtype, force_pow_2_scales=pow_2)
        assert torch.equal(found[0], scales), x_dtype
        assert torch.equal(found[1], codes), x_dtype


# element format, epsilon, values; bits of scale_inv, codes; both with powers of two
EPSILON: dict[str, tuple[Any, ...]] = {
    "zero": (E4M3, 2.0, [0.0, -0.0], 0x3B924925, [0x00, 0x80], 0x3C000000, [0x00, 0x80]),
    "e5m2": (E5M2, 2.0, [0.5, -0.25], 0x38124925, [0x73, 0xEF], 0x38800000, [0x70, 0xEC]),
    "above": (E5M2, 2.0, [4.0, -0.0], 0x38924925, [0x7B, 0x80], 0x39000000, [0x78, 0x80]),
    "nan": (E4M3, 2.0, [NAN, 0.5], 0x3B924925, [0x7F, 0x6E], 0x3C000000, [0x7F, 0x68]),
    "e5m2-inf": (E5M2, 2.0, [-INF, 1.0], ONE, [0xFB, 0x3C], ONE, [0xFB, 0x3C]),
    "small-f16": (E4M3, 1e-37, [2.0**-14], 0x34124925, [0x7E], 0x34800000, [0x78]),
}
# the largest number of the input's dtype, or the power of two below it, upside down
OVERFLOW = {
    F32: (0x00200000, 0x00400000),
    BF16: (0x00202020, 0x00400000),
    F16: (0x37801002, 0x38000000),
}


@dims
@planes
@powers
@inputs
@pytest.mark.parametrize("name", [*EPSILON, "overflow"])
def test_epsilon(
    name: str, x_dtype: torch.dtype, pow_2: bool, plane: str, dim: int, device: torch.device
) -> None:
    bits, power = OVERFLOW[x_dtype]
    overflow = (E5M2, 1e-37, [0.0, -0.0], bits, [0x00, 0x80], power, [0x00, 0x80])
    dtype, epsilon, values, *expected = EPSILON.get(name, overflow)
    found = scales_and_codes(
        tensor([values], x_dtype),
        plane,
        dim,
        device,
        dtype=dtype,
        force_pow_2_scales=pow_2,
        amax_epsilon=epsilon,
    )
    assert [found[0].item(), found[1][0].tolist()] == expected[2 if pow_2 else 0 :][:2]


@dims
@planes
@elements
@inputs
@pytest.mark.parametrize(("zero", "code"), [(0.0, 0x00), (-0.0, 0x80)], ids=["0", "-0"])
def test_zero_tensor_and_zero_block_among_others(
    zero: float,
    code: int,
    x_dtype: torch.dtype,
    dtype: str,
    plane: str,
    dim: int,
    device: torch.device,
) -> None:
    x = torch.full((130, 140), zero, dtype=x_dtype)
    scale, codes = scales_and_codes(x, plane, dim, device, dtype=dtype)
    assert scale.unique().tolist() == [ONE]
    assert codes.unique().tolist() == [code]
    x[:, :128] = x[:128] = 1.0  # all that is left is the ragged corner
    scale, codes = scales_and_codes(x, plane, dim, device, dtype=dtype)
    one = {E4M3: 0x3B800000, E5M2: 0x38000000}[dtype]
    assert scale[:: 129 if dim == 1 else 1].tolist() == [[one, one], [one, ONE]]
    assert codes[128:, 128:].unique().tolist() == [code]
    codes[128:, 128:] = 0x78
    assert codes.unique().tolist() == [0x78]


@dims
@planes
@elements
@inputs
@pytest.mark.parametrize("special", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
def test_special_value_at_each_place_of_a_block(
    special: float, x_dtype: torch.dtype, dtype: str, plane: str, dim: int, device: torch.device
) -> None:
    two = {E4M3: 0x3C000000, E5M2: 0x38800000}[dtype]  # 2 becomes 256 or 32768
    if math.isnan(special):
        bits, rest, code = two, 0x78, 0x7F
    else:  # cast as it is
        largest = {E4M3: 0x7E, E5M2: 0x7B}[dtype]
        bits, rest, code = ONE, 0x40, largest | (0x80 if special < 0 else 0)
    n = torch.arange(128)
    if dim == 1:  # line i has it at place i of its first block
        x, at = torch.full((128, 256), 2.0, dtype=x_dtype), (n, n)
        scales = torch.tensor([bits, two], dtype=torch.int32).expand(128, 2)
    else:  # block i of every second has it in row i, each at another column
        x, at = torch.full((128, 256 * 128), 2.0, dtype=x_dtype), (n, 256 * n + (37 * n + 5) % 128)
        scales = torch.tensor([bits, two], dtype=torch.int32).repeat(1, 128)
    x[at] = special
    found = scales_and_codes(x, plane, dim, device, dtype=dtype)
    assert torch.equal(found[0], scales)
    expected = torch.full((128, 2, 128), 0x78, dtype=torch.uint8)
    if dim == 2:
        expected = torch.full((128, 256, 128), 0x78, dtype=torch.uint8)
    expected[:, ::2] = rest
    expected = expected.flatten(1)
    expected[at] = code
    assert torch.equal(found[1], expected)


# bits of scale_inv in E4M3 of an amax of 1, of 1.75, and of their neighbours below and above
AROUND = {
    F32: [0x3B124924, 0x3B124925, 0x3B124926, 0x3B7FFFFE, 0x3B800000, 0x3B800001],
    BF16: [0x3B11B6DB, 0x3B124925, 0x3B136DB7, 0x3B7EDB6E, 0x3B800000, 0x3B809249],
    F16: [0x3B1236DB, 0x3B124925, 0x3B126DB7, 0x3B7FDB6D, 0x3B800000, 0x3B801249],
}
# where 2**k and its neighbours are normal numbers of the input dtype, and so is scale_inv
EXPONENTS = {F32: range(-109, 128), BF16: range(-109, 128), F16: range(-13, 16)}


@dims
@planes
@elements
@inputs
@powers
def test_amax_around_each_power_of_two_and_each_bound(
    pow_2: bool, x_dtype: torch.dtype, dtype: str, plane: str, dim: int, device: torch.device
) -> None:
    ulp, largest = ULP[x_dtype], {E4M3: 0x7E, E5M2: 0x7B}[dtype]
    around, codes = AROUND[x_dtype], [largest] * 6
    if pow_2:
        around = [*[0x3B800000] * 5, 0x3C000000]
        # what passes 1.75 * 2**k is under twice the scale
        codes = [0x78, 0x78, 0x78, largest, largest, {E4M3: 0x76, E5M2: 0x77}[dtype]]
    offset = {E4M3: 0, E5M2: 7}[dtype]  # 57344 is 448 * 2**7
    factors = (1 - ulp / 2, 1.0, 1 + ulp, 1.75 - ulp, 1.75, 1.75 + ulp)
    exponents = EXPONENTS[x_dtype]
    n = 6 * len(exponents)
    x = torch.zeros(1, n, 128, dtype=x_dtype)
    x[0, :, 77] = tensor([-f * 2.0**k for k in exponents for f in factors], x_dtype)
    scale, found = scales_and_codes(
        x.view(1, n * 128), plane, dim, device, dtype=dtype, force_pow_2_scales=pow_2
    )
    assert scale[0].tolist() == [b + ((k - offset) << 23) for k in exponents for b in around]
    assert found.view(n, 128)[:, 77].tolist() == [c | 0x80 for c in codes] * len(exponents)
    assert found.count_nonzero() == n


@dims
@planes
@pytest.mark.parametrize("value", [NAN, INF, -0.0, -3.0], ids=str)
def test_scalars_and_lines(value: float, plane: str, dim: int, device: torch.device) -> None:
    # 3 is 384 under a scale_inv of 2**-7
    bits, code = {"nan": (ONE, 0x7F), "inf": (ONE, 0x7E), "-0.0": (ONE, 0x80)}.get(
        str(value), (0x3C000000, 0xFC)
    )
    q = Float8BlockQuantizer(
        rowwise=plane == "rowwise", columnwise=plane == "columnwise", block_scaling_dim=dim
    )
    for shape in ((), (1,), (1, 1, 1)):
        made = q.quantize(torch.full(shape, value).to(device))
        found = held(made, plane, dim, 1, 1)
        assert (found[0].item(), found[1].item()) == (bits, code)
        assert str(made.dequantize().item()) == str({INF: 448.0}.get(value, value))


@planes
@pytest.mark.parametrize(("dim", "dtype"), [(1, E4M3), (2, E5M2)], ids=["1d", "2d"])
def test_graph_gives_these_bytes(dim: int, dtype: str, plane: str) -> None:
    q = Float8BlockQuantizer(
        dtype=dtype,
        rowwise=plane == "rowwise",
        columnwise=plane == "columnwise",
        block_scaling_dim=dim,
        force_pow_2_scales=dim == 2,
    )
    with count_compiles():
        compiled = torch.compile(q.quantize, backend="aot_eager", fullgraph=True)
        for x_dtype in ALL:
            taken = [case for case in BYTES.values() if case[0] == dtype and x_dtype in case[1]]
            x = torch.zeros(len(taken), 128, dtype=x_dtype)
            for line, (_, _, values, *_) in zip(x, taken, strict=True):
                line[: len(values)] = tensor(values, x_dtype)
            made = compiled(x.view(1, -1) if plane == "rowwise" else x.view(-1, 1))
            scale, codes = held(made, plane, dim, 1, len(taken))
            first = 5 if dim == 2 else 3
            assert scale[0].tolist() == [case[first] for case in taken]
            lines = [case[first + 1] for case in taken]
            assert codes.view(-1, 128).tolist() == [c + [0] * (128 - len(c)) for c in lines]
