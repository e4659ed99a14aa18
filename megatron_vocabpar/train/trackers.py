"""Where else the numbers of a step go: TensorBoard, Weights & Biases and MLflow, each a package of its own.

A tracker is a context that gives one function of the numbers of a step, by name, and the step:

    with TRACKERS["mlflow"](config, folder, 1) as log:
        log({"loss": 2.5}, 1)

One more is a row of ``TRACKERS``, named as its package, and a field of ``TrainConfig`` with that name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

from megatron_vocabpar.train.config import TrainConfig

Log = Callable[[dict[str, float], int], object]
"""Takes the numbers of a step by name, then the step."""
Tracker = Callable[[TrainConfig, Path, int], AbstractContextManager[Log]]
"""Takes one method's configuration, its folder in the job's, and the first step that will be logged."""


@contextmanager
def _tensorboard(config: TrainConfig, folder: Path, step: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard"), purge_step=step) as writer:
        yield lambda values, step: [writer.add_scalar(name, one, step) for name, one in values.items()]


@contextmanager
def _wandb(config: TrainConfig, folder: Path, step: int) -> Iterator[Log]:
    import wandb

    job, settings = folder.resolve().parent.name, asdict(config)
    with wandb.init(dir=str(folder), name=config.method, group=job, config=settings) as run:
        yield lambda values, step: run.log(values, step=step)


@contextmanager
def _mlflow(config: TrainConfig, folder: Path, step: int) -> Iterator[Log]:
    """A run in an experiment named like the job's folder, on MLFLOW_TRACKING_URI, else in mlflow.db there."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    job = folder.resolve().parent
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{job / 'mlflow.db'}")
    known = client.get_experiment_by_name(job.name)
    experiment = known.experiment_id if known is not None else client.create_experiment(job.name)
    run = client.create_run(experiment, run_name=config.method).info.run_id
    client.log_batch(run, params=[Param(name, str(value)) for name, value in asdict(config).items()])

    def log(values: dict[str, float], step: int) -> None:
        now_ms = round(time.time() * 1e3)
        client.log_batch(run, metrics=[Metric(name, one, now_ms, step) for name, one in values.items()])

    try:
        yield log
    except BaseException:
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run, "FINISHED")


TRACKERS: dict[str, Tracker] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""By the name of the option, and of the package that it needs."""
