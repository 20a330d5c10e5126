# SPDX-License-Identifier: Apache-2.0
"""Run on CPU tensors what a format does with CUDA tensors, without a GPU and without knowing it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from typing_extensions import Self

from te_proto.storage import QuantizedStorage
from te_proto.testing.interpreter import cpu_launches_interpreted

if TYPE_CHECKING:
    from collections.abc import Callable


class Shadow(TorchDispatchMode):
    """Fake CUDA tensors with real CPU tensors beside them, on which every op runs too.

    A format sees the device ``cuda`` and takes the path of its kernels. Each op it calls runs
    twice: as a fake, from which the format goes on, and for real on the CPU tensors, where Triton
    kernels are interpreted.

    Attributes:
        namespace: ops of this torch.library namespace are recorded.
        calls: recorded ops with copies of their real arguments.
    """

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self._real: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # an id belongs to its tensor while that lives
        self._fake_mode = FakeTensorMode()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(cpu_launches_interpreted())
        self._stack.enter_context(self._fake_mode)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def put(self, real: Tensor) -> Tensor:
        """Return a fake CUDA tensor that stands for ``real``."""
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        self._pair(fake, real)
        return fake

    def of(self, fake: Tensor) -> Tensor:
        """Return the real CPU tensor beside ``fake``."""
        return self._real[id(fake)]

    def taken(self, value: Any) -> Any:
        """Return ``value`` with the real tensor for each fake one, quantized tensors included."""
        if isinstance(value, QuantizedStorage):
            inner = {n: self.of(t) for n, t in QuantizedStorage.inner_tensors(value).items()}
            return value.__tensor_flatten__()[1].build(inner, tuple(value.shape))
        return self.of(value) if isinstance(value, Tensor) else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fake = func(*args, **kwargs)
        real_args, real_kwargs = tree_map(self._cpu, (args, kwargs))
        with unset_fake_temporarily():
            if func.namespace == self.namespace:
                kept = tree_map_only(Tensor, Tensor.clone, real_args)
                self.calls.append((func, kept))
            real = func(*real_args, **real_kwargs)
        fakes, reals = tree_flatten(fake)[0], tree_flatten(real)[0]
        for a, b in zip(fakes, reals, strict=True):
            if isinstance(a, Tensor):
                self._check(func, a, b)
                self._pair(a, b)
        return fake

    def _cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._real.get(id(value), value)
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return value

    def _pair(self, fake: Tensor, real: Tensor) -> None:
        self._kept.append(fake)
        self._real[id(fake)] = real

    def _check(self, func: Any, fake: Tensor, real: Tensor) -> None:
        if func.namespace != self.namespace:
            return
        for name in ("shape", "dtype"):
            a, b = getattr(fake, name), getattr(real, name)
            assert a == b, f"{func}: the fake has {name} {a}, the kernel makes {b}"
        if fake.numel():
            assert fake.stride() == real.stride(), (
                f"{func}: the fake has strides {fake.stride()}, the kernel makes {real.stride()}"
            )


def on_shadows(namespace: str, run: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Shadow]:
    """Return what ``run`` makes of the inputs as CUDA tensors, with real data, and the record."""
    with Shadow(namespace) as shadow:
        out = run(*(shadow.put(x) for x in inputs))
        with unset_fake_temporarily():
            leaves = out if isinstance(out, (tuple, list)) else (out,)
            return tuple(shadow.taken(leaf) for leaf in leaves), shadow
