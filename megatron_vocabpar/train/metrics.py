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
from types import TracebackType
from typing import IO, Any

from rich.console import Console

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.progress import Progress


class Metrics:
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
        self._config = config
        self._path = path
        self._first_step = first_step
        self._active = active
        self._console = console
        self._stack = ExitStack()
        self._file: IO[str] | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> Metrics:
        if self._active:
            kept = [record for record in read_metrics(self._path) if record["step"] <= self._first_step]
            self._path.write_text("".join(json.dumps(record) + "\n" for record in kept))
            self._file = self._stack.enter_context(open(self._path, "a"))
            progress = Progress(
                self._config.method,
                self._first_step,
                self._config.steps,
                self._config.log_interval,
                self._console,
            )
            self._progress = self._stack.enter_context(progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write and show one step; values that are None are left out."""
        if self._file is None or self._progress is None:
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
