# SPDX-License-Identifier: Apache-2.0
"""The tests that every format must pass."""

from __future__ import annotations

from te_proto.testing.conformance.base import Case
from te_proto.testing.conformance.compiled import CompileConformance
from te_proto.testing.conformance.copies import CopyConformance
from te_proto.testing.conformance.flatten import FlattenConformance
from te_proto.testing.conformance.inputs import InputConformance
from te_proto.testing.conformance.kernels import KernelConformance
from te_proto.testing.conformance.processes import ProcessConformance
from te_proto.testing.conformance.prototypes import PrototypeConformance
from te_proto.testing.conformance.quantizers import QuantizerConformance
from te_proto.testing.conformance.values import ValueConformance
from te_proto.testing.conformance.views import ViewConformance

__all__ = ["Case", "FormatConformance"]


class FormatConformance(
    PrototypeConformance,
    QuantizerConformance,
    FlattenConformance,
    InputConformance,
    ValueConformance,
    ViewConformance,
    CopyConformance,
    KernelConformance,
    CompileConformance,
    ProcessConformance,
):
    """Every test there is, for a format that is named in a subclass."""
