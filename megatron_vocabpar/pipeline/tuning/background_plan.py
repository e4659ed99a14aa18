"""A plan that is made while training goes on, in a separate process that runs this module.

A thread would hold Python's interpreter lock while it plans, and stop the one that launches the passes. The
process needs neither torch nor a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.make.generate import plan_for
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.schedule.times.costs import PassCosts

_SOURCES = Path(__file__).resolve().parents[3]
_REQUEST, _PLAN, _ERRORS = "request.json", "plan.json", "errors"


class BackgroundPlan:
    """A plan in the making; the planning process ends with this process.

    Raises:
        OSError: if the process cannot be started.
    """

    def __init__(self, request: PlanRequest) -> None:
        self._folder = TemporaryDirectory(prefix="vocabpar-")
        folder = Path(self._folder.name)
        (folder / _REQUEST).write_text(json.dumps(_to_dict(request)))
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
            ValueError: if it could not be made, with the last line that the process printed.
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
    request = _from_dict(json.loads((folder / _REQUEST).read_text()))
    (folder / _PLAN).write_text(plan_to_json(plan_for(request)))


def _to_dict(request: PlanRequest) -> dict[str, Any]:
    """The request as JSON values, methods and families by their names."""
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return fields | {
        "method": request.method_name,
        "family": request.family_name,
        "among": [family_named(family).name for family in request.among or ()],
        "costs": request.costs and request.costs.to_dict(),
    }


def _from_dict(fields: dict[str, Any]) -> PlanRequest:
    costs = fields.pop("costs")
    return PlanRequest(**fields, costs=costs and PassCosts.from_dict(costs))


def _end_with_parent() -> None:
    """Wait for the end of the pipe, in which the parent writes nothing: it closes when the parent ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _plan_in(Path(sys.argv[1]))
