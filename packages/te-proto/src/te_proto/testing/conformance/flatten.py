# SPDX-License-Identifier: Apache-2.0
"""The flatten protocol, autograd and what is saved for backward."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from te_proto.errors import LayoutError
from te_proto.proto import to_tensor_proto
from te_proto.storage import prepare_for_saving, restore_from_saved
from te_proto.testing.conformance.base import Case, Kit
from te_proto.testing.conformance.draws import cases
from te_proto.testing.facts import (
    assert_same_bytes,
    assert_same_facts,
    buffers,
    pointers,
    refusal,
)

if TYPE_CHECKING:
    from torch import Tensor


def _again(tensor: Any) -> Any:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, None)


class FlattenConformance(Kit):
    """Inner tensors out and in again."""

    def test_unflatten_is_the_inverse_of_flatten(self) -> None:
        """Every fact comes back, in the same memory."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            names, context = made.__tensor_flatten__()
            assert tuple(names) == case.proto().inner_names(), f"{case}: flattens to {names}"
            assert context == case.proto().create_metadata(), f"{case}: context {context}"
            back = _again(made)
            assert_same_facts(back, made, f"{case}: unflatten")
            assert pointers(back) == pointers(made), f"{case}: unflatten copies"

        self.explore(check, cases(self), self.fixed())

    def test_flatten_context_is_a_value_without_sizes(self) -> None:
        """Sizes in it cost a compilation for each batch size, as measured in torchao."""

        def check(case: Case) -> None:
            context = self.quantize(case.quantizer, case.input()).__tensor_flatten__()[1]
            rows, columns = self.shape_for(case.quantizer, tiles=2)
            shape = (*case.shape[:-2], rows, columns)
            larger = self.quantize(case.quantizer, torch.zeros(shape, dtype=case.dtype))
            other = larger.__tensor_flatten__()[1]
            assert context == other, f"{case}: the context is {context}, of {shape} {other}"
            assert hash(context) == hash(other), f"{case}: hash of the context"
            same = pickle.loads(pickle.dumps(context))
            assert same == context, f"{case}: the context is pickled to {same}"

        self.explore(check, None, self.fixed())

    def test_inner_tensors_of_another_layout_are_refused(self) -> None:
        """One too few, in another order, of another dtype, of another shape, not contiguous."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            held, context = buffers(made), made.__tensor_flatten__()[1]
            name, first = next(iter(held.items()))
            wrong = {
                "too few": dict(list(held.items())[1:]),
                "another order": dict(reversed(list(held.items()))),
                "another dtype": held | {name: first.to(torch.float64)},
                "another shape": held | {name: first.new_empty(3, 5, 7, 11)},
                "gaps": held | {name: _with_gaps(first)},
                "two devices": held | {name: first.to("meta")},
            }
            if len(held) == 1:
                del wrong["another order"], wrong["two devices"]
            for what, inner in wrong.items():
                found = refusal(lambda: context.build(inner, case.shape))  # noqa: B023
                assert found, f"{case}: inner tensors of {what} are taken"
                assert found.kind is LayoutError, f"{case}: {what}: {found}"
                assert found.message.startswith(f"{self.format_name}: "), f"{found.message!r}"

        self.explore(check, None, self.fixed())

    def test_tensor_without_its_quantizer_is_an_error(self) -> None:
        """Its layout is unknown, which must not be guessed."""
        for case in self.fixed():
            made = self.quantize(case.quantizer, case.input())
            made.quantizer = None
            found = refusal(lambda: to_tensor_proto(made))  # noqa: B023
            assert found, f"{case}: has a prototype without a quantizer"
            assert found.kind is LayoutError, f"{case}: {found}"

    # -- autograd ---------------------------------------------------------------------------------

    def test_requires_grad_is_kept(self) -> None:
        """By the prototype, detach, flattening and the way to it: pytorch/pytorch#194318."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input().requires_grad_())
            proto = case.proto(requires_grad=True)
            leaf = proto.create_tensor()
            if case.quantizer.internal:
                for tensor in (made, leaf):
                    wanting = [n for n, t in buffers(tensor).items() if t.requires_grad]
                    assert not wanting, f"{case}: {wanting} of a bare storage require grad"
                return
            assert made.requires_grad, f"{case}: requires_grad is lost by quantize()"
            assert to_tensor_proto(made) == proto.at_rest(), f"{case}: prototype of the result"
            assert leaf.requires_grad, f"{case}: requires_grad is lost by create_tensor()"
            assert leaf.is_leaf, f"{case}: create_tensor() makes no leaf"
            again = made.detach()
            assert not again.requires_grad, f"{case}: detach() requires grad"
            again.requires_grad_()
            assert_same_facts(again, made, f"{case}: detach().requires_grad_()")
            wanting = [n for n, t in buffers(made).items() if t.requires_grad]
            assert not wanting, f"{case}: inner tensors {wanting} require grad"
            with torch.no_grad():
                quiet = self.quantize(case.quantizer, case.input().requires_grad_())
            assert not quiet.requires_grad, f"{case}: requires grad under no_grad()"

        self.explore(check, cases(self), self.fixed())

    def test_gradient_passes_straight_through(self) -> None:
        """As it came, in the input's dtype, also an expanded one: pytorch/ao#4470.

        Across the boundaries of autograd functions too: NVIDIA/TransformerEngine#3172.
        """

        def check(case: Case) -> None:
            x = case.input().requires_grad_()
            given = torch.linspace(-2, 2, x.numel()).view(x.shape).to(x.dtype)
            for what, y, grad in (
                ("dequantize()", self.quantize(case.quantizer, x).dequantize(), given),
                ("float32", self.quantize(case.quantizer, x).dequantize(torch.float32), given),
                ("expanded", self.quantize(case.quantizer, x).dequantize(), _one(x).expand_as(x)),
                (
                    "with_usage()",
                    self.quantize(case.quantizer, x).with_usage().dequantize(),
                    given,
                ),
                (
                    "an autograd function",
                    _through(self.quantize(case.quantizer, x)).dequantize(),
                    given,
                ),
            ):
                (found,) = torch.autograd.grad(y, x, grad.to(y.dtype), allow_unused=True)
                assert found is not None, f"{case}: no gradient through {what}"
                assert_same_bytes(found, grad.contiguous(), f"{case}: gradient through {what}")

        self.explore(check, cases(self, internal=(False,)), self.fixed(internal=(False,)))

    def test_saving_for_backward_keeps_every_fact(self) -> None:
        """Through autograd's saved tensors, beside plain tensors and None."""

        def check(case: Case) -> None:
            made, plain = self.quantize(case.quantizer, case.input()), torch.ones(3)
            flat, objects = prepare_for_saving(None, made, plain)
            back = restore_from_saved(objects, flat)
            assert back[0] is None
            assert back[2] is plain
            assert_same_facts(back[1], made, f"{case}: restored")
            assert_same_bytes(back[1], made, f"{case}: restored")

        self.explore(check, None, self.fixed())


class _Through(torch.autograd.Function):
    """Takes and returns a quantized tensor, whose flag torch sets without a word to Python."""

    @staticmethod
    def forward(ctx: Any, q: Any) -> Any:
        return q.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _through(q: Any) -> Any:
    out = _Through.apply(q)
    assert out.requires_grad, f"{type(q).__name__}: the flag is lost by an autograd function"
    return out


def _one(x: Tensor) -> Tensor:
    return torch.ones((), dtype=x.dtype)


def _with_gaps(t: Tensor) -> Tensor:
    """Return ``t`` with strides that leave gaps."""
    wide = t.new_empty((*t.shape, 2))
    wide[..., 0] = t
    return wide[..., 0]
