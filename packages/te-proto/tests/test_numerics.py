# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_proto import numerics
from te_proto.errors import DtypeError, QuantizerError, ShapeError
from te_proto.numerics import elements, loops
from te_proto.testing import assert_same_bits, count_compiles, load_golden

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from te_proto.numerics import ElementFormat

NAN = float("nan")
INF = float("inf")
GOLDEN = load_golden(Path(__file__).parent / "golden" / "numerics.npz")
ALL_CODES = torch.arange(256, dtype=torch.uint8)
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

ENCODE = {
    "e4m3": numerics.encode_e4m3,
    "e5m2": numerics.encode_e5m2,
    "e2m1": numerics.encode_e2m1,
}
DECODE = {
    "e4m3": numerics.decode_e4m3,
    "e5m2": numerics.decode_e5m2,
    "e8m0": numerics.decode_e8m0,
}
SCALES = {
    "encode_e8m0": numerics.encode_e8m0,
    "from_amax_e4m3": lambda x: numerics.e8m0_from_amax(x, "e4m3"),
    "from_amax_e5m2": lambda x: numerics.e8m0_from_amax(x, "e5m2"),
}


def float32_of(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def every(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def midpoints(name: str) -> Tensor:
    """Where rounding changes, in float32, and the neighbours on both sides, of both signs."""
    grid = positive_values(name)
    middle = np.append((grid[1:] + grid[:-1]) / 2, grid[-1] * np.array([1.0, 17 / 16, 9 / 8]))
    exact = middle.astype(np.float32)
    assert (exact == middle).all()
    around = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(INF))]
    return torch.from_numpy(np.concatenate([*around, *(-a for a in around)]))


def float32_patterns(count: int) -> Tensor:
    """Random bit patterns, as many small and middling ones again, and the specials."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator).to(torch.int32)
    # exponents 2**-18 to 2**17, where the formats live: uniform bits rarely are
    field = torch.randint(109, 144, (count // 2,), generator=generator).to(torch.int32) << 23
    near = (bits & ~0x7F800000) | field
    specials = float32_of(
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF),
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF),
    )
    return torch.cat([bits.view(torch.float32), near.view(torch.float32), specials])


def positive_values(name: str) -> np.ndarray:
    """The finite values of codes 0, 1, ... of the oracle, from the written-out tables."""
    if name == "e2m1":
        return np.array(E2M1_VALUES)
    values = GOLDEN[f"decode_{name}"]["value"][:128]
    finite: np.ndarray = values[values.isfinite()].double().numpy()
    return finite


def oracle(x: Tensor, name: str) -> Tensor:
    """Nearest value of the table, by distance in float64; ties to the even code."""
    grid = positive_values(name)
    value = x.double().numpy()
    magnitude = np.minimum(np.nan_to_num(np.abs(value), nan=0.0, posinf=INF), grid[-1])
    above = np.searchsorted(grid, magnitude).clip(1)
    up, down = grid[above] - magnitude, magnitude - grid[above - 1]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    sign, nan_code = {"e4m3": (0x80, 0x7F), "e5m2": (0x80, 0x7F), "e2m1": (8, 7)}[name]
    code = code + sign * np.signbit(value)
    return torch.from_numpy(np.where(np.isnan(value), nan_code, code).astype(np.uint8))


def test_importing_the_torch_functions_imports_no_triton() -> None:
    script = "import sys, te_proto.numerics; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e8m0"])
def test_every_code_decodes_to_the_written_table(name: str) -> None:
    expected = GOLDEN[f"decode_{name}"]["value"]
    actual = DECODE[name](ALL_CODES)
    number = ~expected.isnan()
    assert number.sum() == {"e4m3": 254, "e5m2": 250, "e8m0": 255}[name]
    assert_same_bits(actual[number], expected[number])
    assert actual[~number].isnan().all()
    if name != "e8m0":
        assert_same_bits(
            numerics.decode(ALL_CODES, name).nan_to_num(nan=1.0), actual.nan_to_num(nan=1.0)
        )


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_many_codes_decode_like_few(name: str) -> None:
    codes = ALL_CODES.flip(0).repeat(3).view(6, 128)
    few = torch.stack([DECODE[name](row) for row in codes]).nan_to_num(nan=1.0)
    assert_same_bits(DECODE[name](codes).nan_to_num(nan=1.0), few)
    assert_same_bits(DECODE[name](codes.t()).nan_to_num(nan=1.0), few.t())


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("e4m3", {0xFF: 0x7F}),
        ("e5m2", {0x7C: 0x7B, 0xFC: 0xFB} | dict.fromkeys((0x7D, 0x7E, 0xFD, 0xFE, 0xFF), 0x7F)),
        ("e8m0", {}),
    ],
)
def test_every_code_encodes_to_itself_but_nan_and_infinity(
    name: str, changed: dict[int, int]
) -> None:
    encode = ENCODE.get(name, numerics.encode_e8m0)
    expected = ALL_CODES.clone()
    for code, result in changed.items():
        expected[code] = result
    assert_same_bits(encode(DECODE[name](ALL_CODES)), expected)


def test_every_e2m1_code_decodes_and_encodes_to_itself() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = torch.tensor(E2M1_VALUES + [-v for v in E2M1_VALUES])
    assert_same_bits(numerics.decode_e2m1(codes), values)
    assert_same_bits(numerics.encode_e2m1(values), codes)


@pytest.mark.parametrize("name", list(ENCODE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encoders_round_every_16_bit_pattern_to_nearest_even(name: str, dtype: torch.dtype) -> None:
    x = every(dtype)
    assert_same_bits(ENCODE[name](x), oracle(x, name))


@pytest.mark.parametrize("name", list(ENCODE))
def test_encoders_round_float32_patterns_to_nearest_even(name: str) -> None:
    x = torch.cat([float32_patterns(2**20), midpoints(name)])
    assert_same_bits(ENCODE[name](x), oracle(x, name))


@pytest.mark.parametrize("fmt", [numerics.E4M3, numerics.E5M2], ids=lambda fmt: fmt.name)
def test_both_forms_give_the_same_bits(fmt: ElementFormat) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = every(dtype).float()
        assert_same_bits(elements._encode_by_bits(x, fmt), elements._encode_by_cast(x, fmt))
    x = torch.cat([float32_patterns(2**22), midpoints(fmt.name)])
    assert_same_bits(elements._encode_by_bits(x, fmt), elements._encode_by_cast(x, fmt))
    by_bits, known = elements._decode_by_bits(ALL_CODES, fmt), DECODE[fmt.name](ALL_CODES)
    assert_same_bits(by_bits.nan_to_num(nan=1.0), known.nan_to_num(nan=1.0))


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        pytest.param("e4m3", 464.0, 0x7E, id="e4m3-tie-above-max"),
        pytest.param("e4m3", -INF, 0xFE, id="e4m3-negative-infinity"),
        pytest.param("e4m3", -NAN, 0x7F, id="e4m3-negative-nan"),
        pytest.param("e4m3", -0.0, 0x80, id="e4m3-negative-zero"),
        pytest.param("e4m3", 2.0**-10, 0x00, id="e4m3-tie-to-zero"),
        pytest.param("e4m3", 2.0**-10 * (1 + 2.0**-23), 0x01, id="e4m3-above-tie-to-zero"),
        pytest.param("e4m3", -(2.0**-149), 0x80, id="e4m3-negative-underflow"),
        pytest.param("e5m2", 61440.0, 0x7B, id="e5m2-where-the-cast-gives-infinity"),
        pytest.param("e5m2", INF, 0x7B, id="e5m2-infinity"),
        pytest.param("e5m2", 2.0**-17, 0x00, id="e5m2-tie-to-zero"),
        pytest.param("e2m1", 5.0, 6, id="e2m1-tie-to-even"),
        pytest.param("e2m1", -INF, 15, id="e2m1-negative-infinity"),
        pytest.param("e2m1", -NAN, 7, id="e2m1-negative-nan"),
        pytest.param("e2m1", -0.25, 8, id="e2m1-negative-tie-to-zero"),
    ],
)
def test_edges_have_these_codes(name: str, value: float, code: int) -> None:
    assert ENCODE[name](torch.tensor([value])).tolist() == [code]


def test_names_choose_the_format() -> None:
    x = torch.tensor([300.0, 57344.0])
    assert numerics.encode(x, "e4m3").tolist() == [0x79, 0x7E]
    assert numerics.encode(x, "e5m2").tolist() == [0x5D, 0x7B]
    assert numerics.decode(torch.tensor([0x40], dtype=torch.uint8), "e5m2").tolist() == [2.0]
    for call in (numerics.encode, numerics.decode):
        message = "a one-byte element format must be 'e4m3' or 'e5m2', got 'e2m1'; use one of these"
        with pytest.raises(QuantizerError, match=f"^{re.escape(message)}$"):
            call(x, "e2m1")


@pytest.mark.parametrize(
    ("fmt", "name", "largest", "bits"),
    [
        (numerics.E4M3, "e4m3", numerics.E4M3_MAX, 8),
        (numerics.E5M2, "e5m2", numerics.E5M2_MAX, 8),
        (numerics.E2M1, "e2m1", numerics.E2M1_MAX, 4),
    ],
)
def test_element_formats_agree_with_their_tables(
    fmt: ElementFormat, name: str, largest: float, bits: int
) -> None:
    grid = positive_values(name)
    assert numerics.element_format(name) is fmt
    assert fmt.bits == bits
    assert fmt.max == largest == grid[-1]
    assert fmt.max_code == len(grid) - 1
    assert fmt.min_subnormal == grid[1]
    assert fmt.min_normal == grid[1 << fmt.mantissa_bits]
    if fmt.torch_dtype is not None:
        assert fmt.max == torch.finfo(getattr(torch, fmt.torch_dtype)).max


def test_unknown_element_format_is_refused() -> None:
    message = "element format must be 'e4m3', 'e5m2' or 'e2m1', got 'e3m2'; use one of these names"
    with pytest.raises(QuantizerError, match=f"^{re.escape(message)}$"):
        numerics.element_format("e3m2")


def test_two_codes_are_packed_with_the_even_one_low() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1)
    assert_same_bits(numerics.pack_e2m1(pairs).flatten(), codes)
    assert_same_bits(numerics.unpack_e2m1(codes.view(256, 1)), pairs)
    assert numerics.pack_e2m1(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]
    assert numerics.pack_e2m1(torch.zeros(3, 0, dtype=torch.uint8)).shape == (3, 0)


@pytest.mark.parametrize("shape", [(4, 7), ()])
def test_an_odd_last_axis_is_not_packed(shape: tuple[int, ...]) -> None:
    message = (
        "e2m1: the last axis of codes must be a multiple of 2 to be packed two a byte, "
        f"got shape {shape}; pad it with a zero first"
    )
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        numerics.pack_e2m1(torch.zeros(shape, dtype=torch.uint8))


def test_a_scalar_is_not_unpacked() -> None:
    message = "e2m1: packed must have at least 1 axis, got shape (); give it one of size 1"
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        numerics.unpack_e2m1(torch.zeros((), dtype=torch.uint8))


@pytest.mark.parametrize("name", [*ENCODE, *SCALES])
def test_values_of_another_dtype_are_refused(name: str) -> None:
    prefix = name if name in ENCODE else "e8m0"
    message = (
        f"{prefix}: x must be float32, bfloat16 or float16, got torch.float64; "
        "convert it with x.float() first"
    )
    with pytest.raises(DtypeError, match=f"^{re.escape(message)}$"):
        (ENCODE | SCALES)[name](torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("e4m3", numerics.decode_e4m3),
        ("e5m2", numerics.decode_e5m2),
        ("e2m1", numerics.decode_e2m1),
        ("e2m1", numerics.pack_e2m1),
        ("e2m1", numerics.unpack_e2m1),
        ("e8m0", numerics.decode_e8m0),
        ("e8m0", numerics.e8m0_reciprocal),
    ],
)
def test_codes_of_another_dtype_are_refused(name: str, call: Callable[[Tensor], Tensor]) -> None:
    message = f"{name}: codes must be uint8, got torch.int8; view its bytes as uint8"
    with pytest.raises(DtypeError, match=f"^{re.escape(message)}$"):
        call(torch.zeros(2, dtype=torch.int8))


def all_encoders(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(encode(x) for encode in (ENCODE | SCALES).values())


def all_decoders(codes: Tensor) -> tuple[Tensor, ...]:
    packed = numerics.pack_e2m1(codes & 0xF)
    unpacked = numerics.unpack_e2m1(packed)
    return (
        *(decode(codes) for decode in DECODE.values()),
        numerics.decode_e2m1(unpacked),
        numerics.e8m0_reciprocal(codes),
        packed,
    )


@pytest.mark.parametrize("call", [all_encoders, all_decoders])
def test_layout_and_device_of_the_input_do_not_matter(
    call: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    x = float32_patterns(64)[:72] if call is all_encoders else ALL_CODES[:72]
    x = x.reshape(6, 12)
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    for from_strided, expected in zip(call(strided), call(x), strict=True):
        assert_same_bits(from_strided.nan_to_num(), expected.nan_to_num())
    for empty in call(x[:0]):
        assert empty.numel() == 0
    for on_meta, expected in zip(call(x.to("meta")), call(x), strict=True):
        assert on_meta.is_meta
        assert (on_meta.shape, on_meta.dtype) == (expected.shape, expected.dtype)
    real = call(x)
    with FakeTensorMode() as mode:
        for fake, expected in zip(call(mode.from_tensor(x)), real, strict=True):
            assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype)


def test_encoding_leaves_its_input_and_its_graph_alone() -> None:
    x = torch.tensor([-NAN, 1.0, 500.0], requires_grad=True)
    before = x.detach().clone()
    assert not any(codes.requires_grad for codes in all_encoders(x))
    assert_same_bits(x.detach(), before)


@pytest.fixture(params=[False, True], ids=["by-bits", "by-cast"])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a graph to encode and decode, whatever this machine would choose."""
    monkeypatch.setattr(loops, "_AVX512", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("either_form")
def test_compiled_encoders_give_the_eager_bits_in_one_graph(dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        x = torch.cat([float32_patterns(2**20), *map(midpoints, ENCODE)])
    else:
        x = every(dtype)
    with count_compiles() as counts:
        compiled = torch.compile(all_encoders, fullgraph=True, dynamic=True)
        # the ragged length ends in the scalar tail of the vector loop
        for length in (len(x), len(x) - 3, 37):
            part = x[:length].clone()
            for actual, expected in zip(compiled(part), all_encoders(part), strict=True):
                assert_same_bits(actual, expected)
    assert (counts.graphs, counts.recompiles) == (1, 0)


@pytest.mark.usefixtures("either_form")
def test_compiled_decoders_give_the_eager_bits_in_one_graph() -> None:
    with count_compiles() as counts:
        compiled = torch.compile(all_decoders, fullgraph=True, dynamic=True)
        for codes in (ALL_CODES, ALL_CODES[:38].clone()):
            for actual, expected in zip(compiled(codes), all_decoders(codes), strict=True):
                number = ~expected.isnan()
                assert_same_bits(actual[number], expected[number])
                assert actual[~number].isnan().all()
    assert (counts.graphs, counts.recompiles) == (1, 0)
