"""Keeps old import paths working through one release, with a ``DeprecationWarning``. Standard library only.

When you move a module that an example or the documentation names, add a row to ``MOVED``.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "megatron_vocabpar.artifact": "megatron_vocabpar.paper",
    "megatron_vocabpar.artifact.expected": "megatron_vocabpar.paper.checks",
    "megatron_vocabpar.artifact.experiments": "megatron_vocabpar.paper.experiments",
    "megatron_vocabpar.artifact.results": "megatron_vocabpar.paper.results",
    "megatron_vocabpar.integration": "megatron_vocabpar.pipeline",
    "megatron_vocabpar.integration.forward_backward": "megatron_vocabpar.pipeline.forward_backward",
    "megatron_vocabpar.integration.iteration": "megatron_vocabpar.pipeline.iteration",
    "megatron_vocabpar.integration.model": "megatron_vocabpar.pipeline.model.stage_model",
    "megatron_vocabpar.losses.drift": "tools.drift",
    "megatron_vocabpar.losses.runs": "tools.runs",
    "megatron_vocabpar.schedule.building_block": "megatron_vocabpar.schedule.make.building_block",
    "megatron_vocabpar.schedule.costs": "megatron_vocabpar.schedule.times.costs",
    "megatron_vocabpar.schedule.families": "megatron_vocabpar.schedule.make.families",
    "megatron_vocabpar.schedule.flops": "megatron_vocabpar.schedule.times.flops",
    "megatron_vocabpar.schedule.generate": "megatron_vocabpar.schedule.make.generate",
    "megatron_vocabpar.schedule.methods": "megatron_vocabpar.schedule.words.methods",
    "megatron_vocabpar.schedule.passes": "megatron_vocabpar.schedule.words.passes",
}
"""Old dotted name -> new one."""


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        text = f"{old} is now {new}; import that"
        try:
            sys.modules[old] = importlib.import_module(new)  # the import system returns what stands there
        except ModuleNotFoundError as error:
            if error.name != new.partition(".")[0]:
                raise
            remedy = "it is not installed: put the root of a clone of the repository on PYTHONPATH"
            raise ModuleNotFoundError(f"{text}; {remedy}", name=new) from error
        warnings.warn(text, DeprecationWarning, stacklevel=2)


def install() -> None:
    """Look up old names before all others; otherwise Python would import a moved folder's modules twice."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
