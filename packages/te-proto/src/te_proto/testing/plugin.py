# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for te-proto and its formats; load it with ``-p te_proto.testing.plugin``.

It is not loaded by merely installing te-proto. Out of tree, write
``pytest_plugins = ["te_proto.testing.plugin"]`` in the root ``conftest.py``.

Options:
    --te-device: where the ``device`` fixture puts tensors, ``cpu`` unless told.
    --te-profile: how far ``FormatConformance`` looks: ``ci``, the same cases each time, or
        ``long``.

Markers:
    gpu: the test needs CUDA; it is skipped, with the reason torch gives, where there is none.

Fixtures:
    device, cpu_triton, poisoned, counted.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from te_proto.testing import _profile
from te_proto.testing.compiles import CompileCounts, count_compiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--te-device`` and ``--te-profile``."""
    group = parser.getgroup("te-proto")
    group.addoption(
        "--te-device", default="cpu", help="device of the `device` fixture (default: cpu)"
    )
    group.addoption(
        "--te-profile",
        default="ci",
        choices=sorted(_profile.PROFILES),
        help="how far the conformance kit looks (default: ci)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, choose the profile and check the device."""
    _profile.use(_profile.PROFILES[config.getoption("--te-profile")])
    config.addinivalue_line("markers", "gpu: needs CUDA; skipped where there is none")
    device = str(config.getoption("--te-device"))
    if device.startswith("cuda") and (reason := cuda_absent()):
        msg = f"--te-device={device}: {reason}"
        raise pytest.UsageError(msg)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a ``gpu`` test where there is no CUDA, saying why."""
    if item.get_closest_marker("gpu") and (reason := cuda_absent()):
        pytest.skip(reason)


def cuda_absent() -> str | None:
    """Return why torch cannot use CUDA here, or None where it can."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (torch.version.cuda is None)"
    try:
        torch.cuda.init()
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    else:
        why = f"torch.cuda.device_count() is {torch.cuda.device_count()}"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: {why}"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that ``--te-device`` names."""
    import torch

    return torch.device(request.config.getoption("--te-device"))


@pytest.fixture
def cpu_triton() -> Iterator[None]:
    """Interpret Triton kernels launched on CPU tensors, exactly; skip without triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(
            "triton is not installed; `pip install triton` to run kernels in the interpreter"
        )
    from te_proto.testing.interpreter import cpu_launches_interpreted

    with cpu_launches_interpreted():
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill every fresh allocation with 0xFF bytes: see ``poisoned_allocations``."""
    from te_proto.testing.poison import poisoned_allocations

    with poisoned_allocations():
        yield


@pytest.fixture
def counted() -> Iterator[CompileCounts]:
    """Count the compilations of the whole test, see ``count_compiles``."""
    with count_compiles() as counts:
        yield counts
