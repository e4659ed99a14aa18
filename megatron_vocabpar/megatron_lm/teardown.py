"""A rank that fails ends soon; otherwise it and its peers could wait for each other.

The launcher ends the other ranks once one has ended. Before that the uncaught exception is reported, and what
runs at exit has time: a logger's upload, a checkpoint's helper processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_TEARDOWN_S = 30


def ending_soon(report: Hook, teardown_s: int = _TEARDOWN_S) -> Hook:
    """``report`` as ``sys.excepthook``; the process is killed by SIGALRM if it lives ``teardown_s`` longer.

    The kernel keeps the time: a thread of Python's stands still once the interpreter shuts down.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(teardown_s)
        report(kind, error, trace)

    return hook
