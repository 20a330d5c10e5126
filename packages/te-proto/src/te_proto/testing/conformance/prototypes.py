# SPDX-License-Identifier: Apache-2.0
"""A prototype says all that is true of the tensor, in every mode, and refuses what it refuses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_proto.errors import DeviceError, ShapeError, UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.proto import eval_proto, to_tensor_proto
from te_proto.testing.conformance.base import Case, Kit, cuda_may_be_missing
from te_proto.testing.conformance.draws import any_cases, cases
from te_proto.testing.facts import (
    assert_same_bytes,
    assert_same_facts,
    buffers,
    refusal,
)
from te_proto.testing.poison import poisoned_allocations

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE = ((2**20, 2**12 + 32), (70000, 70000), (3, 2**16, 2**15))


class PrototypeConformance(Kit):
    """Prototype against real result."""

    # -- facts in every mode ----------------------------------------------------------------------

    def test_prototype_is_the_real_tensor(self) -> None:
        """Buffers, their order, shapes, strides and dtypes: NVIDIA/TransformerEngine#3153."""

        def check(case: Case) -> None:
            real = self.quantize(case.quantizer, case.input())
            proto = case.proto()
            assert to_tensor_proto(real) == proto.at_rest(), f"{case}: prototype of the result"
            assert_same_facts(proto.create_tensor(), real, f"{case}: create_tensor()")
            inner = dict(zip(proto.inner_names(), proto.create_inner_tensors(), strict=True))
            assert_same_facts(proto.assemble(inner), real, f"{case}: assemble()")
            assert proto.create_metadata() == real.__tensor_flatten__()[1], f"{case}: metadata"

        self.explore(check, cases(self), self.fixed())
        self.explore(self._unless_refused(check), any_cases(self))

    def test_fake_is_the_real_tensor(self) -> None:
        """Under FakeTensorMode, as a CPU tensor and as a CUDA tensor."""

        def check(case: Case) -> None:
            real = self.quantize(case.quantizer, case.input())
            plain = real.dequantize()
            for device in ("cpu", "cuda"):
                with FakeTensorMode(), cuda_may_be_missing():
                    x = torch.empty(case.shape, dtype=case.dtype, device=device)
                    fake = self.quantize(case.quantizer, x)
                    what = f"fake on {device}: {case}"
                    assert fake.device.type == device, f"{what}: is on {fake.device}"
                    assert_same_facts(fake, real, what, ignore=("device",))
                    back = fake.dequantize()
                    assert_same_facts(back, plain, f"{what}: dequantize()", ignore=("device",))

        self.explore(check, cases(self), self.fixed())

    def test_meta_is_the_real_tensor(self) -> None:
        """On the meta device: NVIDIA/TransformerEngine#2519."""

        def check(case: Case) -> None:
            real = self.quantize(case.quantizer, case.input())
            x = torch.empty(case.shape, dtype=case.dtype, device=torch.device("meta"))
            meta = self.quantize(case.quantizer, x)
            assert_same_facts(meta, real, f"meta: {case}", ignore=("device",))
            back, plain = meta.dequantize(), real.dequantize()
            assert_same_facts(back, plain, f"meta: {case}: dequantize()", ignore=("device",))
            assert_same_facts(meta, case.proto("meta").create_tensor(), f"meta: {case}")

        self.explore(check, cases(self), self.fixed())

    def test_eval_proto_is_the_real_tensor(self) -> None:
        """What a function of prototypes returns, without data."""

        def check(case: Case) -> None:
            def there_and_back(x: torch.Tensor) -> Any:
                made = self.quantize(case.quantizer, x)
                return made, made.dequantize()

            plain = case.proto().replace(quantizer=None)
            real = tuple(to_tensor_proto(t) for t in there_and_back(case.input()))
            assert eval_proto(there_and_back, plain) == real, f"eval_proto: {case}"

        self.explore(check, None, self.fixed())

    def test_dequantize_has_the_dtype_that_is_asked_for(self) -> None:
        """Dense, of the logical shape, in every dtype."""

        def check(case: Case) -> None:
            real = self.quantize(case.quantizer, case.input())
            for dtype in (None, *INPUT_DTYPES):
                expected = torch.empty(case.shape, dtype=dtype or case.dtype)
                assert_same_facts(real.dequantize(dtype), expected, f"{case}: dequantize({dtype})")

        self.explore(check, cases(self), self.fixed())

    # -- memory -----------------------------------------------------------------------------------

    def test_nbytes_are_those_held(self) -> None:
        """Of each buffer and all of them, against the storages: padding counts, once."""

        def check(case: Case) -> None:
            proto, real = case.proto(), self.quantize(case.quantizer, case.input())
            for made, how in ((real, "quantize()"), (proto.create_tensor(), "create_tensor()")):
                storages = {n: t.untyped_storage() for n, t in buffers(made).items()}
                held = {n: s.nbytes() for n, s in storages.items()}
                assert proto.buffer_nbytes() == held, f"{case}: bytes of buffers of {how}"
                assert made.nbytes == proto.nbytes == sum(held.values()), f"{case}: {how}"
                if not case.quantizer.internal:
                    said = made.untyped_storage().nbytes()
                    assert said in (0, proto.nbytes), f"{case}: {how} says its storage has {said}"
                places = [s.data_ptr() for s in storages.values() if s.nbytes()]
                assert len(set(places)) == len(places), f"{case}: buffers of {how} share memory"

        self.explore(check, cases(self), self.fixed())

    def test_64_bit_sizes_are_exact(self) -> None:
        """Beyond 2**31 elements, without allocating: NVIDIA/TransformerEngine#3136."""
        for quantizer in self.variants():
            for shape in HUGE:
                rows, columns = quantizer.alignment()
                size = (*shape[:-2], _up(shape[-2], rows), _up(shape[-1], columns))
                taken = self.taken(quantizer, size)
                if not taken:
                    continue
                case = Case(quantizer, size, taken[0])
                proto = case.proto("meta")
                specs = proto.inner_specs()
                exact = sum(math.prod(s.shape) * s.dtype.itemsize for s in specs.values())
                assert proto.numel == math.prod(size) > 2**31, f"{case}: numel {proto.numel}"
                assert proto.nbytes == exact, f"{case}: nbytes {proto.nbytes}, expected {exact}"
                # a tenth of a byte an element is less than any code takes
                assert exact > math.prod(size) // 10, f"{case}: {exact} bytes hold no codes"
                real = self.quantize(quantizer, torch.empty(size, dtype=case.dtype, device="meta"))
                assert_same_facts(proto.create_tensor(), real, f"{case} on meta")
                assert real.nbytes == exact, f"{case}: the tensor has nbytes {real.nbytes}"

    def test_writes_the_same_bytes_into_tensors_made_of_prototypes(self) -> None:
        """``quantize_into`` fills every byte of an allocation, whatever it held.

        By every option, which one path alone may drop: pytorch/ao#3686.
        """

        def check(case: Case) -> None:
            x = case.input()
            expected = self.quantize(case.quantizer, x)
            for byte in (0x00, 0xFF):
                with poisoned_allocations(byte):
                    made = case.proto().create_tensor()
                self.quantize_into(case.quantizer, x, made)
                assert_same_bytes(made, expected, f"{case}: into memory full of {byte:#04x}")

        self.explore(check, cases(self), self.fixed())

    # -- shapes -----------------------------------------------------------------------------------

    def test_zero_size_keeps_shape_and_padding(self) -> None:
        """No rows, no columns, in 2 and 3 axes; forward and backward.

        Seen in NVIDIA/TransformerEngine#2779: an expert that received no token.
        """

        def check(case: Case) -> None:
            x = torch.empty(case.shape, dtype=case.dtype, requires_grad=True)
            made = self.quantize(case.quantizer, x)
            assert tuple(made.shape) == case.shape, f"{case}: shape {tuple(made.shape)}"
            expected = case.proto(requires_grad=not case.quantizer.internal).create_tensor()
            assert_same_facts(made, expected, f"{case}: zero-size")
            back = made.dequantize()
            plain = torch.empty(case.shape, dtype=case.dtype)
            assert_same_facts(back.detach(), plain, f"{case}: dequantize()")
            if not case.quantizer.internal:
                back.sum().backward()
                assert x.grad is not None, f"{case}: no gradient"
                assert x.grad.shape == x.shape, f"{case}: gradient of shape {tuple(x.grad.shape)}"

        found = []
        for quantizer in self.variants():
            rows, columns = self.shape_for(quantizer)
            for shape in ((0, columns), (rows, 0), (2, 0, columns), (0, rows, columns), (0, 0)):
                dtypes = self.taken(quantizer, shape)
                found += [Case(quantizer, shape, dtypes[0])] if dtypes else []
        assert found, f"{self.format_name}: no zero-size shape is taken"
        self.explore(check, None, found)

    def test_shape_refusal_is_the_same_everywhere(self) -> None:
        """Non-multiples are refused before anything is allocated, and by everyone alike."""

        def check(case: Case) -> None:
            expected = refusal(lambda: case.proto().inner_specs())
            makers = self._makers(case)
            of_calls = refusal(makers["quantize()"])
            for how, call in makers.items():
                found = refusal(call)
                if how.startswith("quantize"):  # which may refuse options and dtype as well
                    assert found == of_calls, f"{how} of {case}: {found}, quantize(): {of_calls}"
                    if found is not None and found.kind is not ShapeError:
                        continue
                assert found == expected, f"{how} of {case}: {found}, the prototype: {expected}"
            if expected is None:
                return
            assert expected.kind is ShapeError, f"{case}: {expected}"
            message = expected.message
            assert message.startswith(f"{self.format_name}: "), f"{case}: no format: {message!r}"
            shown = {str(case.shape)} if case.shape else {"0-d", "()"}
            assert any(text in message for text in shown), (
                f"{case}: the shape given is not named in {message!r}"
            )
            assert ", got " in message, f"{case}: no '<rule>, got <value>': {message!r}"

        self.explore(check, any_cases(self), self._around_the_alignment())

    def test_alignment_is_the_multiple_that_is_needed(self) -> None:
        """Who pads to :meth:`alignment` is never refused, who misses it always.

        Seen in modelscope/ms-swift#9723: padded as a whole, but not the shard of each rank; what
        is needed must be known before, NVIDIA/TransformerEngine#2966.
        """
        for quantizer in self.variants():
            rows, columns = quantizer.alignment()
            for ranks in (1, 4):
                shape = (3 * rows * ranks, 5 * columns)
                assert refusal(lambda: quantizer.check_shape(shape)) is None, (  # noqa: B023
                    f"{quantizer}: refuses {shape}, a multiple of its alignment {rows, columns}"
                )
            for multiple, shape in (
                (rows, (3 * rows + 1, 5 * columns)),
                (columns, (3 * rows, 5 * columns + 1)),
            ):
                found = refusal(lambda: quantizer.check_shape(shape))  # noqa: B023
                if multiple == 1:
                    assert found is None, f"{quantizer}: alignment 1, but {shape} is refused"
                    continue
                assert found, f"{quantizer}: alignment {rows, columns}, but {shape} is taken"
                assert f"multiple of {multiple}" in found.message, (
                    f"{quantizer}: the multiple {multiple} is not named in {found.message!r}"
                )

    def test_logical_shape_does_not_depend_on_the_planes(self) -> None:
        """Of a columnwise tensor and after dropping planes: NVIDIA/TransformerEngine#3266.

        Also with no plane left: NVIDIA/TransformerEngine#2841.
        """

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            assert tuple(made.shape) == case.shape, f"{case}: shape {tuple(made.shape)}"
            kept = case.quantizer
            for plane in ("rowwise", "columnwise"):
                kept = kept.with_usage(**{plane: False})
                try:
                    fewer = made.with_usage(rowwise=kept.rowwise, columnwise=kept.columnwise)
                except UsageError:  # a format may want to keep one plane
                    left = kept.rowwise or kept.columnwise
                    assert not left, f"{case}: cannot drop {plane}"
                    continue
                what = f"{case} without {plane}"
                assert tuple(fewer.shape) == case.shape, f"{what}: shape {tuple(fewer.shape)}"
                proto = to_tensor_proto(fewer)
                assert proto.shape == case.shape, f"{what}: prototype of shape {proto.shape}"
                assert_same_facts(fewer, proto.create_tensor(), what)

        self.explore(check, cases(self), self.fixed())

    def test_device_is_required_to_make_a_tensor(self) -> None:
        """Questions need none, and a missing one is named."""
        case = self.fixed()[0]
        proto = case.proto(None)
        assert proto.nbytes == case.proto().nbytes
        found = refusal(proto.create_tensor)
        assert found, f"{case}: made without a device"
        assert found.kind is DeviceError, f"{case}: {found}"

    # -- helpers ----------------------------------------------------------------------------------

    def _makers(self, case: Case) -> dict[str, Callable[[], object]]:
        """Return every way to come by a tensor of the case."""

        def quantize(device: str) -> Callable[[], object]:
            return lambda: self.quantize(
                case.quantizer, torch.zeros(case.shape, dtype=case.dtype, device=device)
            )

        def fake() -> object:
            with FakeTensorMode():
                return quantize("cpu")()

        q = case.quantizer
        return {
            "create_tensor()": case.proto("meta").create_tensor,
            "make_empty()": lambda: q.make_empty(case.shape, dtype=case.dtype, device="meta"),
            "alloc_tensors()": lambda: q.alloc_tensors(case.shape, "meta"),
            "quantize()": quantize("cpu"),
            "quantize() on meta": quantize("meta"),
            "quantize() of a fake": fake,
        }

    def _unless_refused(self, check: Callable[[Case], None]) -> Callable[[Case], None]:
        return lambda case: check(case) if self.refused(case) is None else None

    def _around_the_alignment(self) -> list[Case]:
        found = []
        for quantizer in self.variants():
            rows, columns = quantizer.alignment()
            shapes = ((), (columns + 1,), (rows + 1, columns), (rows, columns + 1))
            found += [Case(quantizer, shape, torch.bfloat16) for shape in shapes]
        return found


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
