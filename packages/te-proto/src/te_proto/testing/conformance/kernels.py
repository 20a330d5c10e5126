# SPDX-License-Identifier: Apache-2.0
"""What a format does with CUDA tensors: its ops, and the kernels in them, in the interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from te_proto.errors import UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.testing import _profile
from te_proto.testing.conformance.base import Case, Kit
from te_proto.testing.conformance.draws import cases
from te_proto.testing.facts import assert_same_bytes, assert_same_facts
from te_proto.testing.poison import poisoned_allocations

if TYPE_CHECKING:
    from torch import Tensor


class KernelConformance(Kit):
    """Ops and kernels of the namespace that is named as the package is.

    A format without ops runs the same torch code everywhere, and these tests are skipped.
    """

    def namespace(self) -> str:
        """Return the torch.library namespace of the format's ops: its import name."""
        return self.card().quantizer.partition(":")[0].partition(".")[0]

    def ops(self) -> set[str]:
        """Return the names of the ops in the namespace."""
        self.starts()  # an op is known once its module is imported
        prefix = f"{self.namespace()}::"
        return {
            name.removeprefix(prefix)
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith(prefix)
        }

    def test_kernels_are_the_reference_byte_for_byte(self) -> None:
        """Quantize, into memory that held anything, and dequantize; every byte, padding too.

        By every option, which one path alone may drop: pytorch/ao#3686.
        """
        self._need_kernels()

        def check(case: Case) -> None:
            x = case.input(nonfinite=self.nonfinite)
            expected = self.quantize(case.quantizer, x)
            one, two = torch.tensor(1.0), torch.tensor(2.0)

            def run(x: Tensor, noop: Tensor, other: Tensor) -> Any:
                made = self.quantize(case.quantizer, x)
                into = case.proto("cuda").create_tensor()
                self.quantize_into(case.quantizer, x, into)
                self.quantize_into(case.quantizer, x * 2, into, noop)
                again = case.proto("cuda").create_tensor()
                self.quantize_into(case.quantizer, x, again, other)
                plain = [made.dequantize(dtype) for dtype in INPUT_DTYPES]
                return made, into, again, *plain

            found, _ = self._on_shadows(run, x, one, two)
            label = f"kernels against the reference: {case}"
            for tensor, how in zip(found, ("quantize()", "noop=1", "noop=2"), strict=False):
                assert_same_facts(tensor, expected, f"{label}: {how}")
                assert_same_bytes(tensor, expected, f"{label}: {how}")
            for plain, dtype in zip(found[3:], INPUT_DTYPES, strict=True):
                wanted = expected.dequantize(dtype)
                # which NaN a product is depends on the instruction that multiplied
                assert_same_bytes(_one_nan(plain), _one_nan(wanted), f"{label}: {dtype}")

        examples = _profile.active().interpreted
        drawn = cases(self, internal=(True,), rank=(1, 3))
        with poisoned_allocations():
            self.explore(check, drawn, self.fixed(internal=(True,)), examples=examples)

    def test_kernels_take_any_strides(self) -> None:
        """As the reference does."""
        self._need_kernels()

        def check(case: Case) -> None:
            x = case.input()
            for name, view in {
                "transposed": x.t().contiguous().t(),
                "expanded": x[:1].expand(case.shape),
                "strided": torch.stack([x, x], -1)[..., 0],
            }.items():
                expected = self.quantize(case.quantizer, view.contiguous())
                (made,), _ = self._on_shadows(lambda x: (self.quantize(case.quantizer, x),), view)
                assert_same_bytes(made, expected, f"kernels: {case}, {name} input")

        self.explore(check, None, self.fixed(internal=(True,))[:2])

    def test_kernels_take_empty_tensors(self) -> None:
        """And launch nothing, or nothing that reads."""
        self._need_kernels()

        def check(case: Case) -> None:
            x = torch.empty(case.shape, dtype=case.dtype)

            def run(x: Tensor) -> Any:
                made = self.quantize(case.quantizer, x)
                return made, made.dequantize()

            found, _ = self._on_shadows(run, x)
            expected = self.quantize(case.quantizer, x)
            assert_same_facts(found[0], expected, f"kernels: {case}")
            assert_same_bytes(found[0], expected, f"kernels: {case}")
            assert_same_facts(found[1], expected.dequantize(), f"kernels: {case}: dequantize()")

        empty = []
        for quantizer in self.variants(internal=(True,)):
            rows, columns = self.shape_for(quantizer)
            for shape in ((0, columns), (rows, 0)):
                dtypes = self.taken(quantizer, shape)
                empty += [Case(quantizer, shape, dtypes[0])] if dtypes else []
        self.explore(check, None, empty)

    def test_every_op_passes_opcheck(self) -> None:
        """Schema, fake, autograd and tracing of each op, on arguments that the format gives it."""
        names = self.ops()
        self._need_kernels()
        seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        for case in self.fixed(internal=(True,), tiles=1, extra=0):
            for op, args in self._exercise(case):
                seen.setdefault(op.name().partition("::")[2], (op, args))
            if names <= seen.keys():
                break
        missing = sorted(names - seen.keys())
        assert not missing, (
            f"{self.format_name}: no use of {self.starts()} reaches the ops {missing}"
        )
        for name, (op, args) in seen.items():
            with self._interpreted():
                results = torch.library.opcheck(op, args, raise_exception=False)
            wrong = {test: result for test, result in results.items() if result != "SUCCESS"}
            assert not wrong, f"{self.namespace()}::{name}: opcheck: {wrong}"

    def test_result_of_each_op_is_what_its_prototype_says(self) -> None:
        """Checked where it runs, by the core's own check."""
        self._need_kernels()
        with mock.patch.dict(os.environ, {"TE_PROTO_CHECK": "1"}):
            for case in self.fixed(internal=(True,))[:: len(self.starts())]:
                self._exercise(case)

    # -- helpers ----------------------------------------------------------------------------------

    def _need_kernels(self) -> None:
        if not self.ops():
            pytest.skip(f"{self.format_name}: no ops of the namespace {self.namespace()!r}")
        if importlib.util.find_spec("triton") is None:
            pytest.skip(f"{self.format_name}: triton is not installed, which its kernels need")

    def _interpreted(self) -> Any:
        from te_proto.testing.interpreter import cpu_launches_interpreted

        return cpu_launches_interpreted()

    def _on_shadows(self, run: Any, *inputs: Tensor) -> tuple[Any, Any]:
        from te_proto.testing.conformance.shadow import on_shadows

        return on_shadows(self.namespace(), run, *inputs)

    def _exercise(self, case: Case) -> list[tuple[Any, tuple[Any, ...]]]:
        """Return the ops that every use of a case calls, with their arguments."""

        def run(x: Tensor) -> Any:
            made = self.quantize(case.quantizer, x)
            self.quantize_into(case.quantizer, x, made)
            plain = made.dequantize()
            for plane, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
                with contextlib.suppress(UsageError):  # not every plane can be derived
                    fewer = made.with_usage(**{plane: True, other: False})
                    fewer.dequantize()
                    fewer.with_usage(**{other: True})
            return (plain,)

        # no NaN, which opcheck would not find equal to itself
        x = torch.linspace(-1, 1, case.proto().numel).view(case.shape).to(case.dtype)
        _, shadow = self._on_shadows(run, x)
        calls: list[tuple[Any, tuple[Any, ...]]] = shadow.calls
        return calls


def _one_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.nan, values)
