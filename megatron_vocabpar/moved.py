"""Old import paths: a module that has moved is still found under its old name, with a DeprecationWarning.

The table holds the modules that examples and documents named; its rows go with the next release.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOT = "megatron_vocabpar."
MOVED = {
    _ROOT + old: _ROOT + new
    for old, new in {
        "schedule.building_block": "schedule.make.building_block",
        "schedule.costs": "schedule.times.costs",
        "schedule.families": "schedule.make.families",
        "schedule.flops": "schedule.times.flops",
        "schedule.generate": "schedule.make.generate",
        "schedule.methods": "schedule.words.methods",
        "schedule.passes": "schedule.words.passes",
    }.items()
}


class _Finder(MetaPathFinder, Loader):
    """Stands behind Python's own finders: it is asked only for names that have no file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} has moved; import {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)  # the same module, so that its classes are the same


def find_moved_modules() -> None:
    """Let ``import`` find the modules of ``MOVED`` under their old names."""
    sys.meta_path.append(_Finder())
