"""One training process: ``python -m megatron_vocabpar.train.worker <config.json>``.

``ranks.py`` starts one a rank, with torch's ``RANK``, ``WORLD_SIZE``, … in the environment. Rank 0 keeps
the terminal, without Megatron's warnings; the others write to log files. A process that fails leaves its
exception in the rank's record and ends at once, without waiting for peers, as it does when its launcher is
gone.
Next: ``trainer.py``, which trains.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from megatron_vocabpar.parent import follow_parent
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import ProgressRecord
from megatron_vocabpar.train.output import LOG_FOLDER
from megatron_vocabpar.train.quiet import quiet_megatron

TEMPORARY = "VOCABPAR_TEMPORARY"
"""The variable that names the folder of temporary files, which the workers remove if nobody else does."""


def run_worker(config_path: str, run: Callable[[TrainConfig], int | None]) -> NoReturn:
    """Run the trainer on this rank and end this process.

    Args:
        config_path: ``config.json`` of the method, in the method's folder.
        run: the trainer, called with the configuration; returns its exit code if that is not 0.
    """
    rank = int(os.environ["RANK"])
    config = TrainConfig.from_json(Path(config_path).read_text())
    temporary = Path(os.environ[TEMPORARY]) if TEMPORARY in os.environ else None
    launcher = os.getppid()
    follow_parent(temporary)
    logs = Path(config.output) / LOG_FOLDER
    record = ProgressRecord(logs, rank)
    if rank != 0:
        _log_to(logs / f"rank{rank}.log")
    faulthandler.enable()
    try:
        with quiet_megatron() if rank == 0 else nullcontext():
            code = run(config) or 0
    except BaseException as error:  # torch's CheckpointException is no Exception
        record.write_error(error)
        code = 1
    if temporary is not None and os.getppid() != launcher:  # which would have removed it
        shutil.rmtree(temporary, ignore_errors=True)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process now, without Python's own exit, which may hang or crash.

    After a failure it would join threads and free groups that wait for peers. After a training that went
    well, gloo's threads may still release their last tensors, and an interpreter that shuts down meanwhile
    ends with "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Checkpoints start processes of their own: they are in this session, and end with it.
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(code)


def _log_to(path: Path) -> None:
    with open(path, "ab", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


def _train(config: TrainConfig) -> int:
    from megatron_vocabpar.train.trainer import run

    return run(config)


if __name__ == "__main__":
    run_worker(sys.argv[1], _train)
