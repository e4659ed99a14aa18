"""Start the worker processes of one method, and say what went wrong if one fails.

Two ways: ``OwnProcesses`` starts all of them on this machine, by torch's elastic launcher, which ends the
others when one ends badly. A ``TorchrunRank`` is one of several that torchrun has started: each starts one
worker, with a fresh rendezvous for each method, so that methods cannot meet each other's process groups.
Next: ``worker.py`` (what each process runs), ``failure.py`` (the message).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import TrainingFailed, explain
from megatron_vocabpar.train.output import CONFIG_FILE, LOG_FOLDER

WORKER_MODULE = "megatron_vocabpar.train.worker"
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # unless the user has set them
_MONITOR_INTERVAL_S = 0.2
_PREPARATION = timedelta(hours=2)
_SETTLE_S = 1.0
_DECISION = "vocabpar/decision"


@dataclass
class Interrupted(Exception):
    """The job was ended from outside, by Ctrl-C (signal 2) or another signal."""

    signal_number: int


class RefusedElsewhere(Exception):
    """Rank 0 has refused the job and told the user why."""


class OwnProcesses:
    """How a job gets its processes: all are this one's children, on this machine.

    Attributes:
        leads: whether this process speaks for the job.
    """

    leads = True

    def decide(self, decide: Callable[[], list[Path]]) -> list[Path]:
        """What ``decide`` returns on the leading process; the others wait for it and get the same.

        Raises:
            RefusedElsewhere: where another rank decides, and has refused the job.
        """
        return decide()

    def run(self, config: TrainConfig, worker_module: str) -> None:
        """Train one method; errors as ``launch``."""
        launch(config, worker_module)


class TorchrunRank(OwnProcesses):
    """One rank of a job that torchrun has started; they meet at torchrun's store.

    The results folder and the cache must be on a disk that all ranks see.
    """

    def __init__(self) -> None:
        from torch.distributed.rendezvous import rendezvous

        self._store, self._rank, _ = next(rendezvous("env://"))
        self.leads = self._rank == 0

    def decide(self, decide: Callable[[], list[Path]]) -> list[Path]:
        if self.leads:
            decision = None
            try:
                decision = [str(path) for path in decide()]
            finally:
                self._store.set(_DECISION, json.dumps(decision))
        decision = json.loads(self._read(_DECISION))
        if decision is None:
            raise RefusedElsewhere
        return [Path(path) for path in decision]

    def _read(self, key: str) -> str:
        self._store.wait([key], _PREPARATION)
        return self._store.get(key).decode()

    def run(self, config: TrainConfig, worker_module: str) -> None:
        from torch.distributed.elastic.utils.distributed import get_free_port

        port = f"vocabpar/port/{config.method}"  # of this method, on rank 0's machine, which is MASTER_ADDR
        if self.leads:
            self._store.set(port, str(get_free_port()))
        environment = {
            **_DEFAULTS,
            **os.environ,
            "MASTER_PORT": self._read(port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        code = subprocess.run([sys.executable, *_worker(config, worker_module)], env=environment).returncode
        if code != 0:
            self._fail(code, config)

    def _fail(self, code: int, config: TrainConfig) -> None:
        """End this rank; the first to get here waits for the others' exit codes and tells the whole story."""
        self._store.set(f"vocabpar/exit/{self._rank}", str(code))
        if self._store.add("vocabpar/failed", 1) > 1:
            time.sleep(2 * _SETTLE_S)
            raise TrainingFailed("")
        time.sleep(_SETTLE_S)
        keys = {rank: f"vocabpar/exit/{rank}" for rank in range(config.world_size)}
        codes = {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        raise TrainingFailed(explain(Path(config.output) / LOG_FOLDER, config.world_size, codes))


def processes(environment: Mapping[str, str] = os.environ) -> OwnProcesses:
    """The way that fits: torchrun's where a launcher has started this process as one rank of several."""
    return TorchrunRank() if "RANK" in environment and "WORLD_SIZE" in environment else OwnProcesses()


def launch(config: TrainConfig, worker_module: str = WORKER_MODULE) -> None:
    """Run the ``config.world_size`` workers of one method on this machine; wait until all have ended well.

    Args:
        config: what ``open_method`` has opened the folder of.
        worker_module: what ``python -m`` runs, with the path of ``config.json``.

    Raises:
        TrainingFailed: if a worker raises or is killed; the others are ended first. The text names the rank,
            the error, the step, the pass and the microbatch.
        Interrupted: on SIGINT or SIGTERM, with no worker left.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    with contextlib.ExitStack() as stack:
        # The launcher's own account of a failure stays off the terminal: ours replaces it.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        # It hands on this process's environment, which is put back as it was: emptied, then filled.
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        os.environ.update(_DEFAULTS | os.environ)
        try:
            elastic_launch(launcher, sys.executable)(*_worker(config, worker_module))
        except SignalException as stop:
            raise Interrupted(stop.sigval) from stop
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            if set(codes.values()) & {130, -signal.SIGINT}:
                raise Interrupted(signal.SIGINT) from failed
            logs = Path(config.output) / LOG_FOLDER
            raise TrainingFailed(explain(logs, config.world_size, codes)) from failed


def _worker(config: TrainConfig, module: str) -> tuple[str, ...]:
    """Python's arguments for a worker of one method."""
    return "-m", module, str(Path(config.output) / CONFIG_FILE)
