"""Start the worker processes of one method on this machine, and say what went wrong if one fails.

torch's elastic launcher starts the ranks, watches them, and ends the others when one ends badly.
``torchrun.py`` is for the other way in, where the ranks were started by torchrun.
Next: ``worker.py`` (what each process runs), ``failure.py`` (the message).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_vocabpar.train.failure import TrainingFailed, explain
from megatron_vocabpar.train.progress_record import RECORDS_VARIABLE

WORKER_MODULE = "megatron_vocabpar.train.worker"
_MONITOR_INTERVAL_S = 0.2


class Interrupted(Exception):
    """The job was ended from outside, by Ctrl-C or another signal.

    Attributes:
        signal_number: 2 for Ctrl-C.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by signal {signal_number}")
        self.signal_number = signal_number


def launch(config_path: Path, world_size: int, logs: Path, worker_module: str = WORKER_MODULE) -> None:
    """Run ``world_size`` workers on a ``config.json`` and wait until all have ended well.

    Args:
        config_path: handed to every worker.
        world_size: processes, all on this machine.
        logs: folder of the workers' log files, named in the message of a failure.
        worker_module: what ``python -m`` runs.

    Raises:
        TrainingFailed: if a worker raises or is killed; the others are ended first. The text names the rank,
            the error, the step, the pass and the microbatch.
        Interrupted: on SIGINT or SIGTERM, with no worker left.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="vocabpar-") as records, _quiet_elastic():
        launcher = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=_MONITOR_INTERVAL_S,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
        with _environment(worker_environment(os.environ, Path(records))):
            try:
                elastic_launch(launcher, sys.executable)("-m", worker_module, str(config_path))
            except SignalException as stop:
                raise Interrupted(stop.sigval) from stop
            except ChildFailedError as failed:
                codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
                if set(codes.values()) & {130, -signal.SIGINT}:
                    raise Interrupted(signal.SIGINT) from failed
                raise TrainingFailed(explain(Path(records), world_size, codes, logs)) from failed


def worker_environment(environment: Mapping[str, str], records: Path) -> dict[str, str]:
    """What workers get beside the launcher's own variables: one thread each, unless the user has set it."""
    return {
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": environment.get("TOKENIZERS_PARALLELISM", "false"),
        RECORDS_VARIABLE: str(records),
    }


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment, which the elastic launcher hands on, and put them back."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the elastic launcher's own account of a failure off the terminal: ours replaces it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
