"""A whole job, in order: check, make the schedules, prepare the data, train with each method.

Nothing is written to the results folder before the checks and the preparation have passed. ``vocabpar train``
starts the ranks of each method as processes of this machine. Under torchrun it is itself one rank: rank 0
prepares, and all ranks train one method after the other.

Next: ``trainer.py`` (one rank), ``report.py`` (the results page, which the command writes at the end).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vocabpar.parent import follow_parent
from megatron_vocabpar.schedule.make.families import SEARCH
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.train import output
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.config_checks import check, resolve_device
from megatron_vocabpar.train.prepare import DataFiles, prepare, quiet_megatron
from megatron_vocabpar.train.schedules import describe, plan_method

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]

_PREPARATION = timedelta(hours=2)  # under torchrun all ranks wait for that of rank 0
_JOBS = "vocabpar/jobs"
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # a pickled checkpoint may not call functions
}


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """The rank of this process if torchrun has started it; None if a job starts its own ranks."""
    is_rank = "RANK" in environment and "WORLD_SIZE" in environment
    return int(environment["RANK"]) if is_rank else None


def run_job(config: TrainConfig, say: Say, environment: Mapping[str, str] = os.environ) -> None:
    """Run a job: start its ranks as processes of this machine, or run as a rank that torchrun has started.

    Raises:
        ValueError: for a job that cannot run; nothing has been written.
        ProcessFailed, Stopped: as ``runtime.processes.run``.
    """
    if torchrun_rank(environment) is not None:
        _run_rank(config, say)
        return
    from megatron_vocabpar.runtime.processes import run

    for folder in open_job(config, say, environment):
        job = output.read_config(folder)
        say(f"training {job.method} on {job.world_size} processes ({job.device})")
        run(run_method, str(folder), ranks=job.world_size, environment=_ENVIRONMENT)


def run_method(folder: str) -> None:
    """Train one method, on a rank that ``run_job`` has started in the method's folder."""
    import torch.distributed as dist

    from megatron_vocabpar.runtime.streams import backend, default_device

    job = output.read_config(Path(folder))
    device = default_device(job.device, int(os.environ["LOCAL_RANK"]), shared=job.share_gpus)
    dist.init_process_group(backend(device))
    _train(job, device)
    # Not after a failure: it waits for collectives that peers will not join, and would hide the error.
    dist.destroy_process_group()


def _train(job: TrainConfig, device: torch.device) -> None:
    with quiet_megatron():  # imports it
        from megatron_vocabpar.train.trainer import train

        train(job, device)


def _run_rank(config: TrainConfig, say: Say) -> None:
    """One rank of a job that torchrun has started; all ranks must see the results folder and the cache."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from megatron_vocabpar.runtime.streams import backend, default_device

    follow_parent()  # torchrun ends its ranks itself, unless it is killed
    store, rank, size = next(rendezvous("env://"))
    if rank == 0:
        store.set(_JOBS, "\n".join(map(str, open_job(config, say))))
    store.wait([_JOBS], _PREPARATION)
    jobs = [output.read_config(Path(folder)) for folder in store.get(_JOBS).decode().splitlines()]
    for job in jobs:
        device = default_device(job.device, int(os.environ["LOCAL_RANK"]), shared=job.share_gpus)
        if not dist.is_initialized():
            dist.init_process_group(backend(device), store=store, rank=rank, world_size=size)
        if rank == 0:
            say(f"training {job.method} on {size} processes ({job.device})")
        _train(job, device)
    if jobs:
        dist.destroy_process_group()


def open_job(config: TrainConfig, say: Say, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Check a job, make its schedules, prepare its data, and create its folders.

    Returns:
        The folder of every method that is still to be trained, with the files that its ranks read.
    """
    check(config, environment)
    config = dataclasses.replace(config, device=resolve_device(config, environment))
    plans: dict[str, Plan] = {}
    for method in config.methods:
        if output.finished(config, method):
            say(f"{method} has done its {config.steps} steps")
            continue
        if config.family == SEARCH:
            say(f"searching for a schedule of {method}")
        plans[method] = plan_method(config, method)
        say(f"schedule of {method}: {describe(plans[method].schedule, config.family)}")
    files = prepare(config, say)
    say(f"data: {files.name}, {files.train_tokens:,} tokens ({files.valid_tokens:,} more for evaluation)")
    if config.overwrite and (Path(config.output) / output.CONFIG_FILE).is_file():
        earlier = output.read_config(Path(config.output))
        say(f"replacing the results of {', '.join(earlier.methods)} in {config.output}")
    output.open_output(config)
    folders = []
    for method, plan in plans.items():
        folders.append(output.open_method(output.method_config(config, method)))
        write_inputs(folders[-1], files, plan)
    return folders


def write_inputs(folder: Path, files: DataFiles, plan: Plan) -> None:
    """Write the record of the data and the plan into a method's folder, where its ranks read them."""
    (folder / output.DATA_FILE).write_text(files.to_json())
    (folder / output.SCHEDULE_DATA_FILE).write_text(plan_to_json(plan) + "\n")
