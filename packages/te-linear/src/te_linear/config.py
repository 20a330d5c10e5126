# SPDX-License-Identifier: Apache-2.0
"""How a linear layer quantizes and is sharded, as a value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_proto.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from te_proto.quantizer import Quantizer
    from te_proto.recipe import Recipe

PARALLEL_MODES = (None, "column", "row")


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """How a linear layer quantizes and is sharded, as a value.

    The usages of the quantizers do not count: the plan sets the ones each operand needs.

    Attributes:
        input: quantizer of the input.
        weight: quantizer of the weight.
        grad_output: quantizer of the gradient of the output.
        output: quantizer of the output, whose gradient passes straight through; None returns it
            plain.
        save_original_input: keep the input as it came for backward, instead of its columnwise
            plane: nothing more is kept where another layer keeps it too.
        parallel_mode: ``"column"`` cuts the weight along N, ``"row"`` along K, over the tensor
            parallel ranks. A column parallel layer takes the whole input and returns its part of
            the output; a row parallel one takes its part and returns the whole, summed.
        tp_size: tensor parallel ranks.
        tp_group: c10d name of their process group.
        sequence_parallel: the whole input (column) or output (row) is cut along its first axis,
            rank by rank.
        amax_group: c10d name of the group over which quantizers with a reduction take their amax;
            ``tp_group`` if None.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    output: Quantizer | None = None
    save_original_input: bool = False
    parallel_mode: str | None = None
    tp_size: int = 1
    tp_group: str | None = None
    sequence_parallel: bool = False
    amax_group: str | None = None

    def __post_init__(self) -> None:
        if self.parallel_mode not in PARALLEL_MODES:
            _refuse("parallel_mode must be 'column', 'row' or None", self.parallel_mode)
        if self.tp_size < 1:
            _refuse("tp_size must be at least 1", self.tp_size)
        if self.parallel_mode is None and (self.tp_size > 1 or self.sequence_parallel):
            given = f"tp_size={self.tp_size}, sequence_parallel={self.sequence_parallel}"
            _refuse("parallel_mode must be 'column' or 'row' for more than one rank", given)
        if self.tp_size > 1 and self.tp_group is None:
            todo = "pass the group_name of the process group"
            _refuse(f"tp_group must be the c10d name of the {self.tp_size} ranks", None, todo)

    def __hash__(self) -> int:
        # every eager call looks its plan up, and quantizers have many fields
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, Any]:
        # the hash of a string is another one in each process
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}

    @classmethod
    def from_recipe(cls, recipe: Recipe, **options: Any) -> Self:
        """Return the configuration that a format's recipe stands for, with other ``options``."""
        roles = {r: getattr(recipe, r) for r in ("input", "weight", "grad_output")}
        return cls(**{**roles, **options})


def _refuse(rule: str, value: object, todo: str = "") -> None:
    msg = f"linear: {rule}, got {value!r}{'; ' if todo else ''}{todo}"
    raise UsageError(msg)
