"""The real training worker with a fault in one pass, which ``VOCABPAR_FAULT`` names: ``kill 3W2``.

``VOCABPAR_NCCL_TIMEOUT_S`` stands for the minutes that NCCL waits for a peer.

What waits for peers when a process ends, waits for ever here: a failing rank must not come to it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from megatron_vocabpar.pipeline import forward_backward
from megatron_vocabpar.runtime.streams import side_stream
from megatron_vocabpar.schedule.words.passes import parse
from megatron_vocabpar.train import trainer
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.worker import run_worker


def _wait_for_ever(*_: Any) -> None:
    threading.Event().wait()


class _NeverCloses:
    """A side stream whose peers are gone."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream = side_stream(device, name)

    def submit(self, work: Callable[[], Any]) -> Any:
        return self._stream.submit(work)

    close = _wait_for_ever


def run(config: TrainConfig) -> None:
    trainer.dist.destroy_process_group = _wait_for_ever
    forward_backward.side_stream = _NeverCloses
    if seconds := os.environ.get("VOCABPAR_NCCL_TIMEOUT_S"):
        distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=int(seconds))
    fault, _, faulty = os.environ["VOCABPAR_FAULT"].partition(" ")
    handlers_of = forward_backward.handlers_of

    def with_fault(*arguments: Any) -> Any:
        handlers, finish = handlers_of(*arguments)
        kind = parse(faulty).type
        sound = handlers[kind]

        def handler(instruction: Any) -> None:
            if str(instruction) == faulty:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "hang":
                    _wait_for_ever()
                raise FloatingPointError("planted")
            sound(instruction)

        return {**handlers, kind: handler}, finish

    forward_backward.handlers_of = with_fault  # type: ignore[assignment]
    trainer.run(config)


if __name__ == "__main__":
    run_worker(sys.argv[1], run)
