# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_mxfp8 import MXFP8Quantizer
from te_proto.testing import FormatConformance


class TestMXFP8(FormatConformance):
    format_name = "mxfp8"
    quantizers = (
        MXFP8Quantizer(),
        MXFP8Quantizer(optimize_for_gemm=True, dtype="e5m2"),
        MXFP8Quantizer(with_2d_quantization=True),
    )
