"""A worker whose trainer only pretends: what it does is told by the environment variable ``FAKE_WORKER``.

Run as ``python -m tests.train.fake_worker <config.json>``, as the launcher runs the real one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import ProgressRecord
from megatron_vocabpar.train.output import LOG_FOLDER
from megatron_vocabpar.train.worker import run_worker

PATIENCE_S, STANDSTILL_S = 1000, 2


def pretend(config: TrainConfig) -> None:
    """Do what ``FAKE_WORKER`` says: ``train``, ``raise:RANK``, ``kill:RANK``, ``exit:RANK``,
    ``abort:RANK`` or ``wait``."""
    what, _, chosen = os.environ.get("FAKE_WORKER", "train").partition(":")
    rank = int(os.environ["RANK"])
    record = ProgressRecord(Path(config.output) / LOG_FOLDER, rank)
    record.write_step(7)
    record.write("2S5")
    Path(config.output, f"pid{rank}").write_text(str(os.getpid()))
    if what == "train":
        from tests.train.fake_results import write_results

        print(f"rank {rank} of {os.environ['WORLD_SIZE']} trains {config.method}", flush=True)
        if rank == 0:
            write_results(config)
        return
    if what != "wait" and rank == int(chosen):
        if what == "raise":
            raise RuntimeError("the pretended fault")
        if what == "exit":
            os._exit(3)
        if what == "abort":  # as a backend whose patience is over
            time.sleep(STANDSTILL_S)
            os.abort()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PATIENCE_S)


if __name__ == "__main__":
    run_worker(sys.argv[1], pretend)
