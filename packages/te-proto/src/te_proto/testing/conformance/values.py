# SPDX-License-Identifier: Apache-2.0
"""What the bytes stand for: bounds of the error, and values that break scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from te_proto.testing.conformance.base import Case, Kit
from te_proto.testing.conformance.draws import cases
from te_proto.testing.facts import buffers

if TYPE_CHECKING:
    from torch import Tensor

TINY = (1e-30, 1e-35, 1e-38, 1e-40)


class ValueConformance(Kit):
    """Dequantized values."""

    def test_error_is_within_the_bound(self) -> None:
        """Of every plane, where each tile of blocks has another exponent.

        A scale rounded down saturates the maximum of its block, microsoft/microxcaling#4; rounding
        by chance must not make zeros of it all, NVIDIA/TransformerEngine#3281.
        """

        def check(case: Case) -> None:
            for power in (0, -20, 20) if case.dtype != torch.float16 else (0,):
                x = self._level(case, power)
                largest = self._largest(case, power)
                for plane, values in self.planes(self.quantize(case.quantizer, x)).items():
                    bound = self.error_bound(case.quantizer, columnwise=plane == "columnwise")
                    error = (values - x.float()).abs() / largest
                    worst = float(error.max()) if error.numel() else 0.0
                    assert worst <= bound, (
                        f"{case}: {plane} plane of values around 2**{power} is off by {worst:.4f} "
                        f"of the largest magnitude of its block, the bound is {bound:.4f}"
                    )

        self.explore(check, cases(self, rank=(2, 3)), self.fixed())

    def test_both_planes_stand_for_the_input(self) -> None:
        """No plane is that of another tensor, or transposed: a ramp tells every place apart."""

        def check(case: Case) -> None:
            count = case.proto().numel
            x = torch.linspace(0.5, 1.0, count).view(case.shape).to(case.dtype)
            for plane, values in self.planes(self.quantize(case.quantizer, x)).items():
                bound = self.error_bound(case.quantizer, columnwise=plane == "columnwise")
                worst = float((values - x.float()).abs().max()) if count else 0.0
                assert worst <= bound, f"{case}: {plane} plane is off by {worst:.4f} at most 1.0"

        self.explore(check, cases(self), self.fixed())

    def test_quantizing_what_was_quantized_changes_next_to_nothing(self) -> None:
        """Values that have codes keep them."""

        def check(case: Case) -> None:
            if "rng" in case.quantizer.call_arguments():
                return  # chance may round a value that float32 moved by an ulp
            if torch.float32 not in self.taken(case.quantizer, case.shape):
                return  # values would be rounded on the way
            x = self._level(case, 0).float()
            for plane, once in self.planes(self.quantize(case.quantizer, x)).items():
                twice = self.planes(self.quantize(case.quantizer, once))[plane]
                worst = float((twice - once).abs().max() / once.abs().max().clamp_min(1e-30))
                assert worst <= 2**-20, f"{case}: {plane} plane moves by {worst} of its maximum"

        self.explore(check, None, self.fixed())

    # -- special values ---------------------------------------------------------------------------

    def test_zeros_are_zero(self) -> None:
        """A whole tensor, and a tile among others, of either sign.

        Seen in huggingface/kernels-community#681 and vllm-project/compressed-tensors#595: 0/0, and
        an infinite scale.
        """

        def check(case: Case) -> None:
            for zero in (0.0, -0.0):
                x = torch.full(case.shape, zero, dtype=case.dtype)
                self._assert_zero(case, x, f"all {zero}")
                mixed = self._level(case, 0)
                tile = self.tile()
                mixed[..., :tile, :tile] = zero
                if 0 not in self.card().block:
                    self._assert_zero(case, mixed, f"a tile of {zero}")

        self.explore(check, cases(self, rank=(2, 4)), self.fixed(tiles=2))

    def test_denormals_are_finite_and_near_or_flushed(self) -> None:
        """Scales that underflow, reciprocals that overflow: flashinfer-ai/flashinfer#2440."""

        def check(case: Case) -> None:
            info = torch.finfo(case.dtype)
            smallest = info.smallest_normal * info.eps
            for value in (*TINY, smallest, info.smallest_normal, 3 * smallest):
                x = torch.full(case.shape, value, dtype=case.dtype)
                self._assert_near_or_zero(case, x, f"all {value}")
                x.view(-1)[::2] = 0
                self._assert_near_or_zero(case, x, f"{value} and zeros")

        self.explore(check, cases(self, rank=(2, 3)), self.fixed())

    def test_extreme_amax_has_finite_scales(self) -> None:
        """The smallest and the largest maximum of a dtype: Azure/MS-AMP#131."""

        def check(case: Case) -> None:
            info = torch.finfo(case.dtype)
            for value in (info.smallest_normal * info.eps, 1e-38, 1.0, 0.9 * info.max, -info.max):
                x = torch.zeros(case.shape, dtype=case.dtype)
                x.view(-1)[0] = value
                what = f"{case}: amax {abs(value)}"
                made = self.quantize(case.quantizer, x)
                _assert_finite_scales(made, what)
                if abs(value) > self.finite_up_to:
                    continue
                for plane, values in self.planes(made).items():
                    assert not values.isnan().any(), f"{what}: NaN in the {plane} plane"
                    back = float(values.view(-1)[0])
                    bound = self.error_bound(case.quantizer, columnwise=plane == "columnwise")
                    amax = max(abs(value), self.smallest_amax)
                    near = back == 0.0 or abs(back - float(x.view(-1)[0])) <= bound * amax * 1.001
                    # the largest numbers may round up to what no float32 is
                    near |= abs(value) == info.max and abs(back) > abs(value)
                    assert near, f"{what}: {plane} plane has {back} for it"
                    rest = values.view(-1)[self.tile() ** 2 :]
                    if 0 not in self.card().block and case.shape[0] > self.tile():
                        assert not rest[-1:].any(), f"{what}: it reaches other blocks"

        self.explore(check, None, self.fixed())

    def test_nan_and_infinity_are_quantized_without_an_error(self) -> None:
        """A step that diverged ends in a loss that says so, not in the quantizer."""

        def check(case: Case) -> None:
            for value in (math.nan, math.inf, -math.inf):
                for where in (slice(0, 1), slice(None)):
                    x = self._level(case, 0)
                    x.view(-1)[where] = value
                    made = self.quantize(case.quantizer, x)
                    assert tuple(made.dequantize().shape) == case.shape, f"{case}: with {value}"

        self.explore(check, cases(self, empty=False), self.fixed())

    def test_e8m0_scale_bytes_are_powers_of_two(self) -> None:
        """All 256 codes: 0 is 2**-127 and 255 is NaN, NVIDIA/TransformerEngine#3262.

        A byte is no number, whatever the dtype of its buffer says: jundot/omlx#2159.
        """
        if self.card().scale != "e8m0":
            pytest.skip(f"{self.format_name}: scales are {self.card().scale}")

        def check(case: Case) -> None:
            q = case.quantizer
            # a value that stays exact however it is scaled
            made = self.quantize(q, torch.ones(case.shape, dtype=case.dtype))
            for plane in self.planes(made):
                other = "columnwise" if plane == "rowwise" else "rowwise"
                one = made.with_usage(**{other: False}) if getattr(q, other) else made
                scales = [t for n, t in buffers(one).items() if "scale" in n]
                assert scales, f"{case}: no buffer of {list(buffers(one))} is named a scale"
                unit = self._with_scales(one, scales, 127)
                for code in range(256):
                    found = self._with_scales(one, scales, code)
                    wide = unit.double() * 2.0 ** (code - 127) if code < 255 else unit * math.nan
                    expected = wide.float()
                    same = torch.equal(found, expected) or (code == 255 and found.isnan().all())
                    assert same, (
                        f"{case}: {plane} scale code {code} makes {float(found.view(-1)[0])} of "
                        f"what {code - 127} powers of two make {float(expected.view(-1)[0])}"
                    )

        self.explore(check, None, self.fixed(internal=(False,))[:3])

    # -- helpers ----------------------------------------------------------------------------------

    def _exponents(self, case: Case) -> Tensor:
        """Return an exponent an element, the same in each tile; 0 where blocks are whole axes."""
        if 0 in self.card().block or case.dtype == torch.float16:
            return torch.zeros(case.shape)
        rows, columns = math.prod(case.shape[:-1]), case.shape[-1]
        tile = self.tile()
        down, across = torch.arange(rows) // tile, torch.arange(columns) // tile
        return ((down[:, None] * 3 + across * 5) % 7).float().view(case.shape)

    def _level(self, case: Case, power: int) -> Tensor:
        """Return magnitudes from a quarter to one, times two to the tile's exponent."""
        g = torch.Generator().manual_seed(1)
        x = torch.rand(case.shape, generator=g) * 0.75 + 0.25
        x *= torch.randint(2, case.shape, generator=g) * 2 - 1
        return torch.ldexp(x, self._exponents(case) + power).to(case.dtype)

    def _largest(self, case: Case, power: int) -> Tensor:
        return torch.ldexp(torch.ones(case.shape), self._exponents(case) + power)

    def _assert_zero(self, case: Case, x: Tensor, what: str) -> None:
        made = self.quantize(case.quantizer, x)
        _assert_finite_scales(made, f"{case}: {what}")
        for plane, values in self.planes(made).items():
            assert values.isfinite().all(), f"{case}: {what}: {plane} plane is not finite"
            wrong = int((values[x == 0] != 0).sum())
            assert not wrong, f"{case}: {what}: {wrong} zeros of the {plane} plane are not zero"

    def _assert_near_or_zero(self, case: Case, x: Tensor, what: str) -> None:
        made = self.quantize(case.quantizer, x)
        _assert_finite_scales(made, f"{case}: {what}")
        value = float(x.abs().max()) if x.numel() else 0.0
        for plane, values in self.planes(made).items():
            bound = self.error_bound(case.quantizer, columnwise=plane == "columnwise")
            assert values.isfinite().all(), f"{case}: {what}: {plane} plane is not finite"
            # results may be float32 subnormals themselves
            largest = max(value, self.smallest_amax)
            off = (values - x.float()).abs() > bound * largest + 2.0**-147
            wrong = off & (values != 0)
            assert not bool(wrong.any()), (
                f"{case}: {what}: {plane} plane has {float(values[wrong][0])}, neither within "
                f"{bound:.4f} of it nor 0"
            )

    def _with_scales(self, tensor: object, scales: list[Tensor], code: int) -> Tensor:
        for scale in scales:
            scale.fill_(code)
        out: Tensor = tensor.dequantize(torch.float32)  # type: ignore[attr-defined]
        return out


def _assert_finite_scales(made: object, what: str) -> None:
    """Float buffers, scales and maxima, are finite; a scale that multiplies is positive."""
    for name, buffer in buffers(made).items():
        if buffer.dtype.is_floating_point:
            assert buffer.isfinite().all(), f"{what}: {name} is not finite"
            assert not (buffer < 0).any(), f"{what}: {name} is negative"
