"""One way to run a test on several gloo processes.

Processes are forked, so that what the test session has imported need not be imported again.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` ranks of one process group; return their results.

    Raises:
        AssertionError: with the traceback of every rank that failed, or the ranks that did not finish.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, writer, function, args))
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        outcomes: dict[int, tuple[bool, Any]] = {}
        try:
            while len(outcomes) < world_size and time.monotonic() < deadline:
                for rank, (reader, _) in enumerate(pipes):
                    if rank not in outcomes and reader.poll(0.01):
                        outcomes[rank] = reader.recv()
                failed = [text for ok, text in outcomes.values() if not ok]
                if failed:
                    time.sleep(0.5)
                    break
        finally:
            for process in processes:
                process.join(2 if len(outcomes) == world_size else 0.1)
                if process.is_alive():
                    process.kill()
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok]
    assert not failures, "\n".join(failures)
    missing = sorted(set(range(world_size)) - set(outcomes))
    assert not missing, f"ranks {missing} did not finish within {timeout} s"
    return [outcomes[rank][1] for rank in range(world_size)]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    writer: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        outcome = (True, function(rank, *args))
        dist.barrier()  # a rank that leaves early closes connections that others may still be making
    except BaseException:
        outcome = (False, traceback.format_exc())
    writer.send(outcome)
    writer.close()
    for child in multiprocessing.active_children():  # a distributed checkpoint leaves its manager behind
        child.kill()
        child.join()
    os._exit(0)
