"""Signatures read from Megatron's source files, without importing them: what ``vocabpar doctor`` looks at.

Standard library only. Next: ``bindings.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

from megatron_vocabpar.megatron_lm.bindings import Parameters


def source_file(checkout: Path, module: str) -> Path | None:
    """The file of a module in a Megatron-LM checkout; None if it has none."""
    path = checkout.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


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
            found = [child for child in getattr(node, "body", ()) if getattr(child, "name", None) == part]
            if not found:
                return None
            node = found[-1]
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
