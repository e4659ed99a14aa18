"""A rank that fails ends soon: what is left of it would wait for peers, which wait for it.

The launcher ends the other ranks once one has ended. Uncaught exceptions are reported first, as ever, and
what runs at exit has time to: a logger's upload, a checkpoint's helper processes.
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
