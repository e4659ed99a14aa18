"""What a rank was doing when it failed, and what went wrong: one message with rank, error, step and pass.

Each rank has a record, a small file beside its log, mapped into memory. To note a step and an instruction is
a memory copy, so the executor can do it before every instruction, and the file outlives a process that is
killed. Behind them goes the exception that ends the rank: the room is there from the start, so it needs
neither a free disk nor a free file descriptor.

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


class NotFinite(ArithmeticError):
    """A loss or a gradient norm is NaN or infinite."""


class TrainingFailed(Exception):
    """The workers ended before the job did; the text is what the user reads."""


class ProgressRecord:
    """Where one rank notes its step, its instruction and its error, in the folder ``logs``.

    What the rank had noted before is gone; an earlier object of the same rank writes into the same record.

    Raises:
        OSError: if the disk has no room for it.
    """

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
        """Leave an exception for the launcher; call it as soon as the exception is caught.

        The text of a ``NotFinite``, the same on all ranks, says all by itself, and so does an ``OSError``'s.
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
    """The file of a rank's record."""
    return logs / f"rank{rank}.record"


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank has left.

    Attributes:
        step: that it had begun; None before the first.
        instruction: that it had begun, such as 2S5; empty outside the schedule.
        began_s: when it began that, in seconds since the epoch.
        time_s: when it raised, in seconds since the epoch.
        error: what it raised, as ``Type: text``; empty if it raised nothing.
        traceback: of that; empty if the error says all by itself.
        of_all: whether the error is the same on all ranks and names its place.
    """

    step: int | None = None
    instruction: str = ""
    began_s: float = 0.0
    time_s: float = 0.0
    error: str = ""
    traceback: str = ""
    of_all: bool = False

    @classmethod
    def read(cls, logs: Path, rank: int) -> Record:
        """What a rank has left in the folder ``logs``."""
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
    """The message for a job whose workers failed, and where their logs are.

    Args:
        logs: with ``world_size`` and ``exit_codes`` as of ``blame``.
        before: lines on what was seen before a rank failed, each with its end.
    """
    return f"{blame(logs, world_size, exit_codes)}\n{before}the logs of the ranks are in {logs}"


def blame(logs: Path, world_size: int, exit_codes: Mapping[int, int]) -> str:
    """Which rank failed, with what, where.

    Args:
        exit_codes: by rank, of those that did not end well; −N for signal N.
    """
    records = [Record.read(logs, rank) for rank in range(world_size)]
    causes = []  # the first in this order is to blame; a launcher such as torchrun ends the others by SIGTERM
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
