"""The line that shows a training run as it goes: step, loss, tokens/s, time left, peak memory per stage.

On a terminal it is one line that is drawn again; elsewhere (a file, a pipe) it is a plain line now and
then. The trainer hands the values in, through ``metrics.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

PLAIN_INTERVAL_S = 5.0
_STEPS_AVERAGED = 20


class Progress(ExitStack):
    """Shows the steps of one run.

    Args:
        title: in front of the line: the method.
        first_step: steps that were done before (a resume).
        steps: steps in all.
        interval: steps between two updates.
        console: where to; standard output by default.
        clock: seconds, for the time left.
    """

    def __init__(
        self,
        title: str,
        first_step: int,
        steps: int,
        interval: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._title = title
        self._steps = steps
        self._interval = interval
        self._console = console or Console()
        self._clock = clock
        self._ends = deque([(first_step, clock())], maxlen=_STEPS_AVERAGED + 1)
        self._last_plain_s = float("-inf")
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = self.enter_context(Live(console=self._console, auto_refresh=False))

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step that has ended; ``record`` is a line of ``metrics.jsonl``."""
        step = int(record["step"])
        self._ends.append((step, self._clock()))
        last = step >= self._steps
        if step % self._interval and not last:
            return
        text = progress_text(record, self._steps, self._seconds_left(step))
        if self._live is not None:
            self._live.update(self._line(step, text), refresh=True)
        elif last or self._clock() - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = self._clock()
            self._console.print(f"{self._title}  {text}", soft_wrap=True, highlight=False)

    def _seconds_left(self, step: int) -> float:
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        return (end - start) / max(last - first, 1) * (self._steps - step)

    def _line(self, step: int, text: str) -> Table:
        line = Table.grid(padding=(0, 1))
        line.add_row(f"[bold]{self._title}", ProgressBar(total=self._steps, completed=step, width=20), text)
        return line


def progress_text(record: Mapping[str, Any], steps: int, seconds_left: float) -> str:
    """The values of one step as a line of text."""
    parts = [
        f"step {record['step']}/{steps}",
        f"loss {record['loss']:.4f}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{duration(seconds_left)} left",
        f"peak {memory_text(record['peak_memory_mib'])} MiB",
    ]
    if record.get("eval_loss") is not None:
        parts.insert(2, f"eval {record['eval_loss']:.4f}")
    return "  ".join(parts)


def memory_text(peaks_mib: Sequence[float]) -> str:
    """Peaks of the stages, first to last, as ``410/395/402/388``."""
    return "/".join(f"{peak:.0f}" for peak in peaks_mib)


def duration(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
