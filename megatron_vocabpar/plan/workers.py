"""``map`` over processes.

Next: ``options.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from megatron_vocabpar.parent import follow_parent


@contextmanager
def mapping(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """``map``, in this process or over ``workers`` others."""
    if workers == 1:
        yield map
    else:
        with ProcessPoolExecutor(workers, initializer=_follow) as pool:
            yield pool.map


def _follow() -> None:
    """Prepare a worker: it leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
