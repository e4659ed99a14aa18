"""Import Transformer Engine's own Python on a machine without a GPU.

Its layers are Python above one compiled module, ``transformer_engine_torch``. The wheel
``transformer_engine`` has all of the Python and no library: ``install(folder)`` lets ``import
transformer_engine`` read it from there, over the stand-in of ``compiled.py``. What it reads is unchanged but
that a CUDA device means the CPU, unless there is one, and that its Triton kernels and ONNX export, which
nothing here uses, are empty.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from tests.transformer_engine import compiled
from tests.transformer_engine.unserved import unserved

PACKAGE, COMPILED = "transformer_engine", "transformer_engine_torch"
ACCUMULATION = "fused_weight_gradient_mlp_cuda"
"""apex's extension, with which Megatron's own output layer adds to ``main_grad``, by default."""
MISSING = (
    "no Transformer Engine: pip install --no-deps --target FOLDER transformer_engine, and set "
    "TRANSFORMER_ENGINE_PATH to that folder"
)
_EMPTY = ("common.triton", "pytorch.triton", "pytorch.onnx_extensions")
_CPU = torch.device("cpu")
_GPU = SimpleNamespace(
    name="cpu", major=10, minor=0, total_memory=1 << 34, multi_processor_count=1, warp_size=32
)


def wheel() -> Path | None:
    """The folder that holds the wheel's files: TRANSFORMER_ENGINE_PATH, or where ``make test`` puts it."""
    folder = Path(os.environ.get("TRANSFORMER_ENGINE_PATH") or Path(sys.prefix) / "transformer-engine")
    return folder if (folder / PACKAGE / "pytorch").is_dir() else None


def is_before(version: str) -> bool:
    """Whether the wheel is of an earlier version, such as ``2.12``."""
    (found,) = (path.name for path in (wheel() or Path()).glob(f"{PACKAGE}-*.dist-info"))
    return Version(found.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info")) < Version(version)


def install(folder: Path, on_cpu: bool = True) -> None:
    """Let this process import Transformer Engine from there; it imports nothing by itself.

    Args:
        folder: that holds the wheel's files.
        on_cpu: whether a CUDA device means the CPU; on emulated GPUs it is one.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # or its import looks for CUDA's libraries
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # scales follow from sizes in Python
    if on_cpu:
        os.environ["NVTE_TORCH_COMPILE"] = "0"
        torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
        torch.cuda.get_device_capability = lambda *_: (10, 0)  # which has every kind of 8-bit products
        torch.cuda.get_device_properties = lambda *_: _GPU  # type: ignore[assignment]
        torch.version.cuda = "13.0"
    sys.meta_path.insert(0, _Finder(folder, _SourceOnCpu if on_cpu else _Source))
    sys.modules[ACCUMULATION] = compiled.accumulation(ACCUMULATION)


class _OnCpu(ast.NodeTransformer):
    """``"cuda"`` is ``"cpu"``, ``x.is_cuda`` is ``x.is_cpu`` and ``x.cuda()`` is ``x.cpu()``."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and not node.args:
            node.func.attr = "cpu"
        return node


class _Source(importlib.machinery.SourceFileLoader):
    """A file of the package."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == f"{PACKAGE}.common":
            vars(module)["load_framework_extension"] = lambda _: None  # its place is taken already


class _SourceOnCpu(_Source):
    """The same, read as above; no byte code is kept, nor that of the installer read."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(_OnCpu().visit(ast.parse(self.get_data(path))))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == f"{PACKAGE}.pytorch.utils":
            vars(module).update(canonicalize_device=lambda _: _CPU, devices_match=lambda *_: True)
        elif module.__name__ == f"{PACKAGE}.pytorch.distributed":  # for layers that are recomputed
            vars(module).update(
                _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
                _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
            )


class _EmptyModule(importlib.abc.Loader):
    """Of whose names each can be imported and none be called."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        vars(module)["__getattr__"] = unserved(module.__name__)


class _CompiledModule(_EmptyModule):
    """The same but for the names that the stand-in serves."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(compiled.names())


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path, source: type[_Source]) -> None:
        self._folder, self._source = folder, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == COMPILED:
            return importlib.machinery.ModuleSpec(fullname, _CompiledModule())
        package, _, name = fullname.partition(".")
        if package != PACKAGE:
            return None
        if any(name == empty or name.startswith(f"{empty}.") for empty in _EMPTY):
            return importlib.machinery.ModuleSpec(fullname, _EmptyModule(), is_package=True)
        if name == "jax":
            raise ModuleNotFoundError(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path or [str(self._folder)])
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = self._source(spec.loader.name, spec.loader.path)
        return spec

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Its version; were the folder in ``sys.path``, processes that are spawned would import it too."""
        inside = DistributionFinder.Context(name=context.name, path=[str(self._folder)])
        return MetadataPathFinder.find_distributions(inside)
