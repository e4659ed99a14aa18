"""What a rank was doing when it failed, and what went wrong: one message with rank, error, step and pass.

Each rank notes its step and instruction in a tiny file that is mapped into memory. Writing is a memory copy,
so the executor can call it before every instruction, and the file outlives a process that is killed.

When a rank fails, its peers fail too, because their connections close. A rank that was killed from outside
is the cause; otherwise it is the rank whose error came first.
Next: ``ranks.py``, which reads the records after a failure.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_vocabpar.schedule.passes import Pass, parse

RECORDS_VARIABLE = "VOCABPAR_RECORDS"
_STEP_BYTES, _TEXT_BYTES = 16, 48
_RECORD_BYTES = _STEP_BYTES + _TEXT_BYTES
_TRACEBACK_LINES = 12


class ProgressRecord:
    """Where one rank writes its step and instruction; not a file if ``path`` is None."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._map = mmap.mmap(-1, _RECORD_BYTES)
            return
        with open(path, "w+b") as file:
            file.truncate(_RECORD_BYTES)
            self._map = mmap.mmap(file.fileno(), _RECORD_BYTES)

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str] = os.environ) -> ProgressRecord:
        """The record that the launcher will read, or one that nobody reads where there is no launcher."""
        folder = environment.get(RECORDS_VARIABLE)
        return cls(None if folder is None else record_path(Path(folder), int(environment["RANK"])))

    def write(self, instruction: str) -> None:
        """Note the instruction that is about to run; at most 48 bytes are kept."""
        self._map[_STEP_BYTES:] = instruction.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")

    def write_step(self, step: int) -> None:
        """Note the step that is about to run, and that none of its instructions has begun."""
        self._map[:] = str(step).encode().ljust(_RECORD_BYTES, b"\0")


def record_path(folder: Path, rank: int) -> Path:
    """The file of a rank's record."""
    return folder / f"rank{rank}.progress"


def read_record(folder: Path, rank: int) -> tuple[int | None, str]:
    """What this rank last wrote: its step (None before the first) and its instruction, such as 2S5."""
    path = record_path(folder, rank)
    raw = path.read_bytes() if path.exists() else b""
    step, text = raw[:_STEP_BYTES].rstrip(b"\0").decode(), raw[_STEP_BYTES:].rstrip(b"\0")
    return int(step) if step else None, text.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An exception that a worker raised: when (seconds since the epoch), its type, text and traceback."""

    time_s: float
    type: str
    message: str
    traceback: str


class TrainingFailed(Exception):
    """The workers ended before the job did; the text is what the user reads."""


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Leave an exception for the launcher; call it as soon as the exception is caught."""
    text = "".join(traceback.format_exception(error))
    record = WorkerError(time.time(), type(error).__name__, str(error), text)
    (folder / f"rank{rank}.error.json").write_text(json.dumps(asdict(record)))


def read_errors(folder: Path, world_size: int) -> dict[int, WorkerError]:
    """The exceptions that workers left, by rank."""
    paths = {rank: folder / f"rank{rank}.error.json" for rank in range(world_size)}
    return {rank: WorkerError(**json.loads(p.read_text())) for rank, p in paths.items() if p.exists()}


def explain(records: Path, world_size: int, exit_codes: Mapping[int, int], logs: Path | None = None) -> str:
    """The message for a job whose workers failed.

    Args:
        records: folder of the progress and error records.
        world_size: number of ranks.
        exit_codes: by rank, of those that did not end well; −N for signal N.
        logs: folder of the ranks' log files.
    """
    errors = read_errors(records, world_size)
    by_signal = [rank for rank, code in sorted(exit_codes.items()) if code < 0 and rank not in errors]
    # The launcher ends the ranks that are left by SIGTERM, so it is the cause only where there is no other.
    killed = [rank for rank in by_signal if exit_codes[rank] != -signal.SIGTERM]
    exited = [rank for rank, code in sorted(exit_codes.items()) if code > 0 and rank not in errors]
    error = None
    if killed:
        rank, what = killed[0], f"was killed by {_signal_name(-exit_codes[killed[0]])}"
    elif errors:
        rank, error = min(errors.items(), key=lambda item: item[1].time_s)
        what = f"raised {error.type}: {error.message}"
    elif exited:
        rank, what = exited[0], f"ended with exit code {exit_codes[exited[0]]}"
    elif by_signal:
        rank, what = by_signal[0], f"was ended by {_signal_name(-exit_codes[by_signal[0]])}"
    else:
        return "the workers ended, and none of them left a reason"
    lines = [f"rank {rank} {what} ({describe(*read_record(records, rank))})"]
    if error is not None:
        lines += error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]
    if logs is not None:
        lines.append(f"the logs of the ranks are in {logs}")
    return "\n".join(lines)


def describe(step: int | None, text: str) -> str:
    """Where a rank was, in words: step, pass and microbatch."""
    if step is None:
        return "before its first step"
    if not text:
        return f"at step {step}, outside the schedule"
    try:
        instruction = parse(text)
    except ValueError:
        return f"at step {step}, in {text}"
    kind = "pass" if isinstance(instruction, Pass) else "communication"
    return (
        f"at step {step}, in {kind} {instruction}: "
        f"{instruction.type.value} of microbatch {instruction.microbatch} on stage {instruction.stage}"
    )


def _signal_name(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
