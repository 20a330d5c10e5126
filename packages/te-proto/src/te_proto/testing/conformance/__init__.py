# SPDX-License-Identifier: Apache-2.0
"""The tests that every format must pass, by subject; needs ``te-proto[testing]``.

A plugin's whole file::

    from te_proto.testing import FormatConformance


    class TestMXFP8(FormatConformance):
        format_name = "mxfp8"

Every test says which of the faults of public libraries it looks for. Each runs over a few fixed
cases, the same in every run, then over cases that Hypothesis draws from the options that the
format itself accepts: ``pytest --te-profile=long`` draws many more. A failure names the case.
"""

from __future__ import annotations

from te_proto.testing.conformance.base import Case
from te_proto.testing.conformance.compiled import CompileConformance
from te_proto.testing.conformance.copies import CopyConformance
from te_proto.testing.conformance.flatten import FlattenConformance
from te_proto.testing.conformance.inputs import InputConformance
from te_proto.testing.conformance.kernels import KernelConformance
from te_proto.testing.conformance.operations import OperationConformance
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
    OperationConformance,
    KernelConformance,
    CompileConformance,
    ProcessConformance,
):
    """Every test there is, for the installed format that a subclass names.

    ``format_name`` is all that is needed. What the kit cannot know of a format, a subclass says by
    the other attributes and methods of :class:`te_proto.testing.conformance.base.Kit`: options
    that are numbers or strings, bounds of the error, and what the format leaves open. A test that
    does not apply is skipped with its reason.
    """
