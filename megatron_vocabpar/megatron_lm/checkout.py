"""Megatron's source files, read without importing them, for ``vocabpar doctor``.

Standard library only. Next: ``bindings.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from megatron_vocabpar.megatron_lm.bindings import MODELS, DetectedMegatron, Parameters, recognise


def importable(path: Sequence[str]) -> list[Path]:
    """The folders of a search path, such as ``sys.path``, that hold ``megatron.core``; the first wins."""
    folders = [Path(entry).resolve() for entry in path]
    return list(dict.fromkeys(folder for folder in folders if holds_core(folder)))


def holds_core(folder: Path) -> bool:
    """Whether it holds ``megatron.core``: a checkout, or where megatron-core is installed."""
    return (folder / "megatron" / "core").is_dir()


def version_of(folder: Path) -> str:
    """The name of ``recognised``."""
    return recognised(folder).version


def recognised(folder: Path) -> DetectedMegatron:
    """The Megatron in ``folder``, with or without its training loop.

    Raises:
        ValueError: as ``recognise``.
    """
    training = (folder / "megatron" / "training").is_dir()
    return recognise(source_signatures(folder), "megatron" if training else "megatron.core")


def source_file(checkout: Path, module: str) -> Path | None:
    """The file of a module in a Megatron-LM checkout; None if it has none."""
    path = checkout.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def training_script(checkout: Path) -> str:
    """The script that trains its GPTModel or, in a Megatron without that, its HybridModel."""
    module, _ = MODELS["megatron.core.models.gpt."]
    return "pretrain_hybrid.py" if source_file(checkout, module) is None else "pretrain_gpt.py"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def source_signatures(checkout: Path) -> Callable[[str, str], Parameters | None]:
    """From module and name (``function`` or ``Class.method``) to its parameter names in ``checkout``."""

    def signature_of(module: str, name: str) -> Parameters | None:
        path = source_file(checkout, module)
        if path is None:
            return None
        node: ast.AST = _tree(path)
        for part in name.split("."):
            named = [child for child in getattr(node, "body", ()) if getattr(child, "name", None) == part]
            if not named:
                return None
            node = named[-1]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        arguments = node.args
        return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    return signature_of


def takes_by_value(checkout: Path, module: str, name: str) -> bool:
    """Whether ``module`` of ``checkout`` has ``name`` by ``from ... import`` at its top level."""
    path = source_file(checkout, module)
    if path is None:
        return False
    return any(
        isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names)
        for node in _tree(path).body
    )
