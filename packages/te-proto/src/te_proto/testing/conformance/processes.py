# SPDX-License-Identifier: Apache-2.0
"""What another process sees: listing, import, first call, checkpoints."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from te_proto import registry
from te_proto.errors import PluginError, QuantizerError, UnknownFormatError
from te_proto.spec import PROTOCOL, FormatSpec
from te_proto.storage import QuantizedStorage
from te_proto.tensor import QuantizedTensor
from te_proto.testing.conformance.base import Kit
from te_proto.testing.facts import assert_same_bytes, assert_same_facts, refusal

if TYPE_CHECKING:
    from pathlib import Path


class ProcessConformance(Kit):
    """The installed distribution."""

    def fresh(self, code: str, **environment: str) -> str:
        """Run code in a process of its own and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, f"{self.format_name}: a fresh process fails:\n{done.stderr}"
        return done.stdout.strip()

    # -- the card ---------------------------------------------------------------------------------

    def test_card_leads_to_its_classes(self) -> None:
        """Names, numbers and import strings of the card are those of the classes."""
        card = self.card()
        assert isinstance(card, FormatSpec)
        assert (card.name, card.protocol) == (self.format_name, PROTOCOL), f"{card}"
        assert self.format_name in registry.available_formats()
        assert card.summary, f"{card}: a listing has nothing to show"
        assert card.elements, f"{card}: no element format"
        assert all(size >= 0 for size in card.block), f"{card}: block {card.block}"
        cls = registry.get_quantizer(self.format_name)
        for field, expected in (
            ("quantizer", cls),
            ("tensor", cls.tensor_class),
            ("storage", cls.storage_class),
        ):
            found = registry.resolve(getattr(card, field))
            assert found is expected, f"{card}: {field} is {found}, the quantizer makes {expected}"
        assert cls.format_name == self.format_name, f"{cls} says {cls.format_name}"
        assert issubclass(cls.tensor_class, QuantizedTensor), f"{cls.tensor_class}"
        assert issubclass(cls.storage_class, QuantizedStorage), f"{cls.storage_class}"
        tensors = [c for c in cls.storage_class.__mro__ if c is torch.Tensor]
        assert not tensors, f"{cls.storage_class} is a tensor"
        recipe = registry.get_recipe(self.format_name)
        for role in ("input", "weight", "grad_output"):
            quantizer = getattr(recipe, role)
            assert isinstance(quantizer, cls), f"{self.format_name}: {role} of {recipe}"

    def test_package_resolves_its_names_on_access(self) -> None:
        """Each public one, and no other."""
        package = importlib.import_module(self.card().quantizer.partition(":")[0].partition(".")[0])
        public = getattr(package, "__all__", ())
        missing = [name for name in public if not hasattr(package, name)]
        assert not missing, f"{package.__name__}: cannot resolve {missing}"
        assert set(public) <= set(dir(package)), f"{package.__name__}: dir() hides names"
        with pytest.raises(AttributeError, match="absent"):
            package.absent  # noqa: B018

    def test_recipe_refuses_what_it_does_not_know(self) -> None:
        """Every choice that is a string has values, and the message names the format."""
        make = registry.resolve(self.card().recipe)
        for name, parameter in inspect.signature(make).parameters.items():
            if isinstance(parameter.default, str):
                found = refusal(lambda: make(**{name: "no such"}))  # noqa: B023
                assert found, f"{self.format_name}: recipe takes {name}='no such'"
                assert found.kind is QuantizerError, f"{self.format_name}: {name}: {found}"
                for part in (f"{self.format_name}: ", "no such"):
                    assert part.lower() in found.message.lower(), f"{name}: {found.message!r}"

    def test_unknown_and_forbidden_formats_say_what_there_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The message lists what is installed, or names the variable that leaves it out."""
        found = refusal(lambda: registry.describe("no_such_format"))
        assert found, "no_such_format is described"
        assert found.kind is UnknownFormatError, f"{found}"
        assert self.format_name in found.message, f"{found.message!r}"
        monkeypatch.setenv(registry.ALLOWED, "another, and_another")
        assert self.format_name not in registry.available_formats()
        found = refusal(lambda: registry.describe(self.format_name))
        assert found, f"{self.format_name}: described though {registry.ALLOWED} leaves it out"
        assert registry.ALLOWED in found.message, f"{found.message!r}"

    def test_broken_neighbour_hides_no_format(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each broken plugin is listed, and its fault is raised for those who ask for it."""
        card = (
            "from te_proto.spec import FormatSpec\n"
            "FORMAT = FormatSpec(name={name!r}, distribution='te-broken', protocol={protocol},\n"
            "    summary='', elements=(), scale='', block=(1, 1), quantizer={quantizer!r},\n"
            "    tensor='', storage='', recipe='')\n"
        )
        fields = {"protocol": PROTOCOL, "quantizer": "te_broken_absent:Quantizer"}
        faults = {
            "absent": (None, "cannot be imported"),
            "crashes": ("1 / 0", "ZeroDivisionError"),
            "no_card": ("FORMAT = 1", "must be a te_proto.FormatSpec, got int"),
            "older": (card.format(**fields | {"name": "older", "protocol": 0}), "protocol 0"),
            "renamed": (card.format(**fields | {"name": "else"}), "the name of its entry point"),
            "empty": (card.format(**fields | {"name": "empty"}), "cannot load its quantizer"),
        }
        for copy in ("one", "two"):
            names = ["twice", *(faults if copy == "one" else ())]
            info = tmp_path / f"te_broken_{copy}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: te-broken-{copy}\n")
            lines = [f"{name} = te_broken_{name}:FORMAT" for name in names]
            (info / "entry_points.txt").write_text("\n".join(["[te_proto.formats]", *lines]))
        for name, (source, _) in faults.items():
            if source is not None:
                (tmp_path / f"te_broken_{name}.py").write_text(source)
        try:
            with monkeypatch.context() as patch:
                patch.syspath_prepend(tmp_path)
                registry.clear_cache()
                listed = registry.available_formats()
                assert {self.format_name, "twice", *faults} <= set(listed), f"{listed}"
                assert registry.describe(self.format_name).name == self.format_name
                expected = {name: part for name, (_, part) in faults.items()}
                for name, part in (expected | {"twice": "te-broken-two"}).items():
                    found = refusal(lambda: registry.get_quantizer(name))  # noqa: B023
                    assert found, f"the broken format {name} is loaded"
                    assert found.kind is PluginError, f"{name}: {found}"
                    assert part in found.message, f"{name}: no {part!r} in {found.message!r}"
        finally:
            registry.clear_cache()

    def test_is_listed_and_described_without_torch(self) -> None:
        """The price of a listing is metadata, and one torch-free module for the card."""
        code = (
            "import sys, te_proto\n"
            f"assert {self.format_name!r} in te_proto.available_formats()\n"
            f"card = te_proto.describe({self.format_name!r})\n"
            "heavy = {'numpy', 'torch', 'triton', card.quantizer.split(':')[0]}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        loaded = self.fresh(code)
        assert loaded == "[]", f"{self.format_name}: describing it imports {loaded}"

    def test_works_without_gpu_and_triton(self) -> None:
        """Import and use: NVIDIA/TransformerEngine#1578, where a kernel was built at import."""
        case = self.fixed(internal=(False,))[0]
        code = (
            "import sys\n"
            "sys.modules['triton'] = None  # what an import finds where there is none\n"
            "from math import inf\n"
            "import torch, te_proto\n"
            f"cls = te_proto.get_quantizer({self.format_name!r})\n"
            f"te_proto.get_recipe({self.format_name!r})\n"
            f"quantizer = cls.from_state({case.quantizer.state()!r})\n"
            f"proto = te_proto.TensorProto(shape={case.shape}, dtype={case.dtype}, device='cpu',\n"
            "    quantizer=quantizer)\n"
            f"x = torch.ones(proto.shape, dtype={case.dtype})\n"
            "made = quantizer.quantize(x)\n"
            "quantizer.quantize_into(x, proto.create_tensor())\n"
            "print(te_proto.to_tensor_proto(made) == proto, made.dequantize().shape == x.shape)"
        )
        printed = self.fresh(code, CUDA_VISIBLE_DEVICES="")
        assert printed == "True True", f"{case}: without triton: {printed}"

    # -- threads ----------------------------------------------------------------------------------

    def test_first_call_may_come_from_many_threads(self) -> None:
        """Registry, imports and first use at once: NVIDIA/TransformerEngine#3255."""
        case = next(c for c in self.fixed(internal=(False,)) if not c.quantizer.call_arguments())
        x = torch.linspace(-2, 2, case.proto().numel).view(case.shape).to(case.dtype)
        made = self.quantize(case.quantizer, x)
        expected = {n: int(t.view(torch.uint8).long().sum()) for n, t in _buffers(made).items()}
        code = (
            "import json, threading\n"
            "from math import inf\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "import te_proto, torch\n"
            "together = threading.Barrier(8, timeout=60)\n"
            "def run(thread):\n"
            "    together.wait()\n"
            f"    cls = te_proto.get_quantizer({self.format_name!r})\n"
            f"    quantizer = cls.from_state({case.quantizer.state()!r})\n"
            f"    x = torch.linspace(-2, 2, {case.proto().numel}).view({case.shape})\n"
            f"    made = quantizer.quantize(x.to({case.dtype}))\n"
            "    made.dequantize()\n"
            "    inner = {n: getattr(made, n) for n in made.__tensor_flatten__()[0]}\n"
            "    return {n: int(t.view(torch.uint8).long().sum()) for n, t in inner.items()}\n"
            "with ThreadPoolExecutor(8) as pool:\n"
            "    print(json.dumps(list(pool.map(run, range(8)))))"
        )
        for thread, found in enumerate(json.loads(self.fresh(code))):
            assert found == expected, f"{case}: sums of bytes in thread {thread}: {found}"

    # -- checkpoints ------------------------------------------------------------------------------

    def test_checkpoint_loads_where_only_the_core_was_imported(self, tmp_path: Path) -> None:
        """With ``weights_only``, unlisted and byte for byte: pytorch/torchtitan#651.

        Without the plugin, the error says what to install. No key is added, no quantizer lost
        (NVIDIA/TransformerEngine#2721).
        """
        saved = {}
        for i, case in enumerate(self.fixed()):
            made = self.quantize(case.quantizer, case.input())
            if not case.quantizer.internal:
                made.requires_grad_()
            made.note = [i]
            saved[f"{i}: {case}"] = made
        file, back = tmp_path / "model.pt", tmp_path / "back.pt"
        torch.save(saved, file)
        card = self.card()
        package = card.quantizer.partition(":")[0].partition(".")[0]
        code = (
            "import os, sys, torch, te_proto\n"
            f"assert {package!r} not in sys.modules\n"
            "os.environ['TE_PROTO_FORMATS'] = 'none_of_them'\n"
            "try:\n"
            f"    torch.load({str(file)!r}, weights_only=True)\n"
            "except Exception as error:\n"
            "    print(error)\n"
            "del os.environ['TE_PROTO_FORMATS']\n"
            f"state = torch.load({str(file)!r}, weights_only=True)\n"
            f"torch.save(state, {str(back)!r})"
        )
        message = self.fresh(code)
        assert f"pip install {card.distribution}" in message, (
            f"{self.format_name}: without the plugin loading says {message!r}"
        )
        loaded = torch.load(back, weights_only=True)
        assert list(loaded) == list(saved), f"{self.format_name}: keys {list(loaded)}"
        for name, tensor in loaded.items():
            assert_same_facts(tensor, saved[name], f"loaded {name}")
            assert_same_bytes(tensor, saved[name], f"loaded {name}")
            assert tensor.note == saved[name].note, f"loaded {name}: attributes {tensor.note}"


def _buffers(tensor: QuantizedStorage) -> dict[str, torch.Tensor]:
    return QuantizedStorage.inner_tensors(tensor)
