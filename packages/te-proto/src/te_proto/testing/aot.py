# SPDX-License-Identifier: Apache-2.0
"""What a Triton kernel becomes on an NVIDIA GPU, seen without one.

``triton.compile`` with an explicit target touches no driver, and every triton wheel brings ptxas.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_proto.errors import TeError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_ELEMENT_BYTES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64, 128)}
_ELEMENT_BYTES["bf16"] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AotReport:
    """What ptxas and the PTX text say of one compiled kernel.

    Attributes:
        kernel: its name.
        target: as ptxas was told, such as ``"sm_90a"``.
        registers: 32-bit registers a thread.
        spill_stores: bytes a thread stores to local memory for want of registers.
        spill_loads: bytes a thread loads back.
        stack: bytes of stack a thread.
        shared_bytes: shared memory a block, static and dynamic.
        load_widths: bytes that one thread loads by one instruction -> such instructions, global
            memory.
        store_widths: the same for stores.
        cvt: the conversions to and from 4- and 8-bit formats in the PTX, sorted, each once.
        ptx: the text.
    """

    kernel: str
    target: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared_bytes: int
    load_widths: Mapping[int, int]
    store_widths: Mapping[int, int]
    cvt: tuple[str, ...]
    ptx: str

    @property
    def spills(self) -> int:
        """Bytes a thread moves because of spills; 0 is what a kernel should have."""
        return self.spill_stores + self.spill_loads

    @property
    def widest_load(self) -> int:
        """Bytes of the widest load."""
        return max(self.load_widths, default=0)

    @property
    def widest_store(self) -> int:
        """Bytes of the widest store."""
        return max(self.store_widths, default=0)


def aot_report(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str = "sm_90",
    *,
    align16: Collection[str] = (),
    num_warps: int = 4,
    options: Mapping[str, Any] | None = None,
) -> AotReport:
    """Compile ``kernel`` for ``target`` and return what came out.

    Pointers are taken as 16-byte aligned, as the JIT finds torch's allocations. Integers are not,
    unless ``align16`` names them: the JIT looks at the value of each launch, and so must whoever
    asks here. triton 3.6.0 keeps the e5m2 conversion of the first target it compiled for; with it,
    use one process and one ``TRITON_CACHE_DIR`` a target.

    Args:
        kernel: what ``@triton.jit`` made.
        signature: parameter -> Triton type, such as ``"*bf16"``, ``"*fp8e4nv"``, ``"*u8"``,
            ``"i32"``.
        constexprs: parameter -> value, for all others.
        target: ``"sm_80"`` to ``"sm_121"``.
        align16: integer parameters that are multiples of 16.
        num_warps: warps a block.
        options: further launch options, such as ``{"enable_fp_fusion": False}``; it is on by
            default.

    Raises:
        TeError: a parameter has neither type nor value, the target is not NVIDIA's, or
            ``TRITON_INTERPRET`` took the kernel away from the compiler.
    """
    _check(kernel, signature, constexprs, target, align16)
    arch = int(target.removeprefix("sm_"))
    # said out loud: triton 3.9 warns that its default will change
    chosen = {"num_warps": num_warps, "enable_fp_fusion": True, **(options or {})}
    compiled = _compile(kernel, signature, constexprs, arch, align16, chosen)
    ptx = compiled.asm["ptx"]
    log = _ptxas(ptx, arch, fusion=bool(chosen["enable_fp_fusion"]))
    return AotReport(
        kernel=compiled.metadata.name,
        target=_ptx_target(ptx),
        registers=_number(r"Used (\d+) registers", log),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        stack=_number(r"(\d+) bytes stack frame", log),
        shared_bytes=compiled.metadata.shared,
        load_widths=_widths(ptx, "ld"),
        store_widths=_widths(ptx, "st"),
        cvt=tuple(sorted(set(re.findall(r"\bcvt\.\S*(?:e4m3|e5m2|e2m1|e8m0)\S*", ptx)))),
        ptx=ptx,
    )


def _compile(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int,
    align16: Collection[str],
    options: Mapping[str, Any],
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    aligned = [n for n in names if signature.get(n, "").startswith("*") or n in align16]
    source = ASTSource(
        fn=kernel,
        signature={n: signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constexprs.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))


def _check(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    align16: Collection[str],
) -> None:
    if not re.fullmatch(r"sm_\d+", target):
        msg = f"aot_report: target must be sm_ and a number, such as sm_90, got {target!r}"
        raise TeError(msg)
    if not hasattr(kernel, "cache_key"):
        msg = (
            f"aot_report: kernel must be a JITFunction, got {type(kernel).__name__}; "
            f"decorate it with triton.jit, and unset TRITON_INTERPRET"
        )
        raise TeError(msg)
    given = [*signature, *constexprs]
    for name in kernel.arg_names:
        if given.count(name) != 1:
            how = "neither" if name not in given else "both"
            msg = (
                f"aot_report: parameter {name} is in {how} of signature and constexprs; "
                f"put it in one"
            )
            raise TeError(msg)
    if unknown := sorted({*given, *align16} - set(kernel.arg_names)):
        msg = f"aot_report: the kernel has no parameter {unknown[0]!r}, it has {kernel.arg_names}"
        raise TeError(msg)


def _ptx_target(ptx: str) -> str:
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    return found[1] if found else ""


def _ptxas(ptx: str, arch: int, *, fusion: bool) -> str:
    """Assemble once more with ``-v``: the compiler keeps the cubin, not what ptxas said."""
    from triton.backends.nvidia import compiler

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [compiler.get_ptxas(arch).path, "-v", f"--gpu-name={_ptx_target(ptx)}"]
        command += [] if fusion else ["--fmad=false"]
        command += [str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"aot_report: ptxas refused the kernel: {done.stderr.strip()}"
        raise TeError(msg)
    return done.stderr + done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        msg = f"aot_report: ptxas did not say {pattern!r}, it said {text!r}"
        raise TeError(msg)
    return int(found[1])


def _widths(ptx: str, operation: str) -> dict[int, int]:
    """Count global loads or stores by the bytes one thread moves, such as 16 for ``v4.b32``."""
    counts: Counter[int] = Counter()
    for suffixes in re.findall(rf"\b{operation}\.global((?:\.[\w:]+)+)", ptx):
        parts = suffixes.split(".")
        vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
        element = next(_ELEMENT_BYTES[p] for p in reversed(parts) if p in _ELEMENT_BYTES)
        counts[vector * element] += 1
    return dict(sorted(counts.items()))
