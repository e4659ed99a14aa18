"""What a Megatron-LM requires of this Python: libraries that its script imports, and a Transformer Engine.

Megatron-LM declares only some of its requirements: from 0.16 on it always imports ``triton``, and its
tokenizers import ``regex``. No library is imported to look for it. Used by ``vocabpar doctor`` and
``python -m lab artifact``. Standard library and ``packaging``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_vocabpar.megatron_lm.checkout import source_file

_TE = "transformer-engine"
_BUILD = re.compile(r"\+[\w.]+")
_TE_REQUIREMENT = re.compile(r"transformer-engine(?:\[[^\]]*\])?\s*\(?([<>=!~][^)]*)\)?")


def missing_libraries(checkout: Path, script: str = "pretrain_gpt") -> dict[str, str]:
    """Libraries that the script needs and this Python lacks, by name, with a module that imports them.

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
                packages = accumulate(name.split("."), lambda package, part: f"{package}.{part}")
                further = set(packages) - reached  # a package's own file runs before its modules
                left += sorted(further)
                reached |= further
            else:
                needed.setdefault(name.partition(".")[0], module)
    return {name: by for name, by in sorted(needed.items()) if not _is_found(name, checkout)}


def remedy(checkout: Path, script: str = "pretrain_gpt") -> str:
    """One sentence that names the missing libraries and the command to install them; empty without any."""
    missing = missing_libraries(checkout, script)
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


def installed_te() -> str | None:
    """The version of Transformer Engine that is installed; None without it."""
    try:
        return metadata.version(_TE)
    except metadata.PackageNotFoundError:
        return None


def te_named_by(megatron: Path) -> tuple[str, str]:
    """The Transformer Engine that a checkout, or a folder with megatron-core, asks for.

    Returns:
        Bounds of a version, such as ``>=2.9.0a0,<2.12.0`` or ``==2.17.1+4329ff84``, and a revision (a branch
        or a commit); each is empty if it names none.
    """
    project = megatron / "pyproject.toml"
    if not project.is_file():
        files = sorted(megatron.glob("megatron_core-*.dist-info/METADATA"))
        lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
        required = [line.partition(":")[2] for line in lines if line.startswith("Requires-Dist:")]
        return _bounds(required), ""
    table = tomllib.loads(project.read_text("utf-8"))
    options = table.get("project", {}).get("optional-dependencies", {})
    uv: dict[str, Any] = table.get("tool", {}).get("uv", {})
    exact = [entry["version"] for entry in uv.get("dependency-metadata", []) if entry.get("name") == _TE]
    bounds = _bounds([text for texts in options.values() for text in texts])
    revision = uv.get("sources", {}).get(_TE, {}).get("rev", "")
    return bounds or "".join(f"=={pinned}" for pinned in exact[:1]), revision


def te_agrees(version: str, bounds: str) -> bool:
    """Whether a version lies in these bounds, whatever its build: 2.17.1 is ``==2.17.1+4329ff84``."""
    return SpecifierSet(_BUILD.sub("", bounds)).contains(_BUILD.sub("", version), prereleases=True)


def te_line(version: str | None, bounds: str, revision: str) -> str:
    """The line of ``vocabpar doctor``: the installed version beside that which a Megatron names."""
    short = revision[:10] if re.fullmatch(r"[0-9a-f]{40}", revision) else revision
    named = " and ".join([*([bounds] if bounds else []), *([f"revision {short}"] if short else [])])
    names = f"this Megatron names {named or 'none'}"
    if version is None:
        return f"Transformer Engine is not installed, {names}: give --transformer-impl local"
    if not bounds:
        return f"Transformer Engine {version} is installed; {names}, no version to compare with"
    return (
        f"Transformer Engine {version} is installed, {'as' if te_agrees(version, bounds) else 'but'} {names}"
    )


def _bounds(requirements: list[str]) -> str:
    matches = (_TE_REQUIREMENT.fullmatch(text.partition(";")[0].strip()) for text in requirements)
    return next((match[1].strip() for match in matches if match), "")
