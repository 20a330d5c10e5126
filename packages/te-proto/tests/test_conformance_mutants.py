# SPDX-License-Identifier: Apache-2.0
"""The kit can fail: a broken plugin per kind of fault, and the test that names the fault.

The unbroken toy passes each of these tests on the same cases.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import te_mutant_ops as ops
import te_mutant_tensors as tensors
import te_mutants as mutants
from te_toy import Rounding, ToyQuantizer
from te_toy_site import CARD, install

from te_proto import Quantizer, registry
from te_proto.spec import PROTOCOL, FormatSpec
from te_proto.testing import FormatConformance, _profile, super_in_graph


class MutantKit(FormatConformance):
    """The kit on fixed cases alone, for a quantizer class that no distribution provides."""

    format_name = "toy"
    nonfinite = False

    def __init__(self, *quantizers: Quantizer) -> None:
        self.quantizers = quantizers  # type: ignore[misc]

    def card(self) -> FormatSpec:
        return FormatSpec(
            name="toy",
            distribution="te-toy",
            protocol=PROTOCOL,
            summary="int8 with float32 scales",
            elements=("int8",),
            scale="e8m0"
            if issubclass(type(self.quantizers[0]), mutants.PowerOfTwoQuantizer)
            else "float32",
            block=(1, 4),
            quantizer="te_toy:ToyQuantizer",
            tensor="te_toy:ToyTensor",
            storage="te_toy:ToyStorage",
            recipe="te_toy:recipe",
        )

    def namespace(self) -> str:
        return "toy"

    def error_bound(self, quantizer: Quantizer, *, columnwise: bool) -> float:
        return 0.501 / 127


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        cls: quantizer class.
        test: of the kit, that catches it.
        says: part of its message.
        fields: options of the quantizer.
    """

    cls: type[Any]
    test: str
    says: str
    fields: Mapping[str, Any] = MappingProxyType({})


def of(tensor: type[Any], test: str, says: str, **fields: Any) -> Mutant:
    return Mutant(tensors.quantizer_of(tensor), test, says, fields)


M, T = mutants, tensors
SINGLE = {"block": 1}  # every shape will do
MUTANTS = [
    Mutant(M.OtherOrder, "unflatten_is_the_inverse_of_flatten", "flattens to"),
    Mutant(M.UnpaddedFake, "meta_is_the_real_tensor", "rowwise_scale_inv of a tensor"),
    Mutant(M.UnpaddedFake, "fake_is_the_real_tensor", "rowwise_scale_inv of a tensor"),
    Mutant(M.UnwrittenPadding, "no_byte_depends_on_what_memory_held", "rowwise_scale_inv: "),
    Mutant(
        M.UnwrittenPaddingInPlace,
        "writes_the_same_bytes_into_tensors_made_of_prototypes",
        "into memory full of",
    ),
    Mutant(M.MissingPlane, "prototype_is_the_real_tensor", "needs the inner tensors"),
    Mutant(M.OtherStride, "prototype_is_the_real_tensor", "scale_inv.stride is", {"block": 0}),
    Mutant(M.OtherDtype, "prototype_is_the_real_tensor", "got torch.float64"),
    Mutant(M.OtherDtypeOfFake, "fake_is_the_real_tensor", "got torch.uint8"),
    Mutant(M.OtherDeviceOfFake, "meta_is_the_real_tensor", "meta"),
    Mutant(M.SizesIn32Bits, "64_bit_sizes_are_exact", "toy"),
    Mutant(M.SharedMemory, "nbytes_are_those_held", "share memory"),
    Mutant(M.HeldTooMuch, "nbytes_are_those_held", "bytes of buffers"),
    Mutant(M.TransposedShape, "logical_shape_does_not_depend_on_the_planes", "shape (", SINGLE),
    Mutant(M.CrashOnEmpty, "zero_size_keeps_shape_and_padding", "invalid for input of size 0"),
    Mutant(M.RefusedTooLate, "shape_refusal_is_the_same_everywhere", "shape"),
    Mutant(M.RefusedWithoutFormat, "shape_refusal_is_the_same_everywhere", "no format"),
    Mutant(
        M.RefusedByCallAlone, "shape_refusal_is_the_same_everywhere", "x must have two axes", SINGLE
    ),
    Mutant(M.OtherAlignment, "alignment_is_the_multiple_that_is_needed", "M must be a multiple"),
    Mutant(M.MutatedByUse, "use_changes_no_quantizer", "changed from"),
    Mutant(M.CountsItsCalls, "use_changes_no_quantizer", "_calls"),
    Mutant(M.ForgottenInEquality, "every_field_counts_in_equality", "note alone: is equal"),
    Mutant(M.ForgottenInState, "equal_fields_are_an_equal_value", "from_state(state())"),
    Mutant(M.ForgottenInSource, "equal_fields_are_an_equal_value", "__fx_repr__"),
    Mutant(M.ForgottenInCacheKey, "every_field_counts_in_equality", "key of compile caches"),
    Mutant(M.HashOfTheObject, "equal_fields_are_an_equal_value", "another hash"),
    Mutant(M.UsageForgetsOptions, "with_usage_changes_the_usage_alone", "with_usage("),
    Mutant(M.HasStaticMethod, "no_static_method_for_guards_to_trip_over", "helper"),
    Mutant(M.SilentOption, "refused_option_names_format_option_and_value", "wrong note"),
    Mutant(M.WritesItsInput, "input_is_not_written", ": x: data: "),
    Mutant(M.IgnoresTheSeed, "seed_alone_decides_what_is_rounded_by_chance", "the same bytes"),
    Mutant(M.KeepsTheSeed, "what_a_call_brings_stays_in_no_tensor", "needs ('rng',)"),
    Mutant(M.IgnoresStrides, "non_contiguous_input_gives_the_bytes_of_a_contiguous_one", "input"),
    Mutant(M.RemembersAmax, "quantizing_again_gives_the_same_bytes", "quantized again"),
    Mutant(M.SharesScratch, "threads_share_a_quantizer", "threads"),
    Mutant(M.StaleColumns, "copy_in_place_writes_every_plane", "columnwise_data"),
    Mutant(M.StaleColumns, "load_state_dict_keeps_the_memory", "columnwise_data"),
    Mutant(M.StaleColumns, "write_in_place_requantizes_every_plane", "columnwise plane stale"),
    Mutant(M.MovesBuffers, "copy_in_place_writes_every_plane", "a buffer moved"),
    Mutant(M.AnyNoop, "noop_is_exactly_one", "noop=2.0"),
    Mutant(M.NoopUnknownToGraphs, "noop_is_read_each_time_the_graph_runs", "noop=1.0, call 1"),
    Mutant(M.GuardsOnSizes, "custom_op_is_one_dynamic_graph", "expected one graph"),
    Mutant(
        M.OptionLostInPlace,
        "writes_the_same_bytes_into_tensors_made_of_prototypes",
        "into memory full of",
        {"rounding": Rounding.ZERO},
    ),
    Mutant(M.ProductUnderAutocast, "autocast_changes_no_byte", "under autocast to"),
    Mutant(M.TakesTheFirstToWrite, "optimizer_writes_quantized_parameters", "of size 0"),
    Mutant(M.StaleColumns, "optimizer_writes_quantized_parameters", "columnwise_data"),
    Mutant(M.OtherInGraphs, "static_graph_returns_the_tensor_of_eager", "static: "),
    Mutant(M.OtherInGraphs, "form_in_graphs_has_the_bytes_of_the_eager_one", "form for graphs"),
    Mutant(M.GuardsOnSizes, "prototype_makes_its_tensor_in_a_graph", "expected one graph"),
    Mutant(M.ZeroByZero, "zeros_are_zero", "rowwise_scale_inv is not finite"),
    Mutant(M.OverflowingReciprocal, "denormals_are_finite_and_near_or_flushed", "neither within"),
    Mutant(M.OverflowingScale, "extreme_amax_has_finite_scales", "is not finite"),
    Mutant(M.CoarseCodes, "error_is_within_the_bound", "the bound is"),
    Mutant(M.RowsOutOfPlace, "both_planes_stand_for_the_input", "columnwise plane is off"),
    Mutant(M.DriftsAway, "quantizing_what_was_quantized_changes_next_to_nothing", "of its maximum"),
    Mutant(M.IgnoresTheDtype, "dequantize_has_the_dtype_that_is_asked_for", "dtype is"),
    Mutant(M.LosesRequiresGrad, "requires_grad_is_kept", "is lost by quantize()"),
    Mutant(M.ScalesTheGradient, "gradient_passes_straight_through", "gradient through"),
    Mutant(M.ZeroCodeIsZero, "e8m0_scale_bytes_are_powers_of_two", "scale code 0 makes 0.0"),
    Mutant(M.LastCodeIsInfinity, "e8m0_scale_bytes_are_powers_of_two", "scale code 255 makes inf"),
    of(T.SizedContextTensor, "flatten_context_is_a_value_without_sizes", "the context is"),
    of(T.LosesAttributesTensor, "deepcopy_is_independent_and_complete", "attributes are lost"),
    of(T.OperandWithoutScaleTensor, "operand_of_a_product_stands_for_the_values", "operand is off"),
    of(T.MovesDataAloneTensor, "move_takes_every_inner_tensor_along", "scale_inv"),
    of(T.UnderstatesTensor, "nbytes_are_those_held", "quantize()"),
    of(T.QuantizerStaysTensor, "update_usage_changes_tensor_and_quantizer_together", "follow"),
    of(
        T.InventsPlanesTensor, "planes_are_dropped_and_never_invented", "columnwise plane", **SINGLE
    ),
    of(T.SlicesFromTheStartTensor, "aligned_slices_stay_quantized", "dequantized"),
    of(T.CutsBlocksTensor, "slices_are_exact_or_refused", "narrow(0, "),
    of(T.SliceHasNoAttributeTensor, "slices_are_exact_or_refused", "rowwise_codes"),
    of(T.SliceSaysNothingTensor, "slices_are_exact_or_refused", "is not named in 'cannot slice'"),
    of(T.SilentSliceTensor, "slices_are_exact_or_refused", "is a Tensor"),
    of(T.IgnoresTheStepTensor, "slices_are_exact_or_refused", "[0:size:2] on axis"),
    of(T.NeedsAllArgumentsTensor, "slices_are_exact_or_refused", "slice(): raises IndexError"),
    of(T.ViewForgetsOptionsTensor, "views_keep_every_plane_exactly", "of a tensor with"),
    of(T.ViewForgetsTheDtypeTensor, "views_keep_every_plane_exactly", "is torch.float32, of"),
    of(T.OneScaleForAllTensor, "joined_pieces_are_exact_or_refused", "cat along axis"),
    of(
        T.ReshapesScalesAsTheyLieTensor,
        "views_keep_every_plane_exactly",
        "rowwise plane, dequantized",
        optimize_for_gemm=True,
    ),
    of(T.TransposesCodesAloneTensor, "transpose_is_the_exact_image_or_refused", "t(): "),
    of(T.AliasForACopyTensor, "what_is_no_view_refuses_to_be_written", "did not reach the whole"),
    of(T.SharedDeepcopyTensor, "deepcopy_is_independent_and_complete", "shares memory"),
    of(T.DtypeStaysTensor, "dtype_is_nominal", "says torch."),
    of(T.CodesFollowTheDtypeTensor, "dtype_is_nominal", ": to(torch."),
]


@pytest.fixture(autouse=True)
def fixed_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the fixed cases alone: they show every kind of fault, always in the same place."""
    monkeypatch.setattr(
        _profile, "_active", _profile.Profile(examples=0, interpreted=0, compiled=1, shrink=False)
    )


def starts(cls: type[Any], fields: Mapping[str, Any]) -> tuple[Quantizer, ...]:
    """Return quantizers that differ in a string and a number."""
    return cls(**fields), cls(**fields, note="other", ceiling=3.4e38)


def run(kit: MutantKit, test: str) -> None:
    """Call a test of the kit, which must need no fixture."""
    method = getattr(kit, f"test_{test}")
    assert not inspect.signature(method).parameters
    method()


CALL_SUPER = (
    (mutants.OtherInGraphs, "static_graph_returns_the_tensor_of_eager"),
    (mutants.GuardsOnSizes, "prototype_makes_its_tensor_in_a_graph"),
)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, marks=super_in_graph if (m.cls, m.test) in CALL_SUPER else ())
        for m in MUTANTS
    ],
    ids=lambda m: f"{m.cls.__qualname__}-{m.test[:20]}",
)
def test_fault_is_caught_by_the_test_that_names_it(mutant: Mutant) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # a crash is a finding as well
        run(MutantKit(*starts(mutant.cls, mutant.fields)), mutant.test)
    assert mutant.says in str(caught.value)


@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS}))
def test_unbroken_format_passes(test: str) -> None:
    cls: type[Any] = ToyQuantizer
    for part, other in (
        ("byte", mutants.PaddedQuantizer),
        ("e8m0", mutants.PowerOfTwoQuantizer),
        ("seed", mutants.RoundsByChance),
    ):
        cls = other if part in test else cls
    fields = {"optimize_for_gemm": "views" in test}
    run(MutantKit(*starts(cls, fields)), test)


# -- ops -------------------------------------------------------------------------------------------


class OpKit(MutantKit):
    def __init__(self, ops_class: type[ops.Ops]) -> None:
        self.cls = with_ops(ops_class)
        super().__init__(self.cls())

    def namespace(self) -> str:
        return self.cls.namespace


@functools.cache
def with_ops(ops_class: type[ops.Ops]) -> type[ops.OpQuantizer]:
    return ops.quantizer_of(ops_class)


BYTES = "kernels_are_the_reference_byte_for_byte"
OP_MUTANTS = [
    (ops.RoundsOtherwise, BYTES, "rowwise_data"),
    (ops.LeavesMemory, BYTES, "differ"),
    (ops.FakeOfAnotherDtype, BYTES, "the fake has dtype"),
    (ops.WritesItsInput, "every_op_passes_opcheck", "te_mutant_writesitsinput::quantize: opcheck"),
    (ops.ReturnsColumns, "result_of_each_op_is_what_its_prototype_says", "strides"),
    (ops.HasAnotherOp, "every_op_passes_opcheck", "reaches the ops ['transpose']"),
]


@pytest.mark.parametrize(
    ("ops_class", "test", "says"), OP_MUTANTS, ids=[c.__name__ for c, _, _ in OP_MUTANTS]
)
def test_fault_of_an_op_is_caught(ops_class: type[ops.Ops], test: str, says: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # a crash is a finding as well
        run(OpKit(ops_class), test)
    assert says in str(caught.value)


@pytest.mark.parametrize("test", sorted({test for _, test, _ in OP_MUTANTS}))
def test_unbroken_ops_pass(test: str) -> None:
    run(OpKit(ops.Ops), test)


# -- the card --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "test", "says"),
    [
        (
            "FORMAT =",
            "import torch\n\nFORMAT =",
            "is_listed_and_described_without_torch",
            "imports",
        ),
        ("te_toy:ToyStorage", "te_toy:ToyTensor", "card_leads_to_its_classes", "storage is"),
        ('("int8",)', "()", "card_leads_to_its_classes", "no element format"),
    ],
    ids=["imports-torch", "another-class", "no-elements"],
)
def test_fault_of_a_card_is_caught(
    old: str, new: str, test: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for card, broken in ((CARD, False), (CARD.replace(old, new), True)):
        site = install(tmp_path / str(broken), card)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(site)
            patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(Path(__file__).parent)]))
            sys.modules.pop("te_toy_card", None)
            registry.clear_cache()
            kit = MutantKit(ToyQuantizer())
            kit.card = lambda: registry.describe("toy")  # type: ignore[method-assign]
            if not broken:
                run(kit, test)
                continue
            with pytest.raises(AssertionError) as caught:
                run(kit, test)
            assert says in str(caught.value)
    sys.modules.pop("te_toy_card", None)
    registry.clear_cache()
