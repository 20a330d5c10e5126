# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_example.reference import SMALLEST_SCALE
from te_proto.testing import FormatConformance


class TestExample(FormatConformance):
    format_name = "example"
    smallest_amax = 127 * SMALLEST_SCALE
    nonfinite = False  # torch leaves open what int8 becomes of NaN
