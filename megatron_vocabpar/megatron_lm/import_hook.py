"""An import hook: callbacks for when a module has been imported, as frameworks import each other late.

Python asks the finders of ``sys.meta_path`` for a module. Ours comes first, lets the others find it, and
changes one loader's ``exec_module`` for one call. Standard library only. Next: ``patch.py``, which registers.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(importlib.abc.MetaPathFinder):
    """Callbacks by module; in ``sys.meta_path`` while some wait for a module that is not imported yet."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[], None]]] = {}

    def when_imported(self, module: str, callback: Callable[[], None]) -> None:
        """Call ``callback`` now if ``module`` is imported, or is just being; else after its code has run."""
        if module in sys.modules:
            callback()
            return
        self._callbacks.setdefault(module, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Forget all callbacks."""
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ask the other finders for a module with callbacks; None for every other module."""
        if fullname not in self._callbacks:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader, fullname)
        return spec

    def _call_after(self, loader: Any, fullname: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # its class's again
            execute(module)
            for callback in self._callbacks.pop(fullname, ()):
                callback()

        loader.exec_module = exec_module
