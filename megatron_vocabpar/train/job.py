"""A whole job, in order: check, prepare the data, train with each method, report.

Nothing is written to the results folder before the checks and the preparation have passed. What needs
megatron-core is passed in as ``DataFunctions``.
Next: ``launch.py`` (one method's processes), ``report.py`` (what is left for the reader).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_vocabpar.schedule.families import SEARCH
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.train.check import check, resolve_device
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.launch import WORKER_MODULE, launch
from megatron_vocabpar.train.output import (
    DATA_FILE,
    LOG_FOLDER,
    SCHEDULE_DATA_FILE,
    finished,
    method_config,
    open_method,
    open_output,
)
from megatron_vocabpar.train.prepare import DataFiles, InspectDataset, WriteDataset, prepare
from megatron_vocabpar.train.report import write_report
from megatron_vocabpar.train.schedules import describe, plan_method

Say = Callable[[str], None]


@dataclass(frozen=True)
class DataFunctions:
    """The parts of the preparation that need megatron-core."""

    write: WriteDataset
    inspect: InspectDataset


@dataclass(frozen=True)
class JobPlan:
    """What is decided before anything is written to the results folder.

    Attributes:
        config: the job, its device decided.
        files: the prepared data.
        plans: of the methods that are still to be trained, in order.
    """

    config: TrainConfig
    files: DataFiles
    plans: Mapping[str, Plan]


def run_job(config: TrainConfig, data: DataFunctions, say: Say, worker_module: str = WORKER_MODULE) -> None:
    """Run a job with processes of its own, on this machine.

    Args:
        config: the job.
        data: how an indexed dataset is written and read.
        say: told what is going on, a line at a time.
        worker_module: what each process runs.

    Raises:
        ValueError: for a job that cannot run; nothing has been written.
        TrainingFailed, Interrupted: see ``launch``.
    """
    plan = plan_job(config, data, say)
    config = plan.config
    open_output(config)
    for method in config.methods:
        if method not in plan.plans:
            say(f"{method} has done its {config.steps} steps")
            continue
        path = open_job_method(plan, method)
        say(f"training {method} on {config.world_size} processes ({config.device})")
        launch(path, config.world_size, path.parent / LOG_FOLDER, worker_module)
    say(write_report(Path(config.output)))


def plan_job(config: TrainConfig, data: DataFunctions, say: Say) -> JobPlan:
    """Check a job, make its schedules and prepare its data. Writes only to the cache.

    Raises:
        ValueError: for a job that cannot run.
    """
    check(config)
    config = dataclasses.replace(config, device=resolve_device(config))
    plans = {}
    for method in config.methods:
        if finished(config, method):
            continue
        if config.family == SEARCH:
            say(f"searching for a schedule of {method}")
        plans[method] = plan_method(config, method)
        say(f"schedule of {method}: {describe(plans[method].schedule, config.family)}")
    files = prepare(config, data.write, data.inspect, say)
    say(f"data: {files.name}, {files.train_tokens:,} tokens ({files.valid_tokens:,} more for evaluation)")
    return JobPlan(config, files, plans)


def open_job_method(plan: JobPlan, method: str) -> Path:
    """Create the folder of one method, with what its workers read; returns its ``config.json``."""
    path = open_method(method_config(plan.config, method))
    write_inputs(path.parent, plan.files, plan.plans[method])
    return path


def write_inputs(folder: Path, files: DataFiles, plan: Plan) -> None:
    """Write what the workers of one method read beside their configuration into the method's folder."""
    (folder / DATA_FILE).write_text(files.to_json())
    (folder / SCHEDULE_DATA_FILE).write_text(plan_to_json(plan) + "\n")
