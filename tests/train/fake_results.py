"""Results as a trainer would leave them, made without training: a curve that falls, with a little noise."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw.pictures import SCHEDULE_FILE, TIMELINE_FILE
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.metrics import Metrics
from megatron_vocabpar.train.output import CHECKPOINT_FOLDER, METRICS_FILE, SCHEDULE_DATA_FILE, read_config

PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="40">'
    '<rect width="80" height="40" fill="teal"/><text x="10" y="25">0F0</text></svg>'
)


def records(steps: int, first_step: int = 0, noise: float = 0.0, stages: int = 4) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` for the steps after ``first_step``; ``noise`` is added to the losses."""
    bumps = random.Random(5)
    made = []
    for step in range(1, steps + 1):
        loss = 4 + 5 * math.exp(-step / 20) + 0.1 * bumps.random()
        record = {
            "step": step,
            "loss": loss + noise * bumps.random(),
            "grad_norm": 1.5,
            "lr": 1e-3,
            "tokens_per_s": 2000.0 + step,
            "iteration_ms": 500.0 - step,
            "peak_memory_mib": [400.0 + step / 10 + stage for stage in range(stages)],
        }
        if step % 20 == 0:
            record["eval_loss"] = loss + 0.2
        made.append(record)
    return made[first_step:]


def pretend(folder: str) -> None:
    """In place of ``run_method`` on a rank: say so and leave results."""
    config, rank = read_config(Path(folder)), int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} trains {config.method}", flush=True)
    if rank == 0:
        write_results(config)


def write_results(config: TrainConfig) -> None:
    """Fill the folder of one method."""
    folder = Path(config.output)
    noise = 0.0 if config.method == "baseline" else 2e-6
    with Metrics(config, folder / METRICS_FILE, 0, active=True) as metrics:
        for record in records(config.steps, noise=noise, stages=config.pp):
            metrics.add(record)
    plan = make_plan(config.method, config.pp, config.microbatches)
    (folder / SCHEDULE_DATA_FILE).write_text(plan_to_json(plan))
    (folder / SCHEDULE_FILE).write_text(PICTURE)
    (folder / TIMELINE_FILE).write_text("[]")
    checkpoint = folder / CHECKPOINT_FOLDER / f"step_{config.steps:07d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata.json").write_text("{}")
