"""Do something to a module as soon as it has been imported: frameworks import each other late.

Python asks the finders of ``sys.meta_path`` for a module. Ours comes first, lets the others find it, and
changes one loader's ``exec_module`` for one call. Standard library only. Next: ``patch.py``, which waits.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Later(importlib.abc.MetaPathFinder):
    """What waits for modules that are not imported yet; it stands in ``sys.meta_path`` from the first on."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def when_imported(self, module: str, act: Callable[[], None]) -> None:
        """Call ``act`` now if ``module`` is imported, or is just being; else once, after its code has run."""
        if module in sys.modules:
            act()
            return
        self._waiting.setdefault(module, []).append(act)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Wait for nothing any more."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' answer, for modules that something waits for."""
        if fullname not in self._waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader, fullname)
        return spec

    def _act_after(self, loader: Any, fullname: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # its class's again
            execute(module)
            for act in self._waiting.pop(fullname, ()):
                act()

        loader.exec_module = exec_module
