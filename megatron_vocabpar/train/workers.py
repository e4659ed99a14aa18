"""Start processes, wait for them, and leave none behind: each leads a session of its own.

A worker that ends badly ends the others. Ctrl-C ends all at once; SIGTERM is passed on, and they get time to
save. A watchdog says which ranks stand still, and ends the job after ``--timeout``.

Why not ``torch.distributed.elastic.multiprocessing``: processes that a dead worker has started would live on,
and peers would get SIGTERM, which means "save" here, so one that stands still would hold the job for 30 s.
Next: ``failure.py``, which reads the ranks' records.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_vocabpar.schedule.play.hang import places_in_step
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import Record, TrainingFailed
from megatron_vocabpar.train.output import LOG_FOLDER, SCHEDULE_DATA_FILE

SAVED = 128 + signal.SIGTERM
"""Exit code of a worker that has saved because of SIGTERM."""
TEMPORARY = "VOCABPAR_TEMPORARY"
"""The variable that names a worker's folder of temporary files, which it removes when it ends."""
_POLL_S = 0.1
_TO_SAVE_S = 300.0
_QUIET_S = 15.0


@dataclass
class Interrupted(KeyboardInterrupt):
    """The job was ended from outside, by Ctrl-C (signal 2) or another signal; ``hint`` is how to go on."""

    signal_number: int
    hint: str = ""


@dataclass
class Watchdog:
    """Says that no rank has got any further for a while, and where each rank is.

    Attributes:
        timeout_s: after which the job ends; 0 is never.
        places: gives each instruction's place in an order in which none waits for a later one.
    """

    logs: Path
    ranks: int
    timeout_s: float
    say: Callable[[str], None]
    places: Callable[[], Mapping[str, int]] = dict

    @classmethod
    def of(cls, config: TrainConfig) -> Watchdog:
        """That of a method's job."""
        folder = Path(config.output)
        schedule = folder / SCHEDULE_DATA_FILE
        say = partial(print, flush=True)
        return cls(folder / LOG_FOLDER, config.world_size, config.timeout, say, partial(_places, schedule))

    def __post_init__(self) -> None:
        self._seen: list[Record] = []
        self._since = self._said = time.monotonic()

    def look(self) -> None:
        """Call it now and then; raises ``TrainingFailed`` after ``timeout_s`` without progress."""
        now, records = time.monotonic(), [Record.read(self.logs, rank) for rank in range(self.ranks)]
        if records != self._seen or any(record.step is None for record in records):
            self._seen, self._since, self._said = records, now, now
        elif self.timeout_s and now - self._since >= self.timeout_s:
            raise TrainingFailed(f"--timeout {self.timeout_s:g}: {self._text(now)}")
        elif now - self._said >= _QUIET_S:
            self._said = now
            self.say(self._text(now))

    def stood_still(self) -> str:
        """For a job that has failed: a line on where the ranks stood, if none had got further for a while.

        NCCL's timeout ends the ranks that wait, not the one that they wait for.
        """
        now = time.monotonic()
        return f"before that: {self._text(now)}\n" if now - self._since >= _QUIET_S else ""

    def _text(self, now: float) -> str:
        places: dict[str, list[str]] = {}
        for rank, record in enumerate(self._seen):
            places.setdefault(record.place, []).append(str(rank))
        where = "; ".join(
            f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)} {place}"
            for place, ranks in places.items()
        )
        return f"no rank has got any further for {now - self._since:.0f} s: {where}{self._first()}"

    def _first(self) -> str:
        """``; rank N stopped first``: its instruction comes first in the schedule, so it waits for nobody.

        Of several in one communication the last to join does not wait there. Of ranks that stand together
        outside the schedule, or in their last instructions, nothing tells which waits for which.
        """
        places = self.places()
        behind = max(places.values(), default=0)
        stands: dict[tuple[int, int], list[int]] = {}
        for rank, record in enumerate(self._seen):
            place = places.get(record.instruction, behind) if record.instruction else -1
            stands.setdefault((record.step or 0, place), []).append(rank)
        first = min(stands)
        if len(stands[first]) > 1 and first[1] in (-1, behind):
            return ""
        return f"; rank {max(stands[first], key=lambda rank: self._seen[rank].began_s)} stopped first"


def _places(schedule: Path) -> dict[str, int]:
    """As ``places_in_step``, but each rank's last instruction is behind all others."""
    plan = plan_from_json(schedule.read_text())
    places = places_in_step(plan.schedule, plan.program)
    last = {row[-1] for row in plan.program}
    return {str(item): len(places) if item in last else position for item, position in places.items()}


def run_workers(
    command: Sequence[str], environments: Mapping[int, Mapping[str, str]], watchdog: Watchdog | None
) -> dict[int, int]:
    """Run Python with the arguments ``command``, one process a rank, until all have ended.

    Returns:
        Exit codes, by rank, of those that ended badly by themselves; -N for signal N. Empty if all went well.

    Raises:
        Interrupted: after Ctrl-C, or after SIGTERM, here or at a worker, once all have saved.
        TrainingFailed: the watchdog's.
    """
    with on_signal(signal.SIGTERM, _interrupt), on_signal(signal.SIGINT, _interrupt), ExitStack() as stack:
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, environment in environments.items():
                temporary = TemporaryDirectory(prefix="vocabpar-", ignore_cleanup_errors=True)
                variables = {
                    **environment,
                    **dict.fromkeys(("TMPDIR", TEMPORARY), stack.enter_context(temporary)),
                }
                processes[rank] = subprocess.Popen(
                    [sys.executable, *command], env=variables, start_new_session=True
                )
            codes = _wait(processes, watchdog)
        except Interrupted as stop:
            if stop.signal_number == signal.SIGINT:
                raise
            for process in processes.values():
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                deadline = time.monotonic() + _TO_SAVE_S
                for process in processes.values():
                    process.wait(max(deadline - time.monotonic(), 0))
            raise
        finally:
            for process in processes.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if SAVED in codes.values():
        raise Interrupted(signal.SIGTERM)
    return codes


def _wait(processes: Mapping[int, subprocess.Popen[bytes]], watchdog: Watchdog | None) -> dict[int, int]:
    # A worker that saves on SIGTERM ends with SAVED; then the others are still to save.
    while True:
        codes = {rank: process.poll() for rank, process in processes.items()}
        running = [rank for rank, code in codes.items() if code is None]
        bad = {rank: code for rank, code in codes.items() if code}
        if not running or set(bad.values()) - {SAVED}:
            return bad
        if watchdog is not None:
            watchdog.look()
        time.sleep(_POLL_S)


@contextmanager
def on_signal(number: int, call: Callable[[int], object]) -> Iterator[None]:
    """Call this on a signal inside the context; in another than the main thread, leave signals as they are.

    It also holds for SIGINT where a shell that started this process in the background has it ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda number, _: call(number))
    try:
        yield
    finally:
        signal.signal(number, before)


def _interrupt(number: int) -> None:
    raise Interrupted(number)
