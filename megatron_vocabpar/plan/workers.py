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
    """``map``, in this process or in so many others."""
    if workers == 1:
        yield map
    else:
        with ProcessPoolExecutor(workers, initializer=_follow) as pool:
            yield pool.map


def _follow() -> None:
    """In each worker: the parent answers Ctrl-C, and none outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
