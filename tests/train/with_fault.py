"""A rank of ``vocabpar train`` with a fault in one pass.

What waits for peers when a process ends, waits for ever here: a failing rank must not come to it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_vocabpar.pipeline import forward_backward
from megatron_vocabpar.runtime.streams import side_stream
from megatron_vocabpar.schedule.words.passes import parse
from megatron_vocabpar.train.run_job import run_method


def _wait_for_ever(*_: Any) -> None:
    threading.Event().wait()


class _NeverCloses:
    """A side stream whose peers are gone."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream = side_stream(device, name)

    def submit(self, work: Callable[[], Any]) -> Any:
        return self._stream.submit(work)

    close = _wait_for_ever


def train_with_fault(folder: str, fault: str, nccl_timeout_s: int | None = None) -> None:
    """``run_method``, in which a pass raises, or its process is killed or hangs: ``kill 3W2``.

    Args:
        nccl_timeout_s: stands for the minutes that NCCL waits for a peer.
    """
    dist.destroy_process_group = _wait_for_ever
    forward_backward.side_stream = _NeverCloses
    if nccl_timeout_s is not None:
        distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=nccl_timeout_s)
    what, _, faulty = fault.partition(" ")
    handlers_of = forward_backward.handlers_of

    def with_fault(*arguments: Any) -> Any:
        handlers, finish = handlers_of(*arguments)
        kind = parse(faulty).type
        sound = handlers[kind]

        def handler(instruction: Any) -> None:
            if str(instruction) == faulty:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "hang":
                    _wait_for_ever()
                raise FloatingPointError("planted")
            sound(instruction)

        return {**handlers, kind: handler}, finish

    forward_backward.handlers_of = with_fault  # type: ignore[assignment]
    run_method(folder)
