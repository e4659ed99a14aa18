"""A plan that is made while training goes on, in a process of its own, which runs this module.

A thread would take Python's interpreter lock from the one that launches the passes, and stop training for
as long as it plans. The process needs no torch and no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import method_named

_SOURCES = Path(__file__).resolve().parents[2]
_WANTED, _PLAN, _ERRORS = "wanted.json", "plan.json", "errors"


@dataclass(frozen=True)
class PlanKind:
    """What all plans of a training have in common; the fields are arguments of ``schedule.make.generate``.

    ``among`` has the names of the families that a search tries; ``late_gradient`` is the method's.
    """

    method: str
    family: str
    p: int
    chunks: int
    max_activations: float | None = None
    among: Sequence[str] = ()
    late_gradient: bool = False

    def plan(self, m: int, costs: PassCosts | None = None) -> Plan:
        """The plan for ``m`` microbatches; errors are those of ``schedule.make.generate``."""
        return make_plan(
            method_named(self.method, late_gradient=self.late_gradient),
            self.p,
            m,
            family=self.family,
            chunks=self.chunks,
            costs=costs,
            max_activations=self.max_activations,
            among=[family_named(name) for name in self.among] or None,
        )


class BackgroundPlan:
    """``kind.plan(m, costs)``, in the making; the process ends with the one that holds this object.

    Raises:
        OSError: if the process cannot be started.
    """

    def __init__(self, kind: PlanKind, m: int, costs: PassCosts) -> None:
        self._folder = TemporaryDirectory(prefix="vocabpar-")
        folder = Path(self._folder.name)
        wanted = {"kind": asdict(kind), "m": m, "costs": costs.to_dict()}
        (folder / _WANTED).write_text(json.dumps(wanted))
        path = os.pathsep.join(filter(None, (str(_SOURCES), os.environ.get("PYTHONPATH"))))
        with (folder / _ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder)],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
            )

    def result(self) -> str | None:
        """The plan's JSON form once it is made; None before.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it could not be made, with the last line of why.
        """
        code, folder = self._process.poll(), Path(self._folder.name)
        if code is None:
            return None
        try:
            if code != 0:
                lines = (folder / _ERRORS).read_text(errors="replace").strip().splitlines()
                raise ValueError(lines[-1] if lines else f"planning ended with exit code {code}")
            return (folder / _PLAN).read_text()
        finally:
            self._folder.cleanup()


def _plan_in(folder: Path) -> None:
    """What the process does."""
    wanted = json.loads((folder / _WANTED).read_text())
    plan = PlanKind(**wanted["kind"]).plan(wanted["m"], PassCosts.from_dict(wanted["costs"]))
    (folder / _PLAN).write_text(plan_to_json(plan))


def _end_with_parent() -> None:
    """The parent writes nothing: its end of the pipe closes when it ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _plan_in(Path(sys.argv[1]))
