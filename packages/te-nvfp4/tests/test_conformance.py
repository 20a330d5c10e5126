# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from te_proto.testing import FormatConformance


class TestNVFP4(FormatConformance):
    format_name = "nvfp4"
