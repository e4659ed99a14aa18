"""Counts where the host waits for a GPU, by the instruction of the schedule that it was in.

``EMULATED_WAITS=FOLDER``: when a process ends, ``FOLDER/RANK.json`` has ``[iteration, instruction, kind,
place, count]`` rows. ``instruction`` is null between passes, and ``iteration`` is the training loop's own
number, -1 before it. The place is the innermost line outside of torch.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

KINDS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "copy of pageable memory",
    "cudaFree",
)
_SKIPPED = ("/torch/", "importlib", "/tests/cuda_emulated/site/", "contextlib")

_library = ctypes.CDLL(None)
_Told = ctypes.CFUNCTYPE(None, ctypes.c_int)
_found: Counter[tuple[int, str | None, str, str]] = Counter()
_local = threading.local()
_lock = threading.Lock()


def note(kind: str) -> None:
    """Count a wait of this thread, where it is now."""
    if "EMULATED_WAITS" not in os.environ or getattr(_local, "quiet", 0):
        return
    frame: FrameType | None = sys._getframe(1)
    place, instruction, iteration = "", None, -1
    while frame is not None:
        code = frame.f_code
        if not place and not any(part in code.co_filename for part in _SKIPPED):
            place = f"{'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno}"
        if code.co_name == "execute" and code.co_filename.endswith("runtime/executor.py"):
            instruction = str(frame.f_locals.get("instruction"))
        if code.co_name == "train" and iteration == -1:  # the trainer's loop, and Megatron-LM's
            iteration = frame.f_locals.get("step", frame.f_locals.get("iteration", -1))
        frame = frame.f_back
    with _lock:
        _found[iteration, instruction, kind, place] += 1


class uncounted:
    """Waits of the stand-in itself."""

    def __enter__(self) -> None:
        _local.quiet = getattr(_local, "quiet", 0) + 1

    def __exit__(self, *_: Any) -> None:
        _local.quiet -= 1


_told = _Told(lambda kind: note(KINDS[kind]))


def write() -> None:
    """Leave what was found so far."""
    rows = [[*key, count] for key, count in sorted(_found.items(), key=str)]
    folder = Path(os.environ["EMULATED_WAITS"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.environ.get('RANK', 'launcher')}.json").write_text(json.dumps(rows))


def read(file: Path) -> tuple[tuple[int, str | None, str, str, int], ...]:
    """The rows that a process left; none where it left no file."""
    return tuple(map(tuple, json.loads(file.read_text()))) if file.exists() else ()


def install() -> None:
    """Start counting, where it is asked for."""
    if os.environ.get("EMULATED_WAITS"):
        _library.emulated_count_waits(_told)
        atexit.register(write)
