"""Ends a process when the process that started it has ended."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

_PARENT_CHECK_S = 1.0


def follow_parent(temporary: Path | None = None) -> None:
    """Watch the parent process in a thread; when it has ended, end this process and those of its group.

    Args:
        temporary: a folder to remove before that.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="vocabpar-parent-watch", daemon=True).start()
