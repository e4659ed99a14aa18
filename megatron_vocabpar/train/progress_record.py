"""What a rank was doing when it died: a tiny file per rank, mapped into memory.

Writing is a memory copy, so the executor can call it before every instruction; a file mapping outlives
a process that is killed, so the launcher can still say which pass it was in.
Next: ``ranks.py``, which reads the records after a failure.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECORDS_VARIABLE = "VOCABPAR_RECORDS"

_STEP_BYTES = 16
_TEXT_BYTES = 48
_RECORD_BYTES = _STEP_BYTES + _TEXT_BYTES


@dataclass(frozen=True, slots=True)
class LastProgress:
    """The last thing that a rank wrote: its step (None before the first) and its instruction, such as 2S5."""

    step: int | None
    instruction: str


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


def read_record(folder: Path, rank: int) -> LastProgress:
    """What this rank last wrote; empty if it never started."""
    try:
        raw = record_path(folder, rank).read_bytes()
    except FileNotFoundError:
        return LastProgress(None, "")
    step = raw[:_STEP_BYTES].rstrip(b"\0").decode()
    text = raw[_STEP_BYTES:].rstrip(b"\0").decode(errors="replace")
    return LastProgress(int(step) if step else None, text)
