# SPDX-License-Identifier: Apache-2.0
"""Golden vectors: cases of a .npz file of bit patterns, described by the .json file beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_proto.errors import LayoutError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor

_REFUSED_PREFIX = "REFONLY_"
_REFUSED_KEY = "kernel_differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCase:
    """One case: what went in, what came out, and whether it may be held against a kernel.

    Attributes:
        name: as in the file.
        record: the case's entry in the .json file: source, options, how the input was made.
        tensors: by field name, on the CPU, in their own dtype; None where nothing was produced.
        refused: why the case is no expectation of ours, or None where it is one.
    """

    name: str
    record: Mapping[str, Any]
    tensors: Mapping[str, Tensor | None]
    refused: str | None

    @property
    def allowed(self) -> bool:
        """Whether our result has to equal this one."""
        return self.refused is None

    def __getitem__(self, field: str) -> Tensor:
        """Return a tensor that the case must have."""
        tensor = self.tensors.get(field)
        if tensor is None:
            have = sorted(name for name, t in self.tensors.items() if t is not None)
            msg = f"golden case {self.name} has no tensor {field!r}; it has {have}"
            raise KeyError(msg)
        return tensor


def load_golden(path: str | os.PathLike[str]) -> dict[str, GoldenCase]:
    """Return the cases of a golden file, in the order of its .json file.

    A case whose name starts with ``REFONLY_``, or whose record has ``kernel_differs``, shows what a
    reference did and the kernels do not: its ``refused`` says so. Keep it out of expectations.

    Args:
        path: the .npz file; the .json file of the same name lies beside it.

    Raises:
        LayoutError: the two files do not describe the same arrays.
    """
    import numpy as np

    path = Path(path)
    records = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["cases"]
    cases = {}
    with np.load(path, allow_pickle=False) as arrays:
        for record in records:
            name = record["case"]
            tensors = {
                field: None
                if described is None
                else _tensor(path, arrays, f"{name}.{field}", described)
                for field, described in record["arrays"].items()
            }
            cases[name] = GoldenCase(
                name=name, record=record, tensors=tensors, refused=_refusal(name, record)
            )
    return cases


def _refusal(name: str, record: Mapping[str, Any]) -> str | None:
    if _REFUSED_KEY in record:
        return str(record[_REFUSED_KEY])
    if name.startswith(_REFUSED_PREFIX):
        return (
            f"the name starts with {_REFUSED_PREFIX}: reference behaviour that kernels do not share"
        )
    return None


def _tensor(path: Path, arrays: Any, key: str, described: Mapping[str, Any]) -> Tensor:
    array = arrays.get(key)
    want = (described["stored"], tuple(described["shape"]))
    got = None if array is None else (str(array.dtype), array.shape)
    if array is None or got != want:
        msg = f"golden file {path.name}: array {key} must be {want} as its .json says, got {got}"
        raise LayoutError(msg)
    bits = torch.from_numpy(array)
    return bits.view(getattr(torch, described["torch_dtype"]))
