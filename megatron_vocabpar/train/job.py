"""A whole job, in order: check, prepare the data, train with each method, report.

Nothing is written to the results folder before the checks and the preparation have passed. What needs
megatron-core is passed in as ``DataFunctions``.
Next: ``launch.py`` (one method's processes), ``report.py`` (what is left for the reader).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_vocabpar.train.check import check, resolve_device
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.launch import WORKER_MODULE, launch
from megatron_vocabpar.train.output import (
    DATA_FILE,
    LOG_FOLDER,
    finished,
    method_config,
    open_method,
    open_output,
)
from megatron_vocabpar.train.prepare import DataFiles, InspectDataset, WriteDataset, prepare
from megatron_vocabpar.train.report import write_report

Say = Callable[[str], None]


@dataclass(frozen=True)
class DataFunctions:
    """The parts of the preparation that need megatron-core."""

    write: WriteDataset
    inspect: InspectDataset


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
    config, files = plan_job(config, data, say)
    open_output(config)
    for method in config.methods:
        if finished(config, method):
            say(f"{method} has done its {config.steps} steps")
            continue
        path = open_job_method(config, method, files)
        say(f"training {method} on {config.world_size} processes ({config.device})")
        launch(path, config.world_size, path.parent / LOG_FOLDER, worker_module)
    say(write_report(Path(config.output)))


def plan_job(config: TrainConfig, data: DataFunctions, say: Say) -> tuple[TrainConfig, DataFiles]:
    """Check a job and prepare its data; returns it with its device decided. Writes only to the cache."""
    check(config)
    config = dataclasses.replace(config, device=resolve_device(config))
    files = prepare(config, data.write, data.inspect, say)
    say(f"data: {files.name}, {files.train_tokens:,} tokens ({files.valid_tokens:,} more for evaluation)")
    return config, files


def open_job_method(config: TrainConfig, method: str, files: DataFiles) -> Path:
    """Create the folder of one method, with ``config.json`` (returned) and ``data.json`` for its workers."""
    path = open_method(method_config(config, method))
    (path.parent / DATA_FILE).write_text(files.to_json())
    return path
