"""Starts the workers of one method by torch's elastic launcher, waits for them, and leaves none behind.

When a worker fails, torch sends SIGTERM to the others, and SIGKILL to those that still stand after 30 s. On
SIGTERM to this process the workers get time to save; SIGINT ends them at once. What a dead worker has started
ends with it: each leads a session of its own.
Next: ``worker.py`` (one process), ``watchdog.py``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    start_processes,
)

from megatron_vocabpar.train.failure import SAVED, Interrupted
from megatron_vocabpar.train.watchdog import Watchdog
from megatron_vocabpar.train.worker import TEMPORARY

_POLL_S = 0.1
_TO_SAVE_S = 300
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that torch handles


def run_workers(
    command: Sequence[str], environments: Mapping[int, Mapping[str, str]], watchdog: Watchdog | None
) -> dict[int, int]:
    """Run Python with the arguments ``command``, one process a rank, until all have ended.

    Returns:
        Exit codes, by rank, of those that ended badly; -N for signal N. Empty if all went well.

    Raises:
        Interrupted: after Ctrl-C, or after SIGTERM, here or at a worker, once all have saved.
        TrainingFailed: the watchdog's.
    """
    ranks = list(environments)
    with TemporaryDirectory(prefix="vocabpar-", ignore_cleanup_errors=True) as temporary, _as_before():
        variables = {"TMPDIR": temporary, TEMPORARY: temporary}
        try:
            workers = start_processes(
                "worker",
                sys.executable,
                dict.fromkeys(range(len(ranks)), tuple(command)),
                {local: {**environments[rank], **variables} for local, rank in enumerate(ranks)},
                DefaultLogsSpecs(log_dir=temporary),
            )
            result = _wait(workers, watchdog)
        except SignalException as stop:
            raise Interrupted(stop.sigval) from stop
    codes = {ranks[local]: failure.exitcode for local, failure in result.failures.items()}
    if SAVED in codes.values():
        raise Interrupted(signal.SIGTERM)
    return codes


def _wait(workers: PContext, watchdog: Watchdog | None) -> RunProcsResult:
    try:
        while (result := workers.wait(timeout=0)) is None:
            if watchdog is not None:
                watchdog.look()
            time.sleep(_POLL_S)
    except SignalException as stop:
        if stop.sigval == signal.SIGTERM:
            workers.close(signal.SIGTERM, _TO_SAVE_S)
        raise
    finally:
        for pid in workers.pids().values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        workers.close(signal.SIGKILL)
    return result


@contextmanager
def _as_before() -> Iterator[None]:
    """Put this process's signals back, and keep torch from telling in the log what we tell."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in before.items():
            signal.signal(number, handler)
