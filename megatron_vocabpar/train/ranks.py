"""Start the worker processes of one method, and say what went wrong if one fails.

``OwnProcesses`` starts all of them on this machine. A ``TorchrunRank`` is one of several processes that
torchrun has started: each starts one worker, and every method has a rendezvous of its own, so that methods
cannot meet each other's process groups.
Next: ``workers.py`` (start, wait, end), ``worker.py`` (one process), ``failure.py`` (the message).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from megatron_vocabpar.parent import follow_parent
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import TrainingFailed, explain
from megatron_vocabpar.train.output import CONFIG_FILE, LOG_FOLDER
from megatron_vocabpar.train.watchdog import Watchdog

WORKER_MODULE = "megatron_vocabpar.train.worker"
_DEFAULTS = {  # unless the user has set them
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # no function of a checkpoint's choice is called
}
_PREPARATION = timedelta(hours=2)
_SETTLE_S = 1.0
_DECISION = "vocabpar/decision"


class RefusedElsewhere(Exception):
    """Rank 0 has refused the job and told the user why."""


class OwnProcesses:
    """A job whose processes are all children of this one, on this machine."""

    leads = True  # whether this process speaks for the job

    def decide(self, decide: Callable[[], list[Path]]) -> list[Path]:
        """What ``decide`` returns on the leading process; the others wait for it and get the same."""
        return decide()

    def run(self, config: TrainConfig, worker_module: str) -> None:
        """Train one method; errors as ``launch``."""
        launch(config, worker_module)


class TorchrunRank(OwnProcesses):
    """One rank of a job that torchrun has started. It ends when torchrun is gone.

    The ranks meet at torchrun's store. All must see the disk of the results folder and the cache.
    """

    def __init__(self) -> None:
        from torch.distributed.rendezvous import rendezvous

        follow_parent()
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

        from megatron_vocabpar.train.workers import run_workers

        port = f"vocabpar/port/{config.method}"  # of this method, on rank 0's machine, which is MASTER_ADDR
        if self.leads:
            self._store.set(port, str(get_free_port()))
        environment = {
            **_DEFAULTS,
            **os.environ,
            "MASTER_PORT": self._read(port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        watchdog = Watchdog.of(config) if self.leads else None
        codes = run_workers(_worker(config, worker_module), {self._rank: environment}, watchdog)
        if codes:
            self._fail(codes[self._rank], config, watchdog.stood_still() if watchdog else "")

    def _fail(self, code: int, config: TrainConfig, before: str) -> None:
        """End this rank; the first to get here waits for the others' exit codes and tells the whole story."""
        self._store.set(f"vocabpar/exit/{self._rank}", str(code))
        if self._store.add("vocabpar/failed", 1) > 1:
            time.sleep(2 * _SETTLE_S)
            raise TrainingFailed("")
        time.sleep(_SETTLE_S)
        keys = {rank: f"vocabpar/exit/{rank}" for rank in range(config.world_size)}
        codes = {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        raise TrainingFailed(explain(Path(config.output) / LOG_FOLDER, config.world_size, codes, before))


def processes(environment: Mapping[str, str] = os.environ) -> OwnProcesses:
    """``TorchrunRank`` where a launcher has started this process as one rank of several."""
    return TorchrunRank() if "RANK" in environment and "WORLD_SIZE" in environment else OwnProcesses()


def launch(config: TrainConfig, worker_module: str = WORKER_MODULE) -> None:
    """Run the workers of one method on this machine until all have ended; ``open_method`` was called before.

    Args:
        worker_module: what ``python -m`` runs, with the path of ``config.json``.

    Raises:
        TrainingFailed: if a worker raises, is killed, or hangs. The text names the rank, the error, the step,
            the pass and the microbatch. No worker is left.
        Interrupted: on SIGINT, or on SIGTERM once the workers have saved. No worker is left.
    """
    from torch.distributed import TCPStore

    from megatron_vocabpar.train.workers import run_workers

    # The store listens on the loopback interface alone; by itself it would listen on all.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    size = str(config.world_size)
    environment = {
        **_DEFAULTS,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    ranks = {
        rank: environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(config.world_size)
    }
    watchdog = Watchdog.of(config)
    codes = run_workers(_worker(config, worker_module), ranks, watchdog)
    del store
    if codes:
        logs, before = Path(config.output) / LOG_FOLDER, watchdog.stood_still()
        raise TrainingFailed(explain(logs, config.world_size, codes, before))


def _worker(config: TrainConfig, module: str) -> tuple[str, ...]:
    return "-m", module, str(Path(config.output) / CONFIG_FILE)
