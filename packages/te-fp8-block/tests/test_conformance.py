# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_proto.testing import FormatConformance


class TestFloat8Block(FormatConformance):
    format_name = "fp8_block"
