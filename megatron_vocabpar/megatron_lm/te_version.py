"""Which Transformer Engine a Megatron names, and whether that one is installed.

Neither is imported. Used by ``vocabpar doctor``.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

_NAME = "transformer-engine"
_BUILD = re.compile(r"\+[\w.]+")
_REQUIREMENT = re.compile(r"transformer-engine(?:\[[^\]]*\])?\s*\(?([<>=!~][^)]*)\)?")


def installed() -> str | None:
    """The installed version; None without one."""
    try:
        return metadata.version(_NAME)
    except metadata.PackageNotFoundError:
        return None


def named_by(megatron: Path) -> tuple[str, str]:
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
    exact = [entry["version"] for entry in uv.get("dependency-metadata", []) if entry.get("name") == _NAME]
    bounds = _bounds([text for texts in options.values() for text in texts])
    revision = uv.get("sources", {}).get(_NAME, {}).get("rev", "")
    return bounds or "".join(f"=={each}" for each in exact[:1]), revision


def agrees(version: str, bounds: str) -> bool:
    """Whether a version lies in these bounds, whatever its build: 2.17.1 is ``==2.17.1+4329ff84``."""
    return SpecifierSet(_BUILD.sub("", bounds)).contains(_BUILD.sub("", version), prereleases=True)


def line(version: str | None, bounds: str, revision: str) -> str:
    """What ``vocabpar doctor`` says of the installed version beside what a Megatron names."""
    short = revision[:10] if re.fullmatch(r"[0-9a-f]{40}", revision) else revision
    named = " and ".join([*([bounds] if bounds else []), *([f"revision {short}"] if short else [])])
    names = f"this Megatron names {named or 'none'}"
    if version is None:
        return f"Transformer Engine is not installed, {names}: give --transformer-impl local"
    if not bounds:
        return f"Transformer Engine {version} is installed; {names}, no version to compare with"
    return f"Transformer Engine {version} is installed, {'as' if agrees(version, bounds) else 'but'} {names}"


def _bounds(requirements: list[str]) -> str:
    matches = (_REQUIREMENT.fullmatch(each.partition(";")[0].strip()) for each in requirements)
    return next((match[1].strip() for match in matches if match), "")
