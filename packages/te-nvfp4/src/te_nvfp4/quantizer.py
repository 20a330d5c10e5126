# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 quantizer: 1x16 blocks of E2M1 codes under E4M3 scales and a float32 amax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_nvfp4 import ops
from te_nvfp4._format import FORMAT
from te_nvfp4.hadamard import SIGN_MASK
from te_nvfp4.layout import BLOCK, buffer_shapes
from te_nvfp4.tensor import NVFP4Storage, NVFP4Tensor
from te_proto.blocks import matrix_shape, round_up
from te_proto.errors import DtypeError, ShapeError, UsageError
from te_proto.layout import BufferSpec
from te_proto.quantizer import Quantizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

E4M3_BOUNDS = (256, 448)
ERROR_MODES = ("MAE", "MSE")


class NVFP4Quantizer(Quantizer):
    """Quantize to NVFP4: 16 elements of E2M1 share an E4M3 scale, all of them one float32 amax.

    A pair of options that the kernels do not have is refused when the quantizer is built. What
    depends on the planes that a call makes is refused by the call: a tensor may drop a plane that
    it could not have been made without.

    Attributes:
        dtype: element format, ``"e2m1"``.
        with_rht: transform the columnwise plane by a 16-point Hadamard matrix with fixed random
            signs, which spreads outliers. Both operands of a product that sums over rows must have
            it, and it cancels there. Takes bfloat16 alone.
        with_post_rht_amax: the columnwise amax is that of the transformed values; ``with_rht``
            needs it.
        with_amax_reduction: the call brings ``group``, over which amaxes are reduced.
        with_2d_quantization: one scale for 16x16 elements, so that the columnwise plane is the
            exact transpose of the rowwise one.
        stochastic_rounding: round codes up with the probability of what is cut off, to 1/256; the
            call brings ``rng``.
        row_scaled_nvfp4: an amax for each row (rowwise) and each column (columnwise).
        nvfp4_use_4over6: choose for each block whether its maximum becomes 6 or 4.
        nvfp4_e4m3_max: largest block scale that the amax is mapped to, 448 or 256. 256 leaves room
            for the scales of blocks mapped to 4; without ``nvfp4_use_4over6`` it is 448.
        nvfp4_4over6_err_mode: the choice is by mean absolute (``"MAE"``) or squared (``"MSE"``)
            error.
        with_random_sign_mask: False leaves the signs of ``with_rht`` out.
        nvfp4_4over6_err_use_fast_math: compare errors in the scaled domain, without a division.
        optimize_for_gemm: scales in the swizzled order that a GEMM reads.

    Source:
        TransformerEngine's NVFP4 kernels, ``common/cast/nvfp4``.
    """

    dtype: str = "e2m1"
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_amax_reduction: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"
    with_random_sign_mask: bool = True
    nvfp4_4over6_err_use_fast_math: bool = False

    format_name: ClassVar[str] = FORMAT.name
    storage_class: ClassVar[type[NVFP4Storage]] = NVFP4Storage
    tensor_class: ClassVar[type[NVFP4Tensor]] = NVFP4Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        # equal layouts are equal values, however they were written
        object.__setattr__(self, "nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode.upper())
        for option, values in (
            ("dtype", FORMAT.elements),
            ("nvfp4_e4m3_max", E4M3_BOUNDS),
            ("nvfp4_4over6_err_mode", ERROR_MODES),
        ):
            if getattr(self, option) not in values:
                self._refuse(
                    option, f"must be one of {', '.join(map(str, values))}", getattr(self, option)
                )
        if not self.nvfp4_use_4over6:
            object.__setattr__(self, "nvfp4_e4m3_max", 448)
        if self.with_rht and not self.with_post_rht_amax:
            rule = "needs with_post_rht_amax=True, as blocks are scaled by the transformed amax"
            self._refuse("with_rht", rule, True, "set both")
        self._refuse_beside(
            "nvfp4_use_4over6",
            with_rht="no kernel chooses the scale of a transformed block",
            stochastic_rounding="the choice is by the error of codes rounded to nearest",
            optimize_for_gemm="its kernel writes compact scales alone",
        )
        self._refuse_beside(
            "row_scaled_nvfp4",
            with_rht="rows are scaled as they are",
            with_2d_quantization="a block of 16 rows would have 16 amaxes",
            stochastic_rounding="its kernel rounds to nearest alone",
            with_amax_reduction="ranks hold different rows",
        )

    def _refuse_beside(self, option: str, **others: str) -> None:
        """Refuse each of ``others`` that is on while ``option`` is, for the reason it maps to."""
        if getattr(self, option):
            for other, reason in others.items():
                if getattr(self, other):
                    rule = f"cannot go with {other}=True, as {reason}"
                    self._refuse(option, rule, True, "turn one of them off")

    @property
    def rht_matrix_random_sign_mask_t(self) -> int:
        """The signs of the transform as the field writes them: bit ``i`` set if sign ``i`` is -1.

        They do not depend on ``with_rht``.
        """
        return SIGN_MASK if self.with_random_sign_mask else 0

    def call_arguments(self) -> tuple[str, ...]:
        """Return ``group`` for a reduction of amax and ``rng`` for stochastic rounding."""
        group = ("group",) if self.with_amax_reduction else ()
        return (*group, "rng") if self.stochastic_rounding else group

    def at_rest(self) -> Self:
        """Return the quantizer without what a call brings: a later write has neither."""
        if not (self.with_amax_reduction or self.stochastic_rounding):
            return self
        return self.replace(with_amax_reduction=False, stochastic_rounding=False)

    # -- shapes ------------------------------------------------------------------------------------

    def alignment(self) -> tuple[int, int]:
        """Multiples that ``(M, K)`` must have for the usages that are on."""
        if self.row_scaled_nvfp4 and self.columnwise:
            return (2 * BLOCK, 2 * BLOCK)
        both = self.with_2d_quantization and (self.rowwise or self.columnwise)
        return (BLOCK if self.columnwise or both else 1, BLOCK if self.rowwise or both else 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise :class:`ShapeError` if a block of a plane that is on would be ragged."""
        if len(shape) == 0:
            msg = "nvfp4: x must have at least one axis, got a 0-d tensor; reshape it to (1, K)"
            raise ShapeError(msg)
        (m, k), (rows, columns) = matrix_shape(shape), self.alignment()
        if k % columns:
            msg = (
                f"nvfp4: the last axis of x must be a multiple of {columns}, got {k} in shape "
                f"{tuple(shape)}; pad it to {round_up(k, columns)} first"
            )
            raise ShapeError(msg)
        if m % rows:
            todo = "" if self.with_2d_quantization else ", or turn the columnwise usage off"
            msg = (
                "nvfp4: the rows of x, all axes but the last together, "
                f"must be a multiple of {rows}, "
                f"got {m} in shape {tuple(shape)}; pad them to {round_up(m, rows)} first{todo}"
            )
            raise ShapeError(msg)

    def describe_buffers(self, shape: Sequence[int]) -> dict[str, BufferSpec]:
        """Return packed codes and scales padded to 128x4 tiles, uint8, and float32 amaxes."""
        shapes = buffer_shapes(
            shape,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            row_scaled=self.row_scaled_nvfp4,
        )
        return {
            name: BufferSpec(buffer, torch.float32 if name.startswith("amax") else torch.uint8)
            for name, buffer in shapes.items()
        }

    # -- calls -------------------------------------------------------------------------------------

    def check_input(self, x: Tensor) -> None:
        """Raise if the options do not go with the planes that are on, or with the dtype."""
        both = self.rowwise and self.columnwise
        if self.nvfp4_use_4over6 and self.with_2d_quantization and not self.rowwise:
            self._refuse_planes("nvfp4_use_4over6 with with_2d_quantization", "rowwise", "on")
        if self.row_scaled_nvfp4 and not self.rowwise:
            self._refuse_planes("row_scaled_nvfp4", "rowwise", "on")
        if self.row_scaled_nvfp4 and self.nvfp4_use_4over6 and self.columnwise:
            self._refuse_planes("row_scaled_nvfp4 with nvfp4_use_4over6", "columnwise", "off")
        needs = "with_rht" if self.with_rht else "row_scaled_nvfp4 of both planes"
        if x.dtype != torch.bfloat16 and (self.with_rht or (self.row_scaled_nvfp4 and both)):
            msg = (
                f"nvfp4: x must be bfloat16 for {needs}, got {str(x.dtype)[6:]}; cast it first, or "
                "turn that option off"
            )
            raise DtypeError(msg)

    def _refuse_planes(self, options: str, plane: str, state: str) -> None:
        """Raise the error of options that have no kernel for the planes that are on."""
        held = "+".join(name for name in ("rowwise", "columnwise") if getattr(self, name))
        msg = (
            f"nvfp4: {options} must be quantized with the {plane} usage {state}, got {held}; "
            f"turn it {state} with with_usage()"
        )
        raise UsageError(msg)

    def quantize_impl(
        self, x: Tensor, *, group: str | None = None, rng: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Quantize ``x``; see :func:`te_nvfp4.reference.quantize` for the arithmetic."""
        _check_rng(x, rng)
        return ops.quantize(x, self, group, rng)

    def quantize_into_impl(
        self, x: Tensor, out: dict[str, Tensor], noop: Tensor | None, **call: Any
    ) -> None:
        """Quantize ``x`` into ``out``, with the kernels where they run."""
        _check_rng(x, call.get("rng"))
        if not ops.quantize_into(x, self, out, noop, **call):
            if noop is not None and self.with_amax_reduction:
                # who skips takes part in the reduction, and counts for nothing
                x = x.masked_fill(noop.reshape(()) == 1.0, 0.0)
            self.copy_quantized(x, out, noop, **call)

    def dequantize_impl(
        self, inner: dict[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Dequantize the rowwise plane if it is held, else the columnwise one."""
        storage = self.replace(internal=True).create_metadata(dtype).build(inner, shape)
        return ops.dequantize(storage, dtype)


def _check_rng(x: Tensor, rng: Tensor | None) -> None:
    if rng is not None and (
        rng.dtype != torch.int64 or tuple(rng.shape) != (2,) or rng.device != x.device
    ):
        msg = (
            f"nvfp4: rng must be int64 of shape (2,), seed and offset, on {x.device}, got "
            f"{str(rng.dtype)[6:]} of shape {tuple(rng.shape)} on {rng.device}"
        )
        raise UsageError(msg)
