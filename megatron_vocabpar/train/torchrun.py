"""The same job where torchrun has started the ranks: ``torchrun -m megatron_vocabpar train …``.

Rank 0 checks the job and prepares the data while the others wait at torchrun's store. For each method
every rank then starts one worker of its own, with a fresh rendezvous, so that methods cannot meet each
other's process groups. The results folder and the cache must be on a disk that all ranks see.
Next: ``launch.py``, the way in without torchrun.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import TrainingFailed, explain
from megatron_vocabpar.train.job import DataFunctions, Say, open_job_method, plan_job
from megatron_vocabpar.train.launch import WORKER_MODULE, worker_environment
from megatron_vocabpar.train.output import LOG_FOLDER, open_output
from megatron_vocabpar.train.report import write_report

_PREPARATION = timedelta(hours=2)
_SETTLE_S = 1.0
_PLAN = "vocabpar/plan"


class RefusedElsewhere(Exception):
    """Rank 0 has refused the job and told the user why."""


@dataclass(frozen=True)
class _Plan:
    """What rank 0 decided: one ``config.json`` a method, and the folder of the progress records."""

    config_paths: list[str]
    records: str


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def run_job_as_rank(
    config: TrainConfig, data: DataFunctions, say: Say, worker_module: str = WORKER_MODULE
) -> None:
    """Run this rank's part of a job; arguments and errors as ``job.run_job``.

    Raises:
        RefusedElsewhere: on the other ranks, where ``run_job`` would raise ValueError.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://"))
    plan = _make_plan(config, data, say, store) if rank == 0 else _read_plan(store)
    for place, path in enumerate(plan.config_paths):
        port = _agree_on_port(store, rank, place)
        environment = {
            **os.environ,
            **worker_environment(os.environ, Path(plan.records)),
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        code = subprocess.run([sys.executable, "-m", worker_module, path], env=environment).returncode
        if code != 0:
            _fail(store, rank, world_size, code, plan, Path(path).parent / LOG_FOLDER)
    if rank == 0:
        say(write_report(Path(config.output)))


def _make_plan(config: TrainConfig, data: DataFunctions, say: Say, store: Any) -> _Plan:
    try:
        planned = plan_job(config, data, say)
    except BaseException:
        store.set(_PLAN, "null")
        raise
    open_output(planned.config)
    paths = [str(open_job_method(planned, method)) for method in planned.plans]
    plan = _Plan(paths, tempfile.mkdtemp(prefix="vocabpar-"))
    store.set(_PLAN, json.dumps([plan.config_paths, plan.records]))
    return plan


def _read_plan(store: Any) -> _Plan:
    store.wait([_PLAN], _PREPARATION)
    plan = json.loads(store.get(_PLAN))
    if plan is None:
        raise RefusedElsewhere
    return _Plan(*plan)


def _agree_on_port(store: Any, rank: int, place: int) -> str:
    """A port for the workers of one method, free on the machine of rank 0, which is ``MASTER_ADDR``."""
    key = f"vocabpar/port/{place}"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(key, str(probe.getsockname()[1]))
    store.wait([key], _PREPARATION)
    return store.get(key).decode()


def _fail(store: Any, rank: int, world_size: int, code: int, plan: _Plan, logs: Path) -> None:
    """End this rank; the first to get here waits for the others' exit codes and tells the whole story."""
    store.set(f"vocabpar/exit/{rank}", str(code))
    if store.add("vocabpar/failed", 1) > 1:
        time.sleep(2 * _SETTLE_S)
        raise TrainingFailed("")
    time.sleep(_SETTLE_S)
    keys = {other: f"vocabpar/exit/{other}" for other in range(world_size)}
    codes = {other: int(store.get(key)) for other, key in keys.items() if store.check([key])}
    raise TrainingFailed(explain(Path(plan.records), world_size, codes, logs))
