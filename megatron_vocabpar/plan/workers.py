"""``map`` over processes.

Next: ``choices.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

from megatron_vocabpar.parent import follow_parent


@contextmanager
def mapping(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """``map``, in this process or over ``workers`` others, which an exception here ends at once."""
    if workers == 1:
        yield map
        return
    others = set(active_children())
    with ProcessPoolExecutor(workers, initializer=_follow) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:  # they may still play for long
                worker.kill()
            raise


def _follow() -> None:
    """Prepare a worker: it leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
