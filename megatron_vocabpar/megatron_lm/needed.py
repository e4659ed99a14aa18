"""Finds libraries that a Megatron-LM script imports at its start, and that this Python lacks.

Megatron-LM declares few of its requirements: from 0.16 on it always imports ``triton``, and its tokenizers
import ``regex``. Used by ``vocabpar doctor`` and ``vocabpar artifact``. Standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_vocabpar.megatron_lm.checkout import source_file


def lacking(checkout: Path, script: str = "pretrain_gpt") -> dict[str, str]:
    """Libraries that the script needs and Python does not find, each with a module that imports it.

    Only imports at the top level of a file count. If an import is inside ``try``, ``if`` or a function,
    Megatron can do without it.
    """
    needed: dict[str, str] = {}
    reached, left = {script}, [script]
    while left:
        module = left.pop()
        path = source_file(checkout, module)
        for name in _imported(path, module) if path is not None else ():
            if source_file(checkout, name) is not None:
                left += [name] if name not in reached else []
                reached.add(name)
            else:
                needed.setdefault(name.partition(".")[0], module)
    return {name: by for name, by in sorted(needed.items()) if not _is_found(name, checkout)}


def remedy(checkout: Path, script: str = "pretrain_gpt") -> str:
    """One sentence that names the missing libraries and the command to install them; empty without any."""
    missing = lacking(checkout, script)
    names = ", ".join(f"{name} (imported by {module})" for name, module in missing.items())
    return f"{script}.py needs {names}; run: pip install {' '.join(missing)}" if missing else ""


def _imported(path: Path, module: str) -> Iterator[str]:
    """Full names of the modules, or of names in modules, that a file imports at its top level."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ``from ..d import e`` in module a.b.c: its package is a.b, and a second dot leads to a: a.d.e.
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            origin = ".".join(filter(None, (base, node.module)))
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _is_found(name: str, checkout: Path) -> bool:
    if (
        name in sys.stdlib_module_names
        or (checkout / name).is_dir()
        or source_file(checkout, name) is not None
    ):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module of this name without a specification is there
        return True
