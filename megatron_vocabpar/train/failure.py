"""What went wrong in a worker, told in one message: rank, error, step, pass and microbatch.

When a rank fails, its peers fail too, because their connections close. A rank that was killed from outside
is the cause; otherwise it is the rank whose error came first.
Next: ``ranks.py``.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_vocabpar.schedule.passes import Pass, parse
from megatron_vocabpar.train.progress_record import LastProgress, read_record

_TRACEBACK_LINES = 12


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
    if killed:
        rank, error = killed[0], None
        what = f"was killed by {_signal_name(-exit_codes[rank])}"
    elif errors:
        rank = min(errors, key=lambda rank: errors[rank].time_s)
        error = errors[rank]
        what = f"raised {error.type}: {error.message}"
    elif exited:
        rank, error = exited[0], None
        what = f"ended with exit code {exit_codes[rank]}"
    elif by_signal:
        rank, error = by_signal[0], None
        what = f"was ended by {_signal_name(-exit_codes[rank])}"
    else:
        return "the workers ended, and none of them left a reason"
    lines = [f"rank {rank} {what} ({describe(read_record(records, rank))})"]
    if error is not None:
        lines += error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]
    if logs is not None:
        lines.append(f"the logs of the ranks are in {logs}")
    return "\n".join(lines)


def describe(progress: LastProgress) -> str:
    """Where a rank was, in words: step, pass and microbatch."""
    if progress.step is None:
        return "before its first step"
    if not progress.instruction:
        return f"at step {progress.step}, outside the schedule"
    try:
        instruction = parse(progress.instruction)
    except ValueError:
        return f"at step {progress.step}, in {progress.instruction}"
    kind = "pass" if isinstance(instruction, Pass) else "communication"
    return (
        f"at step {progress.step}, in {kind} {instruction}: "
        f"{instruction.type.value} of microbatch {instruction.microbatch} on stage {instruction.stage}"
    )


def _signal_name(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
