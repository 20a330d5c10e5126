# SPDX-License-Identifier: Apache-2.0
"""What every part of the kit stands on: the format, its cases and how they are run."""

from __future__ import annotations

import contextlib
import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, given, settings

from te_proto.errors import DtypeError, QuantizerError, ShapeError, TeError, UsageError
from te_proto.layout import INPUT_DTYPES
from te_proto.proto import TensorProto
from te_proto.registry import describe, get_quantizer, get_recipe
from te_proto.testing import _profile
from te_proto.testing.compare import hostile
from te_proto.testing.facts import Refusal, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy
    from torch import Tensor

    from te_proto.quantizer import Quantizer
    from te_proto.spec import FormatSpec

_RULES = (ShapeError, DtypeError, UsageError, QuantizerError)

USAGES = ((True, True), (True, False), (False, True))


@dataclass(frozen=True, slots=True)
class Case:
    """What is quantized: a quantizer, and shape and dtype of its input."""

    quantizer: Quantizer
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{self.quantizer} of {str(self.dtype)[6:]}{list(self.shape)}"

    def proto(self, device: str | None = "cpu", *, requires_grad: bool = False) -> TensorProto:
        """Return the prototype of the result."""
        return TensorProto(
            shape=self.shape,
            dtype=self.dtype,
            quantizer=self.quantizer,
            requires_grad=requires_grad,
            device=device,
        )

    def input(self, seed: int = 0, *, nonfinite: bool = False) -> Tensor:
        """Return values of every kind that breaks quantizers, the same for the same arguments."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        return hostile(self.shape, self.dtype, seed, block=(1, 16), nonfinite=nonfinite)


class Kit:
    """The format under test, and how its cases are made and run.

    Attributes:
        format_name: id of the format, as :func:`te_proto.available_formats` lists it.
        quantizers: from which option sets are varied; those of the default constructor and of the
            default recipe if empty. Name here what the flags cannot reach: numbers and strings.
        shapes: shapes of the format's own, looked at besides the generated ones.
        smallest_amax: a block whose largest magnitude is below may be off by as much as if it were
            this. The format must say so.
        nonfinite: NaN and infinities have bytes that the format defines; False leaves them out
            where bytes are compared.
        finite_up_to: a larger magnitude may be dequantized to infinity or NaN, as the format says.
    """

    format_name: ClassVar[str]
    quantizers: ClassVar[Sequence[Quantizer]] = ()
    shapes: ClassVar[Sequence[tuple[int, ...]]] = ()
    smallest_amax: ClassVar[float] = 0.0
    nonfinite: ClassVar[bool] = True
    finite_up_to: ClassVar[float] = math.inf

    # -- the format -------------------------------------------------------------------------------

    def card(self) -> FormatSpec:
        """Return the card of the format."""
        return describe(self.format_name)

    def starts(self) -> tuple[Quantizer, ...]:
        """Return the quantizers from which option sets are varied."""
        if self.quantizers:
            return tuple(self.quantizers)
        recipe = get_recipe(self.format_name)
        roles = (recipe.input, recipe.weight, recipe.grad_output)
        made = (get_quantizer(self.format_name)(), *(q for q in roles if q is not None))
        return tuple(dict.fromkeys(made))

    def tile(self, quantizer: Quantizer | None = None) -> int:
        """Return elements of an axis after which every block of the format ends.

        Args:
            quantizer: its alignment counts too.
        """
        return math.lcm(max(*self.card().block, 8), *(quantizer.alignment() if quantizer else ()))

    def error_bound(self, quantizer: Quantizer, *, columnwise: bool) -> float:
        """Return the largest error of a value, as a part of the largest magnitude of its block.

        A format whose elements are not among the known ones, or whose options change the error,
        overrides this.
        """
        known = {
            "e4m3": 2**-4,
            "e5m2": 2**-3,
            "e2m1": 0.19,  # half of the step from 4 to 6, and half a step of an E4M3 scale
            "int8": 0.501 / 127,
        }
        element = getattr(quantizer, "dtype", self.card().elements[0])
        if element not in known:
            msg = f"{self.format_name}: no bound is known for {element!r}; override error_bound()"
            raise TeError(msg)
        # by chance, a code is off by up to a whole step
        return known[element] * (2 if "rng" in quantizer.call_arguments() else 1)

    # -- cases ------------------------------------------------------------------------------------

    def variants(self, *, internal: Sequence[bool] = (False, True)) -> Iterator[Quantizer]:
        """Return each start in each usage, as tensor and as bare storage."""
        for start, usage, bare in itertools.product(self.starts(), USAGES, internal):
            yield start.replace(rowwise=usage[0], columnwise=usage[1], internal=bare)

    def shape_for(self, quantizer: Quantizer, *, tiles: int = 1, extra: int = 3) -> tuple[int, int]:
        """Return a 2-D shape that ``quantizer`` takes, ragged where it may be.

        Args:
            quantizer: its alignment counts.
            tiles: of each axis; see :meth:`tile`.
            extra: elements beyond, rounded up to the alignment.
        """
        rows, columns = quantizer.alignment()
        size = tiles * self.tile(quantizer)
        return (-(-(size + extra) // rows) * rows, -(-(size + extra + 2) // columns) * columns)

    def fixed(
        self, *, internal: Sequence[bool] = (False, True), tiles: int = 1, extra: int = 3
    ) -> list[Case]:
        """Return a case of each variant, those that the format refuses left out.

        Raises:
            AssertionError: none is taken.
        """
        found = []
        for i, quantizer in enumerate(self.variants(internal=internal)):
            shape = self.shape_for(quantizer, tiles=tiles, extra=extra)
            taken = self.taken(quantizer, shape)
            if taken:
                found.append(Case(quantizer, shape, taken[i % len(taken)]))
        assert found, f"{self.format_name}: none of {self.starts()} takes an aligned 2-D input"
        return found

    def taken(self, quantizer: Quantizer, shape: tuple[int, ...]) -> list[torch.dtype]:
        """Return the dtypes in which ``quantizer`` takes an input of ``shape``."""
        return [d for d in INPUT_DTYPES if self.refused(Case(quantizer, shape, d)) is None]

    def refused(self, case: Case) -> Refusal | None:
        """Return why the format does not quantize the case, if so; nothing is computed.

        Any other error is none of its rules: the test that meets it will say so.
        """
        x = torch.empty(case.shape, dtype=case.dtype, device="meta")
        with contextlib.suppress(Exception):
            # a copy, as use might change it
            found = refusal(lambda: self.quantize(case.quantizer.replace(), x))
            return found if found and found.kind in _RULES else None
        return None

    # -- running ----------------------------------------------------------------------------------

    def quantize(self, quantizer: Quantizer, x: Tensor) -> Any:
        """Quantize ``x``, with what the quantizer needs for the call."""
        with call_arguments(quantizer, x.device) as call:
            return quantizer.quantize(x, **call)

    def quantize_into(
        self, quantizer: Quantizer, x: Tensor, out: Any, noop: Tensor | None = None
    ) -> None:
        """Quantize ``x`` into ``out``, with what the quantizer needs for the call."""
        with call_arguments(quantizer, x.device) as call:
            quantizer.quantize_into(x, out, noop, **call)

    def planes(self, tensor: Any) -> dict[str, Tensor]:
        """Return what each plane of a quantized tensor stands for, in float32."""
        q, found = tensor.quantizer, {}
        for name, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            if getattr(q, name):
                plane = tensor.with_usage(**{other: False}) if getattr(q, other) else tensor
                found[name] = plane.dequantize(torch.float32).detach()
        return found

    def explore(
        self,
        check: Callable[[Case], None],
        drawn: SearchStrategy[Case] | None = None,
        fixed: Iterable[Case] = (),
        *,
        examples: int | None = None,
    ) -> None:
        """Run ``check`` on the fixed cases, then on drawn ones, as many as the profile says.

        What fails names its case, the smallest that Hypothesis finds.
        """
        for case in fixed:
            with named(case):
                check(case)
        profile = _profile.active()
        count = profile.examples if examples is None else examples
        if drawn is None or not count:
            return

        @settings(
            max_examples=count,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, *((Phase.shrink,) if profile.shrink else ())),
        )
        @given(drawn)
        def property_of_case(case: Case) -> None:
            with named(case):
                check(case)

        property_of_case()


@contextmanager
def named(case: object) -> Iterator[None]:
    """Add the case to what an exception says."""
    try:
        yield
    except Exception as error:
        if str(case) not in str(error) and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"with {case}")
        raise


@contextmanager
def cuda_may_be_missing() -> Iterator[None]:
    """Leave the rest out where a torch without CUDA cannot even pretend to copy a CUDA tensor."""
    try:
        yield
    except RuntimeError as error:
        if torch.version.cuda is not None or "not linked with support for cuda" not in str(error):
            raise


@contextmanager
def call_arguments(quantizer: Quantizer, device: torch.device) -> Iterator[dict[str, Any]]:
    """Give what ``quantizer`` needs with a call on ``device``: a seed, a group of one process."""
    needed = quantizer.call_arguments()
    call: dict[str, Any] = {}
    if "rng" in needed:
        call["rng"] = torch.tensor([20, 3], device=device)
    if "group" not in needed:
        yield call
        return
    with one_process() as group:
        yield call | {"group": group}


@contextmanager
def one_process() -> Iterator[str]:
    """Give the name of a process group, of this process alone if there is none yet."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]  # initialized
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]  # initialized
    finally:
        dist.destroy_process_group()
