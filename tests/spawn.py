"""One way to run a test on several gloo processes.

Processes are forked, so that what the test session has imported need not be imported again, and they stay for
the next case of the same size. A case that fails or hangs ends them.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

MOST_PROCESSES = 12
"""That wait for another case."""

MOST_THREADS = 32
"""Of a process that waits. More belong to communicators that earlier cases left; gloo's wake up a hundred
times a second."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240, fresh: bool = False
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` ranks of one process group; return their results.

    Function, arguments and results are pickled. Environment and folder are the caller's. ``fresh`` forks
    processes for this case alone: for one that changes its process, or depends on what it has done before.

    Raises:
        AssertionError: with the traceback of every rank that failed, or the ranks that did not finish.
    """
    pool = _Pool(world_size) if fresh else _pool(world_size)
    try:
        outcomes = pool.run(function, args, timeout)
    finally:
        if fresh or pool.spent:
            _POOLS.pop(world_size, None) if not fresh else None
            pool.end()
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok]
    assert not failures, "\n".join(failures)
    missing = sorted(set(range(world_size)) - set(outcomes))
    assert not missing, f"ranks {missing} did not finish within {timeout} s"
    return [outcomes[rank][1] for rank in range(world_size)]


class _Pool:
    """Ranks of one process group, each with a pipe to this process.

    It is ``spent`` after a case that failed on a rank, did not end, or left too many threads there.
    """

    def __init__(self, world_size: int) -> None:
        self.spent = False
        context = multiprocessing.get_context("fork")
        self._folder, self._stores = tempfile.TemporaryDirectory(), count()
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_rank_main, args=(rank, world_size, there))
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> dict[int, tuple[bool, Any]]:
        """By rank, whether it succeeded, and its result or traceback; without those that did not end in time.

        After a failure the other ranks have half a second.
        """
        self.spent = True  # if this is interrupted
        store = f"file://{self._folder.name}/{next(self._stores)}"
        case = pickle.dumps((store, dict(os.environ), os.getcwd(), function, args))
        for connection in self._connections:
            connection.send_bytes(case)
        deadline = time.monotonic() + timeout
        outcomes, most_threads = dict[int, tuple[bool, Any]](), 1
        while len(outcomes) < len(self._processes) and time.monotonic() < deadline:
            for rank, connection in enumerate(self._connections):
                if rank in outcomes:
                    continue
                if connection.poll(0.01):
                    ok, threads, outcome = pickle.loads(connection.recv_bytes())
                    outcomes[rank] = (ok, pickle.loads(outcome))
                    most_threads = max(most_threads, threads)
                elif not self._processes[rank].is_alive():
                    outcomes[rank] = (False, f"ended with exit code {self._processes[rank].exitcode}")
                if rank in outcomes and not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + 0.5)
        succeeded = len(outcomes) == len(self._processes) and all(ok for ok, _ in outcomes.values())
        self.spent = not succeeded or most_threads > MOST_THREADS
        return outcomes

    def end(self) -> None:
        """End the ranks: those that wait for a case by themselves, the others at once."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            if process.is_alive():
                connection.send_bytes(b"")
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


_POOLS: dict[int, _Pool] = {}


def _pool(world_size: int) -> _Pool:
    """The ranks of this size, which wait; ends those that waited longest when there are too many."""
    pool = _POOLS.pop(world_size, None)
    while sum(_POOLS) + world_size > MOST_PROCESSES and _POOLS:
        _POOLS.pop(next(iter(_POOLS))).end()
    _POOLS[world_size] = pool or _Pool(world_size)
    return _POOLS[world_size]


@atexit.register
def _end_pools() -> None:
    while _POOLS:
        _POOLS.popitem()[1].end()


def _rank_main(rank: int, world_size: int, connection: Connection) -> None:
    gc.freeze()  # what all share stays shared: no collection of this rank's writes into it
    parent = os.getppid()
    torch.set_num_threads(1)
    ok = True
    while ok and (case := _next_case(connection, parent)):
        ok, outcome = _outcome(rank, world_size, case)
        connection.send_bytes(pickle.dumps((ok, psutil.Process().num_threads(), outcome)))
    for child in multiprocessing.active_children():  # a distributed checkpoint leaves its manager behind
        child.kill()
        child.join()
    os._exit(0)


def _next_case(connection: Connection, parent: int) -> bytes:
    """Nothing when there is none, or nobody who could send one."""
    while not connection.poll(1):
        if os.getppid() != parent:
            return b""
    return connection.recv_bytes()


def _outcome(rank: int, world_size: int, case: bytes) -> tuple[bool, bytes]:
    """Whether the case succeeded here, and its result or traceback, pickled."""
    try:
        store, environment, folder, function, args = pickle.loads(case)
        os.environ.clear()
        os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.chdir(folder)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        result = pickle.dumps(function(rank, *args))
        dist.barrier()  # a rank that leaves early closes connections that others may still be making
        _clean()
    except BaseException:
        return False, pickle.dumps(traceback.format_exc())
    return True, result


def _clean() -> None:
    """Leave nothing of a case in this process but what it has imported."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

        parallel_state.destroy_model_parallel()
        unset_num_microbatches_calculator()
    dist.destroy_process_group()
    gc.collect()
