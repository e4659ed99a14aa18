"""``metrics.jsonl``: one line of JSON a step, written as the run goes.

A line holds ``step`` (counted from 1), ``loss``, ``grad_norm``, ``lr``, ``tokens_per_s``, ``iteration_ms``,
``peak_memory_mib`` (a list, by stage), and ``eval_loss`` where an evaluation followed the step.
Next: ``progress.py`` (the same values on the terminal), ``report.py`` (what is made of the file).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.progress import Progress


class Metrics(ExitStack):
    """Writes the metrics of one run and shows its progress; does nothing on ranks that are not ``active``.

    A run that resumes after ``first_step`` keeps the lines up to that step and replaces the later ones.
    """

    def __init__(
        self,
        config: TrainConfig,
        path: Path,
        first_step: int,
        active: bool,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        self._file: IO[str] | None = None
        if active:
            kept = [record for record in read_metrics(path) if record["step"] <= first_step]
            path.write_text("".join(json.dumps(record) + "\n" for record in kept))
            self._file = self.enter_context(open(path, "a"))  # noqa: SIM115 (the stack closes it)
            progress = Progress(config.method, first_step, config.steps, config.log_interval, console)
            self._progress = self.enter_context(progress)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write and show one step; values that are None are left out."""
        if self._file is None:
            return
        self._file.write(json.dumps({k: v for k, v in record.items() if v is not None}) + "\n")
        self._file.flush()
        self._progress.update(record)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; none if there is no file. A last line cut short is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
