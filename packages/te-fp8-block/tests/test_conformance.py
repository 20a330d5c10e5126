# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_fp8_block import Float8BlockQuantizer
from te_proto.testing import FormatConformance


class TestFloat8Block(FormatConformance):
    format_name = "fp8_block"
    quantizers = (
        Float8BlockQuantizer(block_scaling_dim=1, dtype="e5m2"),
        Float8BlockQuantizer(block_scaling_dim=2),
        Float8BlockQuantizer(amax_epsilon=1e-6, force_pow_2_scales=False),
    )
