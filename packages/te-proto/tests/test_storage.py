# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from te_toy import ToyQuantizer, ToyStorage, ToyTensor, codes_of, proto, values

from te_proto import QuantizedStorage, QuantizedTensor, Quantizer, to_tensor_proto
from te_proto._rebuild import rebuild
from te_proto.errors import LayoutError, PluginError, UnknownFormatError, UsageError
from te_proto.storage import (
    FlattenContext,
    InnerTensor,
    class_id,
    find_class,
    prepare_for_saving,
    restore_from_saved,
)

Q = ToyQuantizer()
BOTH = [pytest.param(False, id="tensor"), pytest.param(True, id="storage")]
PLANES = [{}, {"rowwise": False}, {"columnwise": False}]


class DerivingStorage(ToyStorage):
    """Makes a missing rowwise plane from the columnwise one."""

    def derive_inner(self, quantizer: Quantizer, missing: list[str]) -> dict[str, torch.Tensor]:
        assert missing == ["rowwise_data", "rowwise_scale_inv"]
        other = quantizer.with_usage(rowwise=True, columnwise=False)
        return other.quantize_impl(self.dequantize())


class DerivingTensor(DerivingStorage, QuantizedTensor):
    pass


class DerivingQuantizer(ToyQuantizer):
    storage_class: ClassVar = DerivingStorage
    tensor_class: ClassVar = DerivingTensor


class Widened(ToyStorage):
    amax: InnerTensor
    unrelated: int


# -- names and order ----------------------------------------------------------------------------


def test_inner_names_are_the_annotations_in_order_for_storage_and_tensor() -> None:
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    assert ToyStorage.inner_names == ToyTensor.inner_names == names


def test_a_subclass_adds_its_inner_tensors_at_the_end() -> None:
    assert Widened.inner_names == (*ToyStorage.inner_names, "amax")


# -- flatten ------------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", BOTH)
@pytest.mark.parametrize("planes", PLANES, ids=str)
@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)], ids=str)
def test_flatten_round_trip_keeps_everything(
    internal: bool, planes: dict[str, bool], shape: tuple[int, ...]
) -> None:
    q = Q.replace(internal=internal, **planes).quantize(values(*shape, dtype=torch.bfloat16))
    names, context = q.__tensor_flatten__()
    assert names == [n for n in ToyStorage.inner_names if getattr(q, n) is not None]
    back = type(q).__tensor_unflatten__({n: getattr(q, n) for n in names}, context, shape, None)
    assert type(back) is type(q)
    assert to_tensor_proto(back) == to_tensor_proto(q)
    assert all(getattr(back, n) is getattr(q, n) for n in names)


def test_a_columnwise_tensor_reports_the_logical_shape() -> None:
    for internal in (False, True):
        q = Q.replace(internal=internal, rowwise=False).quantize(values(2, 4, 12))
        assert tuple(q.shape) == (2, 4, 12)
        q.update_usage(columnwise=False)
        assert tuple(q.shape) == (2, 4, 12)
        assert q.numel() == 96
        assert to_tensor_proto(q).shape == (2, 4, 12)


def test_context_is_one_value_for_every_size() -> None:
    small, large = (Q.quantize(values(m, 8)).__tensor_flatten__()[1] for m in (4, 64))
    assert small == large
    assert hash(small) == hash(large)
    assert small != Q.replace(block=8).quantize(values(8, 8)).__tensor_flatten__()[1]
    assert small != Q.quantize(values(4, 8).half()).__tensor_flatten__()[1]
    assert small != Q.replace(internal=True).quantize(values(4, 8)).__tensor_flatten__()[1]


def test_context_pickles() -> None:
    context = Q.create_metadata(torch.float16)
    assert context == FlattenContext(ToyTensor, Q, torch.float16)
    assert pickle.loads(pickle.dumps(context)) == context


# -- the constructor checks ---------------------------------------------------------------------

META = {
    "rowwise_data": torch.empty(4, 8, dtype=torch.int8, device="meta"),
    "rowwise_scale_inv": torch.empty(4, 2, device="meta"),
    "columnwise_data": torch.empty(4, 8, dtype=torch.int8, device="meta"),
    "columnwise_scale_inv": torch.empty(1, 8, device="meta"),
}
NEEDS = f"toy: a tensor of shape (4, 8) needs the inner tensors {list(META)} in this order, got "


def swapped(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**META, name: value}


@pytest.mark.parametrize("cls", [ToyTensor, ToyStorage])
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        pytest.param({}, f"{NEEDS}[]", id="none"),
        pytest.param(
            {n: t for n, t in META.items() if n != "columnwise_data"},
            f"{NEEDS}['rowwise_data', 'rowwise_scale_inv', 'columnwise_scale_inv']",
            id="missing",
        ),
        pytest.param(
            {**META, "amax": META["rowwise_data"]}, f"{NEEDS}{[*META, 'amax']}", id="extra"
        ),
        pytest.param(
            dict(reversed(META.items())), f"{NEEDS}{list(reversed(META))}", id="wrong-order"
        ),
        pytest.param(
            swapped("rowwise_scale_inv", torch.empty(2, 4, device="meta")),
            "toy: rowwise_scale_inv of a tensor of shape (4, 8) must be a contiguous torch.float32 "
            "of shape (4, 2), got torch.float32 of shape (2, 4) and strides (4, 1)",
            id="shape",
        ),
        pytest.param(
            swapped("columnwise_data", torch.empty(4, 8, dtype=torch.uint8, device="meta")),
            "toy: columnwise_data of a tensor of shape (4, 8) must be a contiguous torch.int8 "
            "of shape (4, 8), got torch.uint8 of shape (4, 8) and strides (8, 1)",
            id="dtype",
        ),
        pytest.param(
            swapped("rowwise_data", torch.empty(8, 4, dtype=torch.int8, device="meta").t()),
            "toy: rowwise_data of a tensor of shape (4, 8) must be a contiguous torch.int8 "
            "of shape (4, 8), got torch.int8 of shape (4, 8) and strides (1, 4)",
            id="stride",
        ),
        pytest.param(
            swapped("columnwise_scale_inv", torch.empty(1, 8)),
            "toy: inner tensors must share one device, got ['cpu', 'meta']",
            id="two-devices",
        ),
    ],
)
def test_inner_tensors_that_are_not_as_described_are_refused(
    cls: Any, inner: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        cls(inner, Q, (4, 8), torch.float32)


# -- the registry of classes --------------------------------------------------------------------


def test_classes_are_found_by_their_id() -> None:
    assert class_id(ToyTensor) == "te_toy:ToyTensor"
    for cls in (ToyTensor, ToyStorage, ToyQuantizer):
        assert find_class(class_id(cls)) is cls


@pytest.mark.parametrize("base", [ToyStorage, ToyQuantizer])
def test_a_second_class_of_one_name_is_refused(base: type[Any]) -> None:
    namespace = {"__module__": "te_elsewhere", "__qualname__": f"Twice{base.__name__}"}
    first = type(f"Twice{base.__name__}", (base,), dict(namespace))
    key = f"te_elsewhere:Twice{base.__name__}"
    message = f"two classes claim the name {key!r}; rename one, or do not import the module twice"
    with pytest.raises(PluginError, match=f"^{re.escape(message)}$"):
        type(f"Twice{base.__name__}", (base,), dict(namespace))
    assert find_class(key) is first


def test_unknown_class_says_what_to_install() -> None:
    message = (
        "no installed format provides the class 'te_absent.tensor:AbsentTensor'; "
        "install it with: pip install te-absent"
    )
    with pytest.raises(UnknownFormatError, match=f"^{re.escape(message)}$"):
        find_class("te_absent.tensor:AbsentTensor")


def test_a_file_cannot_name_an_arbitrary_class(fresh: Callable[..., str]) -> None:
    # the module would print when imported
    code = (
        "import pathlib, sys, torch, te_proto._rebuild as r\n"
        "pathlib.Path('site/evil.py').write_text('print(\"imported\")\\nclass Cls: pass')\n"
        "for names in (('evil:Cls', 'evil:Cls'), ('subprocess:Popen', 'te_toy:ToyQuantizer')):\n"
        "    try: r.rebuild(*names, {}, {}, (), torch.float32, False, {})\n"
        "    except LookupError as e: print(type(e).__name__)\n"
        "print('evil' in sys.modules)"
    )
    assert fresh(code) == "UnknownFormatError\nUnknownFormatError\nFalse"


def test_rebuild_takes_tensor_and_quantizer_classes_only_in_their_place() -> None:
    with pytest.raises(TypeError, match="are not a quantized tensor and its quantizer$"):
        rebuild("te_toy:ToyQuantizer", "te_toy:ToyTensor", {}, {}, (), torch.float32, False, {})


# -- usages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", BOTH)
def test_update_usage_drops_a_plane_and_the_quantizer_follows(internal: bool) -> None:
    q = Q.replace(internal=internal).quantize(values(4, 8))
    want = q.quantizer.with_usage(rowwise=False).quantize(values(4, 8))
    q.update_usage(rowwise=False)
    assert (q.rowwise_data, q.rowwise_scale_inv) == (None, None)
    assert q.quantizer == want.quantizer
    assert codes_of(q) == codes_of(want)
    assert q.nbytes == want.nbytes == 4 * 8 + 8 * 4
    assert torch.equal(q.dequantize(), want.dequantize())


@pytest.mark.parametrize("internal", BOTH)
def test_with_usage_shares_the_buffers_and_leaves_the_tensor(internal: bool) -> None:
    q = Q.replace(internal=internal).quantize(values(4, 8))
    row = q.with_usage(columnwise=False)
    assert row.rowwise_data is q.rowwise_data
    assert list(row.inner_tensors()) == ["rowwise_data", "rowwise_scale_inv"]
    assert row.quantizer == q.quantizer.with_usage(columnwise=False)
    assert q.columnwise_data is not None


@pytest.mark.parametrize("internal", BOTH)
@pytest.mark.parametrize("how", ["with_usage", "update_usage"])
def test_a_plane_that_is_not_held_is_an_error_that_names_it(internal: bool, how: str) -> None:
    q = Q.replace(internal=internal, columnwise=False).quantize(values(4, 8))
    message = (
        "toy: the tensor does not hold columnwise_data, columnwise_scale_inv and they cannot be "
        "derived from rowwise_data, rowwise_scale_inv; quantize the high-precision tensor with "
        "that usage"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        getattr(q, how)(columnwise=True)
    assert not q.quantizer.columnwise  # nothing changed


@pytest.mark.parametrize("internal", BOTH)
def test_a_format_may_derive_the_missing_plane(internal: bool) -> None:
    q = DerivingQuantizer(internal=internal, rowwise=False).quantize(values(4, 8))
    held = q.columnwise_data
    want = q.dequantize()
    q.update_usage(rowwise=True)
    assert list(q.inner_tensors()) == list(ToyStorage.inner_names)
    assert q.columnwise_data is held
    assert q.quantizer.rowwise
    assert codes_of(q.with_usage(columnwise=False)) == codes_of(
        q.quantizer.with_usage(columnwise=False).quantize(want)
    )


@pytest.mark.parametrize("internal", BOTH)
def test_a_tensor_without_planes_has_nothing_to_dequantize(internal: bool) -> None:
    q = Q.replace(internal=internal).quantize(values(4, 8))
    q.update_usage(rowwise=False, columnwise=False)
    assert q.nbytes == 0
    assert "no plane" in repr(q)
    message = "toy: the tensor holds no plane, so there is nothing to dequantize"
    with pytest.raises(UsageError, match=f"^{message}$"):
        q.dequantize()


# -- saving for backward ------------------------------------------------------------------------


def test_prepare_for_saving_and_restore_are_inverse() -> None:
    storage = Q.replace(internal=True)
    both, row, none = (storage.quantize(values(2, 4, 8)) for _ in range(3))
    row.update_usage(columnwise=False)
    none.update_usage(rowwise=False, columnwise=False)
    plain, wrapper = values(3), Q.quantize(values(4, 8))
    given = [None, both, plain, none, wrapper, row, None]

    flat, objects = prepare_for_saving(*given)
    assert len(flat) == 1 + 4 + 1 + 0 + 1 + 2 + 1
    assert all(t is None or isinstance(t, torch.Tensor) for t in flat)
    back = restore_from_saved(objects, flat)

    assert [back[i] is given[i] for i in (0, 2, 4, 6)] == [True] * 4
    for i in (1, 3, 5):
        assert type(back[i]) is ToyStorage
        assert to_tensor_proto(back[i]) == to_tensor_proto(given[i])
        assert all(
            a is b
            for a, b in zip(
                back[i].inner_tensors().values(), given[i].inner_tensors().values(), strict=True
            )
        )
    assert given[1].rowwise_data is not None  # the caller's storage is left as it was


def test_a_storage_saved_by_an_autograd_function_comes_back() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            saved, ctx.objects = prepare_for_saving(Q.replace(internal=True).quantize(x), None)
            ctx.save_for_backward(*saved)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            storage, nothing = restore_from_saved(ctx.objects, ctx.saved_tensors)
            assert nothing is None
            return grad * storage.dequantize()

    x = values(4, 8).requires_grad_()
    Double.apply(x).sum().backward()
    assert torch.equal(x.grad, Q.quantize(x.detach()).dequantize())


# -- the bare storage as an object --------------------------------------------------------------


def test_storage_moves_and_repr_shows_no_values() -> None:
    q = Q.replace(internal=True).quantize(values(4, 8))
    moved = q.to("meta")
    assert type(moved) is ToyStorage
    assert {str(t.device) for t in moved.inner_tensors().values()} == {"meta"}
    assert str(moved.device) == "meta"
    assert q.rowwise_data.device.type == "cpu"
    assert repr(q) == (
        f"ToyStorage(shape=(4, 8), dtype=float32, device=cpu, quantizer={q.quantizer}, "
        "rowwise_data=int8[4, 8], rowwise_scale_inv=float32[4, 2], columnwise_data=int8[4, 8], "
        "columnwise_scale_inv=float32[1, 8])"
    )


@pytest.mark.parametrize("internal", BOTH)
def test_pickle_keeps_bytes_class_quantizer_and_attributes(internal: bool) -> None:
    q = Q.replace(internal=internal, note="kept").quantize(values(4, 8, dtype=torch.float16))
    q.extra = {"step": 3}
    back = pickle.loads(pickle.dumps(q))
    assert type(back) is type(q)
    assert to_tensor_proto(back) == to_tensor_proto(q)
    assert codes_of(back) == codes_of(q)
    assert back.extra == {"step": 3}


def test_nbytes_is_what_is_held() -> None:
    for internal in (False, True):
        q = Q.replace(internal=internal).quantize(values(8, 16))
        held = sum(t.untyped_storage().nbytes() for t in q.inner_tensors().values())
        assert q.nbytes == held == proto((8, 16), Q).nbytes


def test_quantized_storage_alone_is_no_format() -> None:
    assert QuantizedStorage.inner_names == ()
