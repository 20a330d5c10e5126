# SPDX-License-Identifier: Apache-2.0
"""Run one kernel launch on CPU tensors in Triton's interpreter, with the exact builder.

Imports triton. The kernel stays the JITFunction it is: its source is rewritten and executed aside,
the names of ``triton.language`` are patched for the time of the launch and put back after it, also
when the kernel raises, so that the same object can be compiled ahead of time in the same process.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from te_proto.errors import DeviceError
from te_proto.testing._builder import ADDRESS_BITS, ExactBuilder, ExactReduce, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MISSING = object()


class _Rewriter(stock.FunctionRewriter):
    """Rewrites assignments as stock does, but leaves the kernel's module as it was.

    Stock copies its own globals there (numpy, ast and more), which hides a missing import from
    every test.
    """

    def _compile_and_exec(self, transformed: Any) -> Callable[..., Any]:
        code = compile(transformed, filename=self.filename, mode="exec")
        names: dict[str, Callable[..., Any]] = {}
        exec(code, self.fn.__globals__, names)
        return names[self.fn.__name__]


# keyed by id: hashing a JITFunction walks its globals, which are patched during a launch
_rewritten: dict[int, tuple[JITFunction[Any], Callable[..., Any]]] = {}


def _rewrite(kernel: JITFunction[Any]) -> Callable[..., Any]:
    if id(kernel) not in _rewritten:
        _rewritten[id(kernel)] = (kernel, _Rewriter(kernel.fn).rewrite_ast())
    return _rewritten[id(kernel)][1]


class Launch:
    """The patches of one running launch, undone last first."""

    def __init__(self, builder: ExactBuilder) -> None:
        self.builder = builder
        self.semantic = TritonSemantic(builder)
        self.argument = ""  # name of the launch argument being converted
        self._undo = ExitStack()
        self._seen: set[int] = set()

    def __enter__(self) -> Launch:
        with self._undo:  # undone here if one fails
            self._patch()
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _patch(self) -> None:
        patch = self._undo.enter_context
        # a kernel may make NaN and overflow on purpose; the GPU does not warn of it
        patch(np.errstate(all="ignore"))
        patch(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        patch(mock.patch.object(stock, "interpreter_builder", self.builder))
        patch(mock.patch.object(stock, "interpreter_semantic", self.semantic))
        patch(mock.patch.object(stock, "ReduceOps", ExactReduce))
        patch(mock.patch.object(stock, "_implicit_cvt", self._argument(stock._implicit_cvt)))
        patch(
            mock.patch.object(
                JITFunction, "__call__", lambda kernel, *a, **k: self.call(kernel)(*a, **k)
            )
        )
        # the knob has no plain attribute for mock to restore
        interpret = knobs.runtime.interpret
        self._undo.callback(setattr, knobs.runtime, "interpret", interpret)
        knobs.runtime.interpret = True
        for name in _libdevice_names():
            function = functools.partial(getattr(cuda_libdevice, name), _semantic=self.semantic)
            for module in (libdevice, cuda_libdevice):
                self._set(module, name, function)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name, _MISSING)
        undo = (delattr, owner, name) if old is _MISSING else (setattr, owner, name, old)
        self._undo.callback(*undo)
        setattr(owner, name, value)

    def call(self, kernel: JITFunction[Any]) -> Callable[..., Any]:
        """Return the function to call for a kernel or helper, its module's names patched."""
        names = kernel.fn.__globals__
        if id(names) not in self._seen:
            self._seen.add(id(names))
            scope = stock._patch_lang(kernel.fn)
            self._undo.callback(scope.restore)
            # the rewritten source refers to these two
            for name in ("interpreter_semantic", "_InterpreterComparison"):
                if hasattr(stock, name):
                    self._undo.callback(_restore_item, names, name, names.get(name, _MISSING))
                    names[name] = getattr(stock, name)
        return _rewrite(kernel)

    def _argument(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the conversion of a launch argument, typed as by the JIT, pointers tagged."""

        def convert(value: Any) -> Any:
            if isinstance(value, bool):
                return tl.tensor(stock.TensorHandle(np.array([value]), tl.int1), tl.int1)
            if isinstance(value, float):
                # stock passes the python number on, which never widens a bf16 operand; the JIT's
                # fp32 does
                return tl.tensor(
                    stock.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32
                )
            out = original(value)
            if hasattr(value, "data_ptr"):
                out.handle.data = out.handle.data | np.uint64(self.tag(value) << ADDRESS_BITS)
            return out

        return convert

    def tag(self, value: Any) -> int:
        """Register the bytes of a tensor argument and return the number its pointers carry."""
        tensor = stock._unwrap_tensor(value)
        if tensor.device.type != "cpu":
            msg = (
                f"interpreter: argument {self.argument} is on {tensor.device} beside a CPU tensor; "
                f"move all arguments to one device"
            )
            raise DeviceError(msg)
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        start = tensor.data_ptr()
        self.builder.regions.append(Region(self.argument, start, start + size))
        return len(self.builder.regions)


def _restore_item(names: dict[str, Any], name: str, old: Any) -> None:
    if old is _MISSING:
        names.pop(name, None)
    else:
        names[name] = old


@functools.cache
def _libdevice_names() -> tuple[str, ...]:
    return tuple(
        name
        for name, value in vars(libdevice).items()
        if inspect.isfunction(value) and hasattr(cuda_libdevice, name)
    )


@functools.cache
def _launch_options() -> frozenset[str]:
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    fields = (f.name for options in (CUDAOptions, HIPOptions) for f in dataclasses.fields(options))
    return frozenset(fields)


def run(
    kernel: JITFunction[Any], grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Execute ``kernel[grid](*args, **kwargs)``, one program after the other.

    Raises:
        OutOfBoundsError: an active lane loads or stores outside the tensor its pointer comes from.
        TypeError: an argument is missing, or is neither a parameter nor a launch option.
    """
    parameters = {p.name: p.is_constexpr for p in kernel.params}
    unknown = sorted(kwargs.keys() - parameters.keys() - _launch_options())
    if unknown:
        msg = f"interpreter: {kernel.fn.__name__} has no parameter or launch option {unknown[0]!r}"
        raise TypeError(msg)
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    given = inspect.getcallargs(
        kernel.fn, *args, **{k: v for k, v in kwargs.items() if k in parameters}
    )
    grid = grid(given) if callable(grid) else grid
    grid = (*grid, *(1,) * (3 - len(grid)))

    with Launch(ExactBuilder()) as launch:
        function = launch.call(kernel)
        values = {}
        for name, value in given.items():
            launch.argument = name
            values[name] = value if parameters[name] else stock._implicit_cvt(value)
        launch.builder.set_grid_dim(*grid)
        for program in _programs(grid):
            launch.builder.set_grid_idx(*program)
            function(**values)


def _programs(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    # the last axis of the grid is the slow one, as the GPU numbers its blocks
    return ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))


@contextmanager
def intercepted(wanted: Callable[[Any], bool]) -> Iterator[None]:
    """Send every launch whose first tensor argument is ``wanted`` to :func:`run`."""
    original = JITFunction.run

    def patched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        tensors = (t for t in (*args, *kwargs.values()) if hasattr(_unwrap(t), "data_ptr"))
        first = next(tensors, None)
        if warmup or first is None or not wanted(_unwrap(first)):
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        return run(self, grid, args, kwargs)

    with mock.patch.object(JITFunction, "run", patched):
        yield


def _unwrap(value: Any) -> Any:
    if isinstance(value, triton.tools.tensor_descriptor.TensorDescriptor):
        value = value.base
    return stock._unwrap_tensor(value)
