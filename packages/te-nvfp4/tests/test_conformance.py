# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_nvfp4 import NVFP4Quantizer
from te_proto.testing import FormatConformance

if TYPE_CHECKING:
    from te_proto import Quantizer


class TestNVFP4(FormatConformance):
    format_name = "nvfp4"
    quantizers = (
        NVFP4Quantizer(),
        NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
        NVFP4Quantizer(with_2d_quantization=True, optimize_for_gemm=True),
        NVFP4Quantizer(row_scaled_nvfp4=True),
        NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE", nvfp4_e4m3_max=256),
    )
    # 6 * 448 / amax, the scale of the whole tensor, stops at the largest float32
    smallest_amax = 6 * 448 / torch.finfo(torch.float32).max
    # amax is multiplied by the scale of a block, up to 448, before it is divided by 6 * 448
    finite_up_to = torch.finfo(torch.float32).max / 448

    def error_bound(self, quantizer: Quantizer, *, columnwise: bool) -> float:
        assert isinstance(quantizer, NVFP4Quantizer)
        bound = super().error_bound(quantizer, columnwise=columnwise)
        # the sum of 16 transformed values has a larger maximum, and their errors add up
        return bound * 2.5 if quantizer.with_rht and columnwise else bound
