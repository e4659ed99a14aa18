"""Ranks as forks of this process. They import nothing again, so dozens start in seconds.

Only for measurements over gloo: a process that has started a thread or a GPU must not be forked. A rank that
fails or is killed ends the others, and the message names the rank and what it was doing.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.parent import follow_parent
from megatron_vocabpar.train.failure import ProgressRecord, TrainingFailed, blame

_SETTLE_S = 0.5  # in which peers of a failed rank say why they fail

Body = Callable[[int, ProgressRecord], Any]


def run_forked(world_size: int, body: Body, timeout: timedelta) -> list[Any]:
    """Run ``body(rank, record)`` on ``world_size`` processes of one gloo group; its results by rank.

    Args:
        body: what every rank runs; it notes in ``record`` what it is about to do. Its result is pickled.
        timeout: after which a rank that waits for another gives up.
    """
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory(prefix="vocabpar-ranks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        connections: list[Connection] = []
        processes: list[ForkProcess] = []
        stack.callback(_end, processes)
        gc.freeze()  # shared pages stay shared: a rank's garbage collection would write into them
        stack.callback(gc.unfreeze)
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            arguments = (rank, world_size, body, timeout, folder, writer)
            processes.append(context.Process(target=_run_rank, args=arguments))
            processes[-1].start()
            writer.close()  # so that no other rank holds it: it closes when this one ends
            connections.append(reader)
        results: dict[int, Any] = {}
        for rank, reader in _arrivals(connections):
            try:
                results[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:  # the rank has ended without a result
                _fail(folder, processes)
        return [results[rank] for rank in range(world_size)]


def _arrivals(connections: list[Connection]) -> Iterator[tuple[int, Connection]]:
    """Each rank's connection once it has something to read, or has been closed."""
    left = {connection: rank for rank, connection in enumerate(connections)}
    while left:
        for connection in wait(list(left)):
            assert isinstance(connection, Connection)
            yield left.pop(connection), connection


def _fail(folder: Path, processes: list[ForkProcess]) -> None:
    time.sleep(_SETTLE_S)
    codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    raise TrainingFailed(blame(folder, len(processes), codes))


def _end(processes: list[ForkProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _run_rank(
    rank: int, world_size: int, body: Body, timeout: timedelta, folder: Path, results: Connection
) -> None:
    """One rank; it ends without Python's own exit, which would wait for threads and peers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    follow_parent(folder)
    torch.set_num_threads(1)
    record = ProgressRecord(folder, rank)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout
        )
        result = body(rank, record)
        dist.barrier()  # a rank that leaves early closes connections that others still use
        results.send_bytes(pickle.dumps(result))
    except Exception as error:
        record.write_error(error)
        os._exit(1)
    os._exit(0)
