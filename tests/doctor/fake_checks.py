"""Checks that end as a broken machine would make them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_vocabpar.doctor.result import Finding


def fine(figure: str) -> Finding:
    return Finding("ok", figure)


def raises() -> Finding:
    print("said before")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


def lacks_a_library() -> Finding:
    import no_such_library  # noqa: F401

    return Finding("ok")


def is_killed() -> Finding:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Finding("ok")


def leaves() -> Finding:
    os._exit(7)


def hangs(folder: str) -> Finding:
    """Starts a process in a session of its own, as a launcher does, leaves its id, and never ends."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(folder, "pid").write_text(str(child.pid))
    time.sleep(600)
    return Finding("ok")


def waits(file: str) -> Finding:
    """Leaves its id, and never ends."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
    return Finding("ok")


def variables_of_launchers() -> Finding:
    return Finding("ok", ",".join(name for name in ("RANK", "WORLD_SIZE", "HOME") if name in os.environ))
