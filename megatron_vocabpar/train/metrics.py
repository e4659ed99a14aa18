"""``metrics.jsonl``, with one line of JSON per step, and the progress line of a run.

A line holds ``step`` (counted from 1), ``loss``, ``grad_norm``, ``lr``, ``tokens_per_s``, ``iteration_ms``,
``peak_memory_mib`` (a list by pipeline rank, less the memory that the process held before its model was
built), and ``eval_loss`` where an evaluation followed the step. A terminal shows one line that changes; a
file or a pipe gets a plain line every five seconds. Next: ``report.py``, which reads the file.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from megatron_vocabpar.train.config import TrainConfig

PLAIN_INTERVAL_S = 5.0
_STEPS_AVERAGED = 20


class Metrics(ExitStack):
    """Writes the metrics of one run and shows its progress; does nothing on ranks that are not ``active``.

    A run that resumes after ``first_step`` keeps the lines up to that step and replaces the later ones.

    Args:
        path: of ``metrics.jsonl``.
        console: for the progress line; standard output by default.
        clock: seconds, for the time left.
    """

    def __init__(
        self,
        config: TrainConfig,
        path: Path,
        first_step: int,
        active: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._config, self._clock = config, clock
        self._console = console or Console()
        self._ends = deque([(first_step, clock())], maxlen=_STEPS_AVERAGED + 1)
        self._last_plain_s = float("-inf")
        self._file: IO[str] | None = None
        self._live: Live | None = None
        if active:
            earlier = [record for record in read_metrics(path) if record["step"] <= first_step]
            path.write_text("".join(map(_line, earlier)))
            self._file = self.enter_context(open(path, "a"))  # noqa: SIM115 (the stack closes it)
            if self._console.is_terminal:
                self._live = self.enter_context(Live(console=self._console, auto_refresh=False))

    def add(self, record: Mapping[str, Any]) -> None:
        """Write and show one step that has ended; values that are None are left out."""
        if self._file is not None:
            self._file.write(_line({k: v for k, v in record.items() if v is not None}))
            self._file.flush()
            self._show(record)

    def _show(self, record: Mapping[str, Any]) -> None:
        step, steps, now = int(record["step"]), self._config.steps, self._clock()
        self._ends.append((step, now))
        last = step >= steps
        if step % self._config.log_interval and not last:
            return
        first, start = self._ends[0]
        text = progress_text(record, steps, (now - start) / max(step - first, 1) * (steps - step))
        if self._live is not None:
            line = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=steps, completed=step, width=20)
            line.add_row(f"[bold]{self._config.method}", bar, text)
            self._live.update(line, refresh=True)
        elif last or now - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = now
            self._console.print(f"{self._config.method}  {text}", soft_wrap=True, highlight=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, but for one that a killed run has cut short; none without a file."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def progress_text(record: Mapping[str, Any], steps: int, seconds_left: float) -> str:
    """The values of one step as a line of text."""
    evaluated = record.get("eval_loss")
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  "
        + ("" if evaluated is None else f"eval {evaluated:.4f}  ")
        + f"{record['tokens_per_s']:,.0f} tokens/s  {duration(seconds_left)} left  "
        + f"peak {memory_text(record['peak_memory_mib'])} MiB"
    )


def memory_text(peaks_mib: Sequence[float], between: str = "/") -> str:
    """Peaks of the stages, first to last, as ``410/395/402/388``."""
    return between.join(f"{peak:.0f}" for peak in peaks_mib)


def duration(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
