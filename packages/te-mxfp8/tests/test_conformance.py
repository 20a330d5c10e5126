# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_proto.testing import FormatConformance


class TestMXFP8(FormatConformance):
    format_name = "mxfp8"
