"""A check on several processes of this machine, one a GPU: started as training starts its own.

Rank 0 leaves the finding in a file. An error or a crash of any rank is the check's, with rank and reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.runtime.comm import VocabGroups, create_groups, warm_up
from megatron_vocabpar.runtime.streams import backend, default_device
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import LOG_FOLDER
from megatron_vocabpar.train.ranks import launch
from megatron_vocabpar.train.worker import run_worker

_ARGUMENTS, _FINDING = "arguments.json", "finding.json"


@dataclass(frozen=True)
class Rank:
    """What one process of a check has.

    Attributes:
        groups: as a pipeline of as many stages, every communicator warm.
        device: of this process.
        arguments: the check's.
        warm_up_s: seconds that making the communicators took.
    """

    groups: VocabGroups
    device: torch.device
    arguments: Mapping[str, Any]
    warm_up_s: float


def run_processes(module: str, device: str, processes: int, arguments: Mapping[str, Any]) -> Finding:
    """Run ``python -m module`` on ``processes`` ranks, at least two; the module ends in ``rank_main``.

    Raises:
        TrainingFailed: if a rank raises or is killed.
    """
    if processes < 2:
        return Finding("not run", reason="it needs two GPUs, and there is one")
    with tempfile.TemporaryDirectory(prefix="vocabpar-doctor-") as name:
        folder = Path(name)
        config = dataclasses.replace(
            TrainConfig(), pp=processes, layers=processes, device=device, output=name
        )
        (folder / "config.json").write_text(config.to_json())
        (folder / _ARGUMENTS).write_text(json.dumps(dict(arguments)))
        launch(folder / "config.json", processes, folder / LOG_FOLDER, module)
        return Finding(**json.loads((folder / _FINDING).read_text()))


def rank_main(config_path: str, body: Callable[[Rank], Finding]) -> int:
    """One rank: make and warm the communicators, run the body, leave rank 0's finding; the exit code."""
    return run_worker(config_path, partial(_run_rank, body))


def _run_rank(body: Callable[[Rank], Finding], config: TrainConfig) -> None:
    device = default_device(config.device, int(os.environ["LOCAL_RANK"]))
    folder = Path(config.output)
    dist.init_process_group(backend(device))
    start = time.perf_counter()
    groups = create_groups((0, dist.get_rank(), 0), config.pp, 1)
    warm_up(groups, device)
    dist.barrier()
    warm_up_s = time.perf_counter() - start
    arguments = json.loads((folder / _ARGUMENTS).read_text())
    finding = body(Rank(groups, device, arguments, warm_up_s))
    if dist.get_rank() == 0:
        (folder / _FINDING).write_text(json.dumps(dataclasses.asdict(finding)))
    dist.barrier()
    dist.destroy_process_group()  # not after an error: it would wait for peers
