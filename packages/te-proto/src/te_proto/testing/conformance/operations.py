# SPDX-License-Identifier: Apache-2.0
"""What torch ops refuse of a quantized tensor, and how it stands beside plain ones."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from te_proto.custom_ops import CustomOp, custom_op
from te_proto.errors import DeviceError, DtypeError, LayoutError, ShapeError, UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.numerics import decode_e2m1, unpack_e2m1, unswizzle
from te_proto.proto import TensorProto, to_tensor_proto
from te_proto.tensor import FallbackWarning, fallback
from te_proto.testing.conformance.base import Case, Kit, named
from te_proto.testing.facts import (
    assert_same_bytes,
    assert_same_facts,
    buffers,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from te_proto.gemm import GemmOperand


class OperationConformance(Kit):
    """Torch ops, ops of others and products."""

    def test_misuse_is_refused_by_name(self) -> None:
        """Axes that are not there, bits seen as another dtype, a storage it does not have."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            rows, columns = case.shape
            taller = self.quantize(case.quantizer, torch.cat([case.input()] * 2))
            other = torch.zeros(3, dtype=case.dtype)
            calls: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
                "narrow(5, 0, 1)": (lambda: made.narrow(5, 0, 1), IndexError, "5"),
                "transpose(0, 7)": (lambda: made.transpose(0, 7), IndexError, "7"),
                "unsqueeze(9)": (lambda: made.unsqueeze(9), IndexError, "9"),
                "select(0, M)": (lambda: made.select(0, rows), IndexError, str(rows)),
                "view(M + 1, K)": (lambda: made.view(rows + 1, columns), ShapeError, "view: shape"),
                "view(int8)": (lambda: made.view(torch.int8), DtypeError, self.format_name),
                "as_strided": (
                    lambda: made.as_strided((1, 1), (1, 1)),
                    ShapeError,
                    f"{self.format_name}: as_strided",
                ),
                "split of sizes": (lambda: made.split([1, 1]), ShapeError, "must add up"),
                "negative split": (lambda: made.split([-1, rows + 1]), ShapeError, "negative"),
                "cat of other shapes": (
                    lambda: torch.cat([made, taller], 1),
                    ShapeError,
                    "cat: shapes must agree",
                ),
                "data of another shape": (
                    lambda: setattr(made, "data", other),
                    ShapeError,
                    f"{self.format_name}: data must be",
                ),
                "data of another dtype": (
                    lambda: setattr(made, "data", made.dequantize(torch.float32).double()),
                    DtypeError,
                    f"{self.format_name}: data must be",
                ),
                "set_": (lambda: made.set_(other), DeviceError, "has no storage of its own"),
            }
            for what, (call, kind, part) in calls.items():
                with fallback("error"), pytest.raises(kind) as caught:
                    call()
                assert part in str(caught.value), f"{case}: {what}: no {part!r} in {caught.value}"

        for case in self.fixed(internal=(False,)):
            with named(case):
                check(case)

    def test_negative_axes_count_from_the_end(self) -> None:
        """As for every tensor, of joined and unbound ones too."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            same = {
                "unsqueeze": (made.unsqueeze(-2), made.unsqueeze(1)),
                "squeeze": (made.unsqueeze(0).squeeze(-3), made),
                "cat": (torch.cat([made], -1), torch.cat([made], 1)),
                "transpose": (made.transpose(-1, -1), made),
            }
            for what, (found, expected) in same.items():
                if type(found) is not type(expected):  # the format has no such view
                    expected = expected.dequantize()
                assert_same_facts(found, expected, f"{case}: {what}", view=True)
                assert_same_bytes(found, expected, f"{case}: {what}")

        for case in self.fixed(internal=(False,)):
            with named(case), fallback("allow"):
                check(case)

    def test_values_come_in_every_dtype(self) -> None:
        """``float()`` and kin dequantize, a plain tensor takes the values, a warning comes once."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            of = {
                torch.float32: made.float,
                torch.bfloat16: made.bfloat16,
                torch.float16: made.half,
            }
            for dtype in INPUT_DTYPES:
                expected = made.dequantize(dtype)
                assert_same_bytes(of[dtype](), expected, f"{case}: as {dtype}")
                plain = torch.empty(case.shape, dtype=dtype)
                plain.copy_(made)
                assert_same_bytes(plain, expected, f"{case}: copied into {dtype}")
            assert made.numel() == case.proto().numel, f"{case}: numel() is {made.numel()}"
            for part in (type(made).__name__, *buffers(made)):
                assert part in repr(made), f"{case}: no {part} in {made!r}"
            with warnings.catch_warnings(record=True) as seen, fallback("warn"):
                warnings.simplefilter("always", FallbackWarning)
                made.sin()
                made.sin()
            assert len(seen) <= 1, f"{case}: warned {len(seen)} times of one op"

        for case in self.fixed(internal=(False,)):
            with named(case):
                check(case)

    def test_key_of_compile_caches_is_the_layout(self) -> None:
        """Equal for other values, another for another quantizer, shape or flag."""
        keys: dict[str, str] = {}
        for case in self.fixed(internal=(False,)):
            made = self.quantize(case.quantizer, case.input())
            other = self.quantize(case.quantizer, case.input(1))
            key = made._stable_hash_for_caching()
            assert key == other._stable_hash_for_caching(), f"{case}: the key is of the values"
            other.requires_grad_()
            assert key != other._stable_hash_for_caching(), f"{case}: the flag is not in the key"
            known = keys.setdefault(key, str(made.quantizer))
            assert known == str(made.quantizer), f"{case}: has the key of {known}"

    def test_ops_that_find_no_quantized_form_are_plain(self) -> None:
        """Other dtypes and shapes that the format cannot hold; memory that is not pinned."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            plain = {
                "to(int32)": (lambda: made.to(torch.int32), torch.int32),
                "empty_like(int32)": (
                    lambda: torch.empty_like(made, dtype=torch.int32),
                    torch.int32,
                ),
            }
            rows, columns = case.quantizer.alignment()
            shape = (rows + 1, columns + 1)
            if refusal(lambda: case.quantizer.check_shape(shape)):
                plain["new_empty"] = (lambda: made.new_empty(shape), case.dtype)
            for what, (call, dtype) in plain.items():
                with fallback("allow"):
                    found = call()
                assert type(found) is torch.Tensor, f"{case}: {what}: {type(found).__name__}"
                assert found.dtype == dtype, f"{case}: {what}: {found.dtype}"
            assert not made.is_pinned(), f"{case}: is pinned"
            with pytest.raises(ShapeError, match="each of the 2 axes once"):
                made.permute(0, 0)

        for case in self.fixed(internal=(False,)):
            with named(case):
                check(case)

    # -- prototypes -------------------------------------------------------------------------------

    def test_assembling_other_buffers_is_refused(self) -> None:
        """Too few, too many, of another layout."""
        for case in self.fixed():
            proto = case.proto()
            inner = proto.create_inner_tensors()
            for what, wrong in {
                "too few": inner[1:],
                "too many": [*inner, inner[0]],
                "another dtype": [inner[0].double(), *inner[1:]],
            }.items():
                found = refusal(lambda: proto.assemble(wrong))  # noqa: B023
                assert found, f"{case}: {what} inner tensors are assembled"
                assert found.kind is LayoutError, f"{case}: {what}: {found}"
            other = proto.with_usage(columnwise=False)
            assert other.quantizer == case.quantizer.with_usage(columnwise=False), f"{case}"

    def test_plain_prototype_is_a_plain_tensor(self) -> None:
        """What a format's op returns beside its tensors is described in the same way."""
        case = self.fixed()[0]
        proto = case.proto(requires_grad=True).replace(quantizer=None)
        made = proto.create_tensor()
        assert to_tensor_proto(made) == proto, f"{case}: plain"
        assert proto.inner_names() == ("data",), f"{case}: plain: {proto.inner_names()}"
        assert proto.nbytes == made.nbytes, f"{case}: plain: {proto.nbytes} bytes"
        found = refusal(lambda: proto.assemble([made.detach().double()]))
        assert found, f"{case}: plain data of another dtype is assembled"
        assert found.kind is LayoutError, f"{case}: {found}"
        found = refusal(lambda: proto.with_usage(rowwise=False))
        assert found, f"{case}: a plain prototype has usages"
        assert found.kind is UsageError, f"{case}: {found}"

    # -- custom ops -------------------------------------------------------------------------------

    def test_custom_ops_take_and_return_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As tensor and as storage, with a gradient, described by prototypes alone."""
        monkeypatch.setenv("TE_PROTO_CHECK", "1")
        through, into = _ops(self.format_name)
        for case in self.fixed():
            if case.quantizer.call_arguments():
                continue  # an op of others brings no seed
            with named(case):
                x = case.input().requires_grad_()
                expected = self.quantize(case.quantizer, x.detach())
                plain, made = through(x, case.quantizer, None, (2, 3), torch.float32, 0.5)
                assert_same_facts(made, expected, f"{case}: made by an op")
                assert_same_bytes(made, expected, f"{case}: made by an op")
                assert_same_bytes(plain, expected.dequantize(torch.float32), f"{case}: values")
                plain.backward(torch.ones_like(plain))
                assert x.grad is not None
                assert_same_bytes(x.grad, torch.full_like(x, 0.5), f"{case}: gradient of an op")
                out = case.proto().create_tensor()
                into(out, expected)
                assert_same_bytes(out, expected, f"{case}: written by an op")

    def test_custom_op_refuses_what_it_cannot_pass_on(self) -> None:
        """A quantized argument that requires grad, and one of no known kind."""
        through, _ = _ops(self.format_name)
        case = self.fixed(internal=(False,))[0]
        made = self.quantize(case.quantizer, case.input()).requires_grad_()
        arguments = (case.quantizer, None, (2, 3), torch.float32, 0.5)
        found = refusal(lambda: through(made, *arguments))
        assert found, f"{case}: an op takes a quantized tensor that requires grad"
        assert found.kind is UsageError, f"{case}: {found}"
        x = case.input()
        with pytest.raises(TypeError, match="an op takes tensors, quantizers"):
            through(x, case.quantizer, object(), (2, 3), torch.float32, 0.5)
        with pytest.raises(TypeError, match="takes the arguments"):
            through(x, case.quantizer)
        with pytest.raises(TypeError, match="an op either has outputs"):
            custom_op(f"te_conformance_{self.format_name}::neither")
        with pytest.raises(TypeError, match="mutates names"):
            custom_op(f"te_conformance_{self.format_name}::no", mutates=("y",))(lambda x: None)

    def test_op_that_returns_something_else_is_caught(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of each result the number, class, shape, dtype, layout, strides and memory."""
        monkeypatch.setenv("TE_PROTO_CHECK", "1")
        case = self.fixed(internal=(False,))[0]
        made, x = self.quantize(case.quantizer, case.input()), case.input()
        other = self.quantize(case.quantizer, torch.cat([x, x]))
        lies: dict[str, tuple[Any, str]] = {
            "one result more": ((made, x.clone(), x.clone()), "describes 2 results"),
            "no tensor": (("made", x.clone()), "described as a tensor, got a str"),
            "another shape": ((other, x.clone()), "shape of result 0"),
            "another dtype": ((made, x.double()), "dtype of result 1"),
            "another quantizer": ((made.dequantize(), x.clone()), "quantizer of result 0"),
            "bare storage": (
                (case.quantizer.replace(internal=True).quantize(x), x.clone()),
                "quantizer of result 0",
            ),
            "other strides": ((made, x.t().contiguous().t()), "strides"),
            "its argument": ((made, x), "shares the memory"),
        }
        for what, (returned, part) in lies.items():
            monkeypatch.setitem(_RETURNED, self.format_name, returned)
            found = refusal(lambda: _liar(self.format_name)(x, case.quantizer))
            assert found, f"{case}: an op that returns {what} is not caught"
            assert found.kind is LayoutError, f"{case}: {what}: {found}"
            assert part in found.message, f"{case}: {what}: {found.message!r}"

    # -- products ---------------------------------------------------------------------------------

    def test_operand_of_a_product_stands_for_the_values(self) -> None:
        """Codes and scales as a GEMM takes them, blocks along the summed axis."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, self._values(case))
            planes = self.planes(made)
            for name, values in planes.items():
                operand = made.gemm_operand(columnwise=name == "columnwise")
                if operand is None:
                    continue
                matrix = values.reshape(-1, case.shape[-1]).double()
                expected = matrix.t() if name == "columnwise" else matrix
                found = _operand_values(operand)
                assert found.shape == expected.shape, f"{case}: {name}: {tuple(found.shape)}"
                if operand.transform is None:
                    worst = float((found - expected).abs().max())
                    assert worst <= 2**-20, f"{case}: {name} operand is off by {worst}"
                # a transform is gone from the product of two
                pairs = zip(found @ found.t(), expected @ expected.t(), strict=True)
                worst = max(float((a - b).abs().max()) for a, b in pairs)
                assert worst <= 2**-20 * found.shape[1], f"{case}: {name} product is off by {worst}"

        self.explore(check, None, self.fixed())

    # -- large ------------------------------------------------------------------------------------

    def test_large_input_has_the_bytes_of_its_strided_self(self) -> None:
        """A format may work in parts, or by threads; it must not show."""
        for start in self.starts():
            rows, columns = start.alignment()
            shape = (-(-520 // rows) * rows, -(-1030 // columns) * columns)
            for dtype in self.taken(start, shape)[:1]:
                case = Case(start, shape, dtype)
                x = self._values(case)
                x[0, 0], x[-1, -1] = 40.0, -50.0
                strided = x.t().contiguous().t()
                made, expected = self.quantize(start, x), self.quantize(start, strided)
                assert_same_facts(made, expected, f"{case}: large")
                assert_same_bytes(made, expected, f"{case}: large")
                for plane, values in self.planes(made).items():
                    bound = self.error_bound(start, columnwise=plane == "columnwise") * 50.0
                    worst = float((values - x.float()).abs().max())
                    assert worst <= bound, f"{case}: {plane} plane is off by {worst}"

    def _values(self, case: Case) -> Tensor:
        g = torch.Generator().manual_seed(7)
        return torch.rand(case.shape, generator=g).to(case.dtype)


_BLOCKS = {
    ScalingType.BlockWise1x16: (1, 16),
    ScalingType.BlockWise1x32: (1, 32),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
}


def _operand_values(operand: GemmOperand) -> Tensor:
    """Return what the operand of a product stands for, ``[rows, summed]`` in float64."""
    if operand.data.dtype == torch.float4_e2m1fn_x2:
        values = decode_e2m1(unpack_e2m1(operand.data.view(torch.uint8))).double()
    else:
        values = operand.data.double()
    if operand.factor is not None:
        values = values * operand.factor.double()
    if operand.scaling == ScalingType.TensorWise:
        return values * operand.scale.double()
    rows, columns = _BLOCKS[operand.scaling]
    scale = operand.scale
    if operand.swizzle == SwizzleType.SWIZZLE_32_4_4:
        scale = unswizzle(scale.view(torch.uint8)).view(scale.dtype)
    spread = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return values * spread[: values.shape[0], : values.shape[1]]


_CPU = torch.device("cpu")
_RETURNED: dict[str, Any] = {}


@functools.cache
def _liar(name: str) -> CustomOp:
    """Return an op that says one thing of its results and returns another."""

    @custom_op(
        f"te_conformance_{name}::liar",
        outputs=lambda x, q: (x.replace(quantizer=q), x.replace(requires_grad=False)),
    )
    def liar(x: Any, q: Any) -> Any:
        return _RETURNED[name]

    return liar


@functools.cache
def _ops(name: str) -> tuple[CustomOp, CustomOp]:
    """Return ops of somebody who knows nothing of the format, once a format."""

    def outputs(x: Any, q: Any, extra: Any, sizes: Any, dtype: Any, factor: Any, *rest: Any) -> Any:
        plain = TensorProto(shape=x.shape, dtype=dtype, device=x.device)
        return plain, x.replace(quantizer=q, requires_grad=False)

    @custom_op(f"te_conformance_{name}::through", outputs=outputs)
    def through(
        x: Any,
        q: Any,
        extra: Any,
        sizes: Any,
        dtype: Any,
        factor: Any,
        count: Any = 3,
        device: Any = _CPU,
    ) -> Any:
        assert (extra, sizes, count, device) == (None, (2, 3), 3, _CPU)
        made = q.quantize(x)
        return made.dequantize(dtype), made

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor, ctx.dtype = inputs[5], inputs[0].dtype
        assert to_tensor_proto(output[1]).quantizer == inputs[1].at_rest()

    def backward(ctx: Any, grad: Tensor, of_quantized: None) -> Any:
        return (grad * ctx.factor).to(ctx.dtype), *(None,) * 7

    through.register_autograd(backward, setup_context=setup)

    @custom_op(f"te_conformance_{name}::into", mutates=("out",))
    def into(out: Any, source: Any) -> None:
        for key, buffer in buffers(out).items():
            buffer.copy_(buffers(source)[key])

    return through, into
