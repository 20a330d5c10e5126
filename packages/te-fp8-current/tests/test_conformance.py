# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_fp8_current import Float8CurrentScalingQuantizer
from te_proto.testing import FormatConformance


class TestFloat8Current(FormatConformance):
    format_name = "fp8_current"
    quantizers = (
        Float8CurrentScalingQuantizer(),
        Float8CurrentScalingQuantizer(separate_transpose=True, dtype="e5m2"),
        Float8CurrentScalingQuantizer(with_amax_reduction=True, amax_epsilon=1e-6),
    )
