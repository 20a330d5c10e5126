# SPDX-License-Identifier: Apache-2.0
"""The bytes depend on the values alone: not on strides, memory, threads or what ran before."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from te_proto.tensor import fallback
from te_proto.testing.conformance.base import Case, Kit
from te_proto.testing.conformance.draws import cases
from te_proto.testing.facts import assert_same_bytes, assert_same_facts, copied
from te_proto.testing.poison import poisoned_allocations

if TYPE_CHECKING:
    from torch import Tensor


class InputConformance(Kit):
    """Inputs as they come, memory as it is."""

    def test_non_contiguous_input_gives_the_bytes_of_a_contiguous_one(self) -> None:
        """Transposed, strided, expanded, in the middle of a storage: pytorch/ao#4470."""

        def check(case: Case) -> None:
            x = case.input()
            for name, view in _views_equal_to(x).items():
                expected = self.quantize(case.quantizer, view.contiguous())
                made = self.quantize(case.quantizer, view)
                what = f"{case}, {name} input of strides {view.stride()}"
                assert_same_facts(made, expected, what)
                assert_same_bytes(made, expected, what)
                out = case.proto().create_tensor()
                self.quantize_into(case.quantizer, view, out)
                assert_same_bytes(out, expected, f"{what}: quantize_into()")

        self.explore(check, cases(self), self.fixed())

    def test_channels_last_input_gives_the_bytes_of_a_contiguous_one(self) -> None:
        """Four axes, the second of them the innermost."""

        def check(case: Case) -> None:
            x = case.input().contiguous(memory_format=torch.channels_last)
            expected = self.quantize(case.quantizer, x.contiguous())
            assert_same_facts(self.quantize(case.quantizer, x), expected, f"{case}: channels last")
            assert_same_bytes(self.quantize(case.quantizer, x), expected, f"{case}: channels last")

        found = []
        for quantizer in self.variants():
            rows, columns = self.shape_for(quantizer)
            shape = (2, 3, rows, columns)
            dtypes = self.taken(quantizer, shape)
            found += [Case(quantizer, shape, dtypes[-1])] if dtypes else []
        self.explore(check, None, found)

    def test_no_byte_depends_on_what_memory_held(self) -> None:
        """Padding and ragged edges are written: vllm-project/vllm#37564."""

        def check(case: Case) -> None:
            x = case.input(nonfinite=self.nonfinite)
            made = {}
            for byte in (0x00, 0xFF):
                with poisoned_allocations(byte):
                    tensor = self.quantize(case.quantizer, x)
                    made[byte] = copied(tensor) | {"dequantize()": tensor.dequantize()}
            assert_same_bytes(made[0xFF], made[0x00], f"{case}: in memory of 0xFF and of 0x00")

        self.explore(check, cases(self), self.fixed())

    def test_quantizing_again_gives_the_same_bytes(self) -> None:
        """Also after another input, for no state is kept."""

        def check(case: Case) -> None:
            first = copied(self.quantize(case.quantizer, case.input()))
            self.quantize(case.quantizer, case.input(1) * 4)
            again = self.quantize(case.quantizer, case.input())
            assert_same_bytes(again, first, f"{case}: quantized again")
            plain = again.dequantize()
            assert_same_bytes(again.dequantize(), plain, f"{case}: dequantized again")

        self.explore(check, cases(self), self.fixed())

    def test_inference_mode_gives_the_same_bytes(self) -> None:
        """Made, transposed and read there, and read outside: pytorch/ao#3488."""

        def check(case: Case) -> None:
            x = case.input()
            expected = self.quantize(case.quantizer, x)
            with torch.inference_mode():
                made = self.quantize(case.quantizer, x)
                inside = made.dequantize()
                if not case.quantizer.internal:
                    with fallback("allow"):
                        turned = made.t()
                    shape = tuple(turned.shape)
                    assert shape == case.shape[::-1], f"{case}: t() in inference mode: {shape}"
            assert_same_bytes(made, expected, f"{case}: made in inference mode")
            assert_same_bytes(inside, expected.dequantize(), f"{case}: read in inference mode")
            assert_same_bytes(made.dequantize(), inside, f"{case}: read after inference mode")

        self.explore(check, None, self.fixed())

    def test_autocast_changes_no_byte(self) -> None:
        """Nor the dtype of what is read and of a gradient: pytorch/ao#1306, pytorch/ao#2587."""

        def check(case: Case) -> None:
            x = case.input().requires_grad_()
            made = self.quantize(case.quantizer, x)
            low = torch.float16 if case.dtype == torch.bfloat16 else torch.bfloat16
            what = f"{case}: under autocast to {low}"
            with torch.autocast("cpu", dtype=low):
                again = self.quantize(case.quantizer, x)
                plain, wide = made.dequantize(), made.dequantize(torch.float32)
                (grad,) = torch.autograd.grad(plain, x, torch.ones_like(plain))
            assert_same_facts(again, made, what)
            assert_same_bytes(again, made, what)
            for found, dtype in ((plain, case.dtype), (wide, torch.float32)):
                label = f"{what}: dequantize() to {dtype}"
                assert_same_bytes(found.detach(), made.dequantize(dtype).detach(), label)
            assert grad.dtype == case.dtype, f"{what}: the gradient is {grad.dtype}"

        self.explore(check, None, self.fixed(internal=(False,)))

    def test_quantized_input_is_taken_for_its_values(self) -> None:
        """What stands for the same values is quantized to the same bytes."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            plain = made.dequantize()
            expected = self.quantize(case.quantizer, plain)
            assert_same_bytes(self.quantize(case.quantizer, made), expected, f"{case}: of itself")

        self.explore(check, None, self.fixed())

    def test_threads_share_a_quantizer(self) -> None:
        """Forward and backward from several at once: NVIDIA/TransformerEngine#3203."""
        found = [c for c in self.fixed() if "group" not in c.quantizer.call_arguments()]

        def run(case: Case) -> dict[str, Tensor]:
            x = case.input().requires_grad_(not case.quantizer.internal)
            made = self.quantize(case.quantizer, x)
            plain = made.dequantize()
            out = {**copied(made), "dequantize()": plain.detach()}
            if plain.requires_grad:
                plain.backward(torch.ones_like(plain))
                assert x.grad is not None
                out["grad"] = x.grad
            return out

        expected = [run(case) for case in found]
        count = 8
        together = threading.Barrier(count, timeout=60)

        def all_of_them(thread: int) -> list[dict[str, Tensor]]:
            together.wait()
            order = [(i + thread) % len(found) for i in range(len(found))]
            made = {i: run(found[i]) for i in order}
            return [made[i] for i in range(len(found))]

        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(all_of_them, range(count)))
        for made in results:
            for case, buffers, wanted in zip(found, made, expected, strict=True):
                assert_same_bytes(buffers, wanted, f"{case}: in one of {count} threads")


def _views_equal_to(x: Tensor) -> dict[str, Tensor]:
    """Return tensors of the shape of ``x`` that are not contiguous, most of them equal to it."""
    shape = tuple(x.shape)
    storage = x.new_zeros(math.prod(shape) + 5)
    inside = storage[5:].view(shape)
    inside.copy_(x)
    found = {
        "offset": inside,
        "transposed": x.movedim(-1, 0).contiguous().movedim(0, -1),
        "expanded": x[..., :1].expand(shape) if shape[-1] else x,
        "one value": x.new_full((), 3.0).expand(shape),
        "every second": torch.stack([x, x], -1)[..., 0],
    }
    if len(shape) > 1:
        found["strided"] = torch.cat([x, x.flip(-1)], -1)[..., : shape[-1]]
        found["expanded rows"] = x[:1].expand(shape) if shape[0] else x
        found["outer axes swapped"] = x.transpose(0, -2).contiguous().transpose(0, -2)
    return found
