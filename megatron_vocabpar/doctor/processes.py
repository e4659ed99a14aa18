"""A check on several processes of this machine, one a GPU, which are started as those of a training.

Rank 0 writes the finding to a file. An error or a crash of any rank fails the check, with rank and reason.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.runtime.comm import VocabGroups, create_groups, warm_up
from megatron_vocabpar.runtime.streams import backend, default_device
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import open_method
from megatron_vocabpar.train.ranks import launch
from megatron_vocabpar.train.worker import run_worker

_CHECK_FILE, _FINDING_FILE = "check.json", "finding.json"


@dataclass(frozen=True)
class Rank:
    """One process of a check."""

    groups: VocabGroups  # of a pipeline with a stage a process; every communicator is warm
    device: torch.device
    warm_up_s: float  # that making the communicators took


def on_processes(body: Callable[..., Finding]) -> Callable[..., Finding]:
    """Turns ``body``, which every process calls with its ``Rank``, into a check; rank 0's finding counts.

    The check takes the device's name, the number of processes, and the sizes of ``body``. It raises
    ``TrainingFailed`` if a rank raises or is killed.
    """

    @wraps(body)
    def check(device: str, processes: int, **sizes: int | str) -> Finding:
        if processes < 2:
            return Finding("not run", reason="it needs two GPUs, and there is one")
        with tempfile.TemporaryDirectory(prefix="vocabpar-doctor-") as name:
            folder = Path(name)
            config = TrainConfig(pp=processes, layers=processes, device=device, output=name)
            open_method(config)
            (folder / _CHECK_FILE).write_text(json.dumps([body.__module__, body.__name__, sizes]))
            launch(config, __name__)
            return Finding(**json.loads((folder / _FINDING_FILE).read_text()))

    return check


def _run_rank(config: TrainConfig) -> None:
    device = default_device(config.device, int(os.environ["LOCAL_RANK"]))
    folder = Path(config.output)
    dist.init_process_group(backend(device))
    start = time.perf_counter()
    groups = create_groups((0, dist.get_rank(), 0), config.pp, 1)
    warm_up(groups, device)
    dist.barrier()
    warm_up_s = time.perf_counter() - start
    module, name, sizes = json.loads((folder / _CHECK_FILE).read_text())
    body = getattr(importlib.import_module(module), name).__wrapped__
    finding = body(Rank(groups, device, warm_up_s), **sizes)
    if dist.get_rank() == 0:
        (folder / _FINDING_FILE).write_text(json.dumps(dataclasses.asdict(finding)))
    dist.barrier()
    dist.destroy_process_group()  # not after an error: it would wait for peers


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], _run_rank))
