"""One message for a failed job: rank, error, step and pass.

Each rank has a record, a small file beside its log that is mapped into memory. Writing a step or an
instruction is a memory copy, so the executor does it before every instruction, and the file outlives a killed
process. The exception that ends the rank goes behind them: its bytes are reserved from the start, so a full
disk or a lack of file descriptors cannot keep it back.

When a rank fails, its peers fail too, because their connections close. A rank that was killed from outside
is the cause; otherwise it is the rank whose error came first.
Next: ``ranks.py``, which reads the records after a failure.
"""

from __future__ import annotations

import json
import mmap
import signal
import struct
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.words.passes import Comm, parse

_STEP_BYTES, _TIME_BYTES, _TEXT_BYTES = 16, 8, 48
_ERROR_BYTES = 65536
_ERROR_CHARACTERS = 4000
_PROGRESS_BYTES = _STEP_BYTES + _TIME_BYTES + _TEXT_BYTES
_TRACEBACK_LINES = 12
_SIGNALS = {number.value: f", {number.name}" for number in signal.Signals}


SAVED = 128 + signal.SIGTERM
"""Exit code of a worker that has saved because of SIGTERM."""


class NotFinite(ArithmeticError):
    """A loss or a gradient norm is NaN or infinite."""


class TrainingFailed(Exception):
    """The workers ended before the job did; the text is what the user reads."""


@dataclass
class Interrupted(KeyboardInterrupt):
    """The job was ended from outside, by Ctrl-C (signal 2) or another signal; ``hint`` is how to go on."""

    signal_number: int
    hint: str = ""


class ProgressRecord:
    """One rank's step, instruction and error, in the folder ``logs``; what an earlier job wrote is erased.

    Raises:
        OSError: if the disk has no room for it.
    """

    # Bytes of the file: step [16] | time of the instruction [8] | instruction [48] | error as JSON [65536]

    def __init__(self, logs: Path, rank: int) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        size = _PROGRESS_BYTES + _ERROR_BYTES
        with open(record_path(logs, rank), "w+b") as file:
            file.write(bytes(size))  # takes the room on every file system
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, instruction: str) -> None:
        """Note the instruction that is about to run; at most 48 bytes are kept."""
        text = instruction.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        self._map[_STEP_BYTES:_PROGRESS_BYTES] = struct.pack("d", time.time()) + text

    def write_step(self, step: int) -> None:
        """Note the step that is about to run, and that none of its instructions has begun."""
        self._map[:_STEP_BYTES] = str(step).encode().ljust(_STEP_BYTES, b"\0")
        self.write("")

    def write_error(self, error: BaseException) -> None:
        """Leave an exception for the launcher, as soon as it is caught.

        ``NotFinite`` and ``OSError`` need no traceback: their text says what happened and where.
        """
        text = str(error) if isinstance(error, NotFinite) else f"{type(error).__name__}: {error}"
        entry: dict[str, Any] = {"time_s": time.time(), "error": text[:_ERROR_CHARACTERS]}
        if isinstance(error, NotFinite):
            entry["of_all"] = True
        elif not isinstance(error, OSError):
            lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_TRACEBACK_LINES:]
            entry["traceback"] = "\n".join(lines)[-_ERROR_CHARACTERS:]
        self._map[_PROGRESS_BYTES:] = json.dumps(entry).encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")


def record_path(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.record"


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank has left in its file. Times are seconds since the epoch."""

    step: int | None = None  # that it had begun; None before the first
    instruction: str = ""  # that it had begun, such as 2S5; empty outside the schedule
    began_s: float = 0.0  # when it began the instruction
    time_s: float = 0.0  # when it raised
    error: str = ""  # "Type: text"; empty if it raised nothing
    traceback: str = ""  # empty if the error needs none
    of_all: bool = False  # the error is the same on all ranks and names its place

    @classmethod
    def read(cls, logs: Path, rank: int) -> Record:
        path = record_path(logs, rank)
        raw = path.read_bytes() if path.exists() else b""
        if len(raw) < _PROGRESS_BYTES:
            return cls()
        step, text = raw[:_STEP_BYTES].rstrip(b"\0"), raw[_STEP_BYTES + _TIME_BYTES : _PROGRESS_BYTES]
        (began_s,) = struct.unpack_from("d", raw, _STEP_BYTES)
        try:
            error = json.loads(raw[_PROGRESS_BYTES:].rstrip(b"\0") or b"{}")
        except ValueError:  # cut short
            error = {}
        instruction = text.rstrip(b"\0").decode(errors="replace")
        return cls(int(step) if step else None, instruction, began_s, **error)

    @property
    def place(self) -> str:
        """Where the rank was, in words: step, pass and microbatch."""
        if self.step is None:
            return "before its first step"
        if not self.instruction:
            return f"at step {self.step}, outside the schedule"
        try:
            instruction = parse(self.instruction)
        except ValueError:
            return f"at step {self.step}, in {self.instruction}"
        kind = "communication" if isinstance(instruction, Comm) else "pass"
        return (
            f"at step {self.step}, in {kind} {instruction}: "
            f"{instruction.type.value} of microbatch {instruction.microbatch} on stage {instruction.stage}"
        )


def explain(logs: Path, world_size: int, exit_codes: Mapping[int, int], before: str = "") -> str:
    """The text of ``blame``; then ``before``, what was seen before a rank failed; then where the logs are."""
    return f"{blame(logs, world_size, exit_codes)}\n{before}the logs of the ranks are in {logs}"


def blame(logs: Path, world_size: int, exit_codes: Mapping[int, int]) -> str:
    """Which rank failed, with what error, in which step and pass.

    Args:
        exit_codes: by rank, of those that did not end well; −N for signal N.
    """
    records = [Record.read(logs, rank) for rank in range(world_size)]
    # (order, time, rank, text): the smallest is to blame. 0: killed from outside. 1: raised, or ended with an
    # exit code; the earlier first. 2: SIGTERM, by which a launcher such as torchrun ends the others.
    causes = []
    for rank, record in enumerate(records):
        code = exit_codes.get(rank, 0)
        by_signal = f"by signal {-code}{_SIGNALS.get(-code, '')}"
        if record.error:
            causes.append((1, record.time_s, rank, f"raised {record.error}"))
        elif code == -signal.SIGTERM:
            causes.append((2, 0.0, rank, f"was ended {by_signal}"))
        elif code < 0:
            causes.append((0, 0.0, rank, f"was killed {by_signal}"))
        elif code > 0:
            causes.append((1, 0.0, rank, f"ended with exit code {code}"))  # a peer's error follows from it
    if not causes:
        return "the workers ended, and none of them left a reason"
    _, _, rank, what = min(causes)
    trace = records[rank].traceback.splitlines()
    first = records[rank].error if records[rank].of_all else f"rank {rank} {what} ({records[rank].place})"
    return "\n".join([first, *trace])
