"""A process that ends with the one that has started it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

_PARENT_CHECK_S = 1.0


def follow_parent(temporary: Path | None = None) -> None:
    """End this process, and all that it has started, soon after its launcher has died, however that died.

    Args:
        temporary: a folder to remove then, if any.
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
