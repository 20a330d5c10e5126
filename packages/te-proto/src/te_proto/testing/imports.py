# SPDX-License-Identifier: Apache-2.0
"""What importing a package costs, seen in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

_SCRIPT = """\
import importlib, json, sys

def loaded(*names):
    return [name for name in names if name in sys.modules]

facts = {"loaded": {}, "unresolved": []}
for name in sys.argv[1:]:
    importlib.import_module(name)
    facts["loaded"][name] = loaded("numpy", "torch", "triton")
package = sys.modules[sys.argv[1]]
facts["listed"], facts["public"] = dir(package), sorted(package.__all__)
for name in package.__all__:
    try:
        getattr(package, name)
    except (AttributeError, ImportError) as error:
        facts["unresolved"].append(f"{name}: {error}")
facts["triton"] = loaded("triton")
try:
    facts["absent"] = f"is {package.absent!r}"
except Exception as error:
    facts["absent"] = f"raises {type(error).__name__}: {error}"
print(json.dumps(facts))
"""


def assert_lazy_package(package: str, *torch_free: str) -> None:
    """Raise AssertionError unless ``package`` imports its public names on first access.

    Importing it, and then each module of ``torch_free``, must load neither numpy nor torch nor
    triton, and print nothing. Every name of ``__all__`` must resolve without triton; ``dir()``
    must list just those; an unknown name must be the usual AttributeError.

    Args:
        package: import name; what :func:`te_proto.lazy_exports` is for.
        torch_free: further modules that users import without torch, such as ``te_mxfp8._format``.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, package, *torch_free],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if done.returncode or done.stderr or done.stdout.count("\n") != 1:
        msg = f"import {package}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        raise AssertionError(msg)
    facts = json.loads(done.stdout)
    usual = f"raises AttributeError: module {package!r} has no attribute 'absent'"
    faults = [
        *(f"import {name} loads {', '.join(m)}" for name, m in facts["loaded"].items() if m),
        *(f"{package}.{fault}" for fault in facts["unresolved"]),
    ]
    if facts["triton"]:
        faults.append(f"the public names of {package} load triton")
    if facts["listed"] != facts["public"]:
        faults.append(f"dir({package}) is {facts['listed']}, its __all__ sorted {facts['public']}")
    if facts["absent"] != usual:
        faults.append(f"{package}.absent {facts['absent']}, expected: {usual}")
    if faults:
        raise AssertionError("\n".join(faults))
