# SPDX-License-Identifier: Apache-2.0
"""Views, slices and joins: the exact planes of the result, or a refusal that names the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_proto.errors import FallbackError, ShapeError, UsageError
from te_proto.proto import to_tensor_proto
from te_proto.tensor import QuantizedTensor, fallback
from te_proto.testing.conformance.base import Case, Kit
from te_proto.testing.conformance.draws import cases
from te_proto.testing.facts import assert_same_bytes, assert_same_facts, copied, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_OTHER = {"rowwise": "columnwise", "columnwise": "rowwise"}


class ViewConformance(Kit):
    """The table of torch ops, on what a format makes of it."""

    def test_views_keep_every_plane_exactly(self) -> None:
        """Reshapes: each is exact in all planes, or has no quantized form and says so."""

        def check(case: Case) -> None:
            rows, columns = self._matrix(case)
            ops: dict[str, Callable[[Tensor], Tensor]] = {
                "detach()": lambda t: t.detach(),
                "alias": lambda t: torch.ops.aten.alias.default(t),
                "clone()": lambda t: t.clone(),
                "view of its own shape": lambda t: t.view(case.shape),
                "view as a matrix": lambda t: t.view(rows, columns),
                "flatten()": lambda t: t.flatten(),
                "reshape(-1, 1, K)": lambda t: t.reshape(-1, 1, columns),
                "view with half of K": lambda t: t.reshape(-1, max(columns // 2, 1)),
                "view with all of K": lambda t: t.reshape(1, -1),
                "unsqueeze(0)": lambda t: t.unsqueeze(0),
                "unsqueeze(-1)": lambda t: t.unsqueeze(-1),
                "unsqueeze(0).squeeze(0)": lambda t: t.unsqueeze(0).squeeze(0),
                "squeeze()": lambda t: t.squeeze(),
                "expand of its own shape": lambda t: t.expand(case.shape),
                "as_strided of its own": lambda t: t.as_strided(
                    case.shape, torch.empty(case.shape).stride()
                ),
            }
            always = ("detach()", "alias", "clone()", "view of its own", "expand of", "as_strided")
            for name, op in ops.items():
                self._exact_or_refused(case, name, op, must=name.startswith(always))

        self.explore(check, cases(self, internal=(False,)), self._fixed())

    def test_slices_are_exact_or_refused(self) -> None:
        """Of every axis, aligned and not: NVIDIA/TransformerEngine#2422.

        Never an AttributeError, never a tensor in high precision, never a block under the scale of
        another. A step is seen where the end is written out, a default where it is left out.
        """

        def check(case: Case) -> None:
            tile = self.tile(case.quantizer)
            for dim, size in enumerate(case.shape):
                spans = {
                    (0, size),
                    (0, tile),
                    (tile, size),
                    (1, size),
                    (0, size - 1),
                    (2, tile + 2),
                }
                for start, end in sorted(s for s in spans if 0 <= s[0] < s[1] <= size):
                    self._exact_or_refused(
                        case,
                        f"narrow({dim}, {start}, {end - start})",
                        lambda t, d=dim, a=start, b=end: t.narrow(d, a, b - a),  # type: ignore[misc]
                        must=(start, end) == (0, size),
                        parts=(f"axis {dim}", f"[{start}:{end}]"),
                    )
                index = (slice(None),) * dim
                for name, taken in {
                    "[::2]": (*index, slice(None, None, 2)),
                    "[0:size:2]": (*index, slice(0, size, 2)),
                    "[-1]": (*index, -1),
                    "[1:-1]": (*index, slice(1, -1)),
                    f"[{tile}:]": (*index, slice(tile, None)),
                }.items():
                    if size > 2:
                        what = f"{name} on axis {dim}"
                        self._exact_or_refused(case, what, lambda t, at=taken: t[at])  # type: ignore[misc]
            whole = torch.ops.aten.slice.Tensor
            self._exact_or_refused(case, "slice()", lambda t: whole(t), must=True)
            self._exact_or_refused(case, "slice(start=0)", lambda t: whole(t, start=0), must=True)

        self.explore(check, cases(self, internal=(False,), empty=False), self._fixed())

    def test_aligned_slices_stay_quantized(self) -> None:
        """What begins and ends on a whole tile is no reason to dequantize."""

        def check(case: Case) -> None:
            if 0 in self.card().block:
                return  # a slice of a block that is an axis has a scale of its own
            tile = self.tile(case.quantizer)
            for dim in (0, 1):
                for start in (0, tile):
                    self._exact_or_refused(
                        case,
                        f"narrow({dim}, {start}, {tile})",
                        lambda t, d=dim, a=start: t.narrow(d, a, tile),  # type: ignore[misc]
                        must=True,
                    )

        self.explore(check, None, self._fixed())

    def test_pieces_are_exact_or_refused(self) -> None:
        """split, chunk, unbind, with sizes that are a multiple of a block and that are not."""

        def check(case: Case) -> None:
            tile = self.tile(case.quantizer)
            for dim in (0, -1):
                size = case.shape[dim]
                ops: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
                    f"split({tile}, {dim})": lambda t, d=dim: t.split(tile, d),  # type: ignore[misc]
                    f"split({tile - 1}, {dim})": lambda t, d=dim: t.split(tile - 1, d),  # type: ignore[misc]
                    f"split of two sizes, {dim}": lambda t, d=dim, n=size: t.split(  # type: ignore[misc]
                        [min(tile, n), n - min(tile, n)], d
                    ),
                    f"chunk(3, {dim})": lambda t, d=dim: t.chunk(3, d),  # type: ignore[misc]
                    f"unbind({dim})": lambda t, d=dim: t.unbind(d),  # type: ignore[misc]
                }
                for name, op in ops.items():
                    if name.startswith("unbind") and size > tile * 3:
                        continue  # one op a row
                    self._exact_or_refused(case, name, op)

        self.explore(check, cases(self, internal=(False,), empty=False), self._fixed())

    def test_joined_pieces_are_exact_or_refused(self) -> None:
        """Each keeps its own scales, which torchao loses without an error."""

        def check(case: Case) -> None:
            first = self.quantize(case.quantizer, case.input())
            second = self.quantize(case.quantizer, case.input(1) * 0.25)
            for dim in range(-1, max(len(case.shape) - 1, 1)):
                expected = {
                    plane: torch.cat([values, self.planes(second)[plane]], dim)
                    for plane, values in self.planes(first).items()
                }
                self._check_result(
                    f"{case}: cat along axis {dim}",
                    lambda d=dim: torch.cat([first, second], d),  # type: ignore[misc]
                    expected,
                    of=first,
                )
            alone = torch.cat([first])
            assert_same_bytes(alone, first, f"{case}: cat of one")

        self.explore(check, cases(self, internal=(False,)), self._fixed())

    def test_transpose_is_the_exact_image_or_refused(self) -> None:
        """Planes change places; strides of every inner tensor as predicted: pytorch/ao#4624."""

        def check(case: Case) -> None:
            made = self.quantize(case.quantizer, case.input())
            swapped = {_OTHER[plane]: v.t() for plane, v in self.planes(made).items()}
            for name, op in {
                "t()": lambda t: t.t(),
                "transpose(0, 1)": lambda t: t.transpose(0, 1),
                "transpose(-1, -2)": lambda t: t.transpose(-1, -2),
                "permute(1, 0)": lambda t: t.permute(1, 0),
            }.items():
                self._check_result(
                    f"{case}: {name}",
                    lambda op=op: op(made),  # type: ignore[misc]
                    swapped,
                    alternative={plane: v.t() for plane, v in self.planes(made).items()},
                    of=made,
                )
            self._exact_or_refused(case, "permute(0, 1)", lambda t: t.permute(0, 1), must=True)

        self.explore(check, cases(self, internal=(False,), rank=(2, 2)), self._fixed())

    def test_what_is_no_view_refuses_to_be_written(self) -> None:
        """A write that would not reach the whole is an error, one that would reaches it."""

        def check(case: Case) -> None:
            ops: dict[str, Callable[[Any], Any]] = {
                "detach()": lambda t: t.detach(),
                "view": lambda t: t.view(-1, case.shape[-1]),
                "slice": lambda t: t[: self.tile(case.quantizer)],
                "transpose": lambda t: t.t(),
            }
            for name, op in ops.items():
                whole = self.quantize(case.quantizer, case.input())
                before = copied(whole)
                with fallback("error"):
                    try:
                        part = op(whole)
                    except (ShapeError, FallbackError):
                        continue
                    try:
                        part.copy_(torch.zeros(part.shape, dtype=part.dtype))
                    except UsageError as error:
                        message = str(error)
                        assert message.startswith(f"{self.format_name}: "), f"{case}: {message!r}"
                        assert str(tuple(part.shape)) in message, f"{case}: {message!r}"
                        assert_same_bytes(whole, before, f"{case}: whole, {name} not written")
                        continue
                values = op(whole.dequantize())
                assert not values.any(), f"{case}: a write into its {name} did not reach the whole"

        self.explore(check, cases(self, internal=(False,), rank=(2, 2), empty=False), self._fixed())

    def test_op_without_a_quantized_form_says_so(self) -> None:
        """By the policy: an error, a warning, or silently; never unasked."""
        for case in self._fixed():
            made = self.quantize(case.quantizer, case.input())
            with fallback("error"):
                found = refusal(lambda: made + 1)  # noqa: B023
            assert found, f"{case}: dequantizes against fallback('error')"
            assert found.kind is FallbackError, f"{case}: {found}"
            for part in (f"{self.format_name}: ", "aten.add", str(made.nbytes)):
                assert part in found.message, f"{case}: no {part!r} in {found.message!r}"
            with fallback("allow"):
                assert_same_bytes(made + 1, made.dequantize() + 1, f"{case}: + 1")

    # -- helpers ----------------------------------------------------------------------------------

    def _fixed(self) -> list[Case]:
        """Return tensors of two whole tiles and more each way."""
        return self.fixed(internal=(False,), tiles=2, extra=0)

    def _matrix(self, case: Case) -> tuple[int, int]:
        columns = case.shape[-1]
        return (case.proto().numel // columns if columns else 0), columns

    def _exact_or_refused(
        self,
        case: Case,
        name: str,
        op: Callable[[Tensor], Any],
        *,
        must: bool = False,
        parts: tuple[str, ...] = (),
    ) -> None:
        """Run ``op`` on the tensor and on what each of its planes stands for, and compare."""
        made = self.quantize(case.quantizer, case.input())
        planes = self.planes(made)
        try:
            expected: Any = {plane: op(values) for plane, values in planes.items()}
        except (RuntimeError, IndexError):
            return  # torch itself has no such view
        self._check_result(
            f"{case}: {name}", lambda: op(made), expected, must=must, parts=parts, of=made
        )

    def _check_result(
        self,
        what: str,
        call: Callable[[], Any],
        expected: dict[str, Any] | None,
        *,
        of: Any,
        must: bool = False,
        parts: tuple[str, ...] = (),
        alternative: dict[str, Tensor] | None = None,
    ) -> None:
        try:
            with fallback("error"):
                found = call()
        except (ShapeError, FallbackError) as error:
            message = str(error)
            assert not must, f"{what}: is refused, {message}"
            if "block" not in message:  # no slice of the axis is, and where it lies says nothing
                parts = parts[:1]
            for part in (f"{self.format_name}: ", *(parts if type(error) is ShapeError else ())):
                assert part in message, f"{what}: {part!r} is not named in {message!r}"
            return
        except Exception as error:
            msg = f"{what}: raises {type(error).__name__}: {error}"
            raise AssertionError(msg) from error
        assert expected is not None, f"{what}: is taken for exact"
        pieces = found if isinstance(found, (tuple, list)) else (found,)
        for i, piece in enumerate(pieces):
            label = f"{what}, piece {i}" if len(pieces) > 1 else what
            assert isinstance(piece, QuantizedTensor), f"{label}: is a {type(piece).__name__}"
            q, kept = piece.quantizer, of.quantizer
            options = q.with_usage(rowwise=kept.rowwise, columnwise=kept.columnwise)
            assert options == kept, f"{label}: has {q}, of a tensor with {kept}"
            assert piece.dtype == of.dtype, f"{label}: is {piece.dtype}, of {of.dtype}"
            fresh = to_tensor_proto(piece).create_tensor()
            assert_same_facts(piece, fresh, f"{label}: against its prototype", view=True)
            planes = self.planes(piece)
            wanted = {
                plane: values[i] if isinstance(found, (tuple, list)) else values
                for plane, values in expected.items()
            }
            if alternative is not None and set(planes) != set(wanted):
                wanted = alternative  # one buffer serves both usages, which stay
            assert set(planes) == set(wanted), f"{label}: has planes {list(planes)}"
            for plane, values in planes.items():
                assert_same_bytes(
                    values, wanted[plane].contiguous(), f"{label}: {plane} plane, dequantized"
                )
