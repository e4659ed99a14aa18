"""Our executor beside megatron-core's own 1F1B, on the same stock model, processes and machine in one run.

Method ``baseline`` leaves the vocabulary layers where Megatron has them, so only the executor differs. The
two take turns, iteration by iteration, and the ratio is taken pair by pair, so the machine's drift cancels.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vocabpar.train.ranks import launch

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import open_method

RESULT_FILE = "runtime.json"


@dataclass(frozen=True)
class RuntimeResult:
    """Iteration times in milliseconds; entries i of both were measured one after the other."""

    ours_ms: tuple[float, ...]
    megatron_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.ours_ms, self.megatron_ms, strict=True))


def measure_runtime(config: TrainConfig) -> RuntimeResult:
    """Start ``config.world_size`` processes and measure ``config.steps`` pairs of iterations.

    The configuration's method and data are not used.
    """
    with tempfile.TemporaryDirectory(prefix="vocabpar-bench-") as folder:
        job = replace(config, method="baseline", output=folder)
        open_method(job)
        launch(job, "lab.runtime")
        return RuntimeResult(
            **{k: tuple(v) for k, v in json.loads((Path(folder) / RESULT_FILE).read_text()).items()}
        )


def _run_rank(config: TrainConfig) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_vocabpar.measure.profiled_rank import random_batches
    from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
    from megatron_vocabpar.runtime.streams import backend, default_device
    from megatron_vocabpar.schedule.words.placement import Placement
    from megatron_vocabpar.train.build import build_chunks
    from megatron_vocabpar.train.cpu import megatron_on
    from megatron_vocabpar.train.trainer import forward_step

    device = default_device(config.device, int(os.environ["LOCAL_RANK"]))
    if device.type == "cpu":
        torch.set_num_threads(1)
    with megatron_on(device):
        dist.init_process_group(backend(device))
        parallel_state.initialize_model_parallel(config.tp, config.pp)
        model_parallel_cuda_manual_seed(config.seed)
        chunks = build_chunks(config, Placement(config.pp), device)
        chunks[0].config.batch_p2p_sync = False
        ours = ForwardBackward("baseline", vocab_groups(), device)
        has_batch = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()

        def iterate(run: Callable[..., Any]) -> float:
            chunks[0].zero_grad_buffer()
            dist.barrier()
            start = time.perf_counter()
            run(
                forward_step_func=partial(forward_step, device),
                data_iterator=random_batches(config) if has_batch else None,
                model=chunks,
                num_microbatches=config.microbatches,
                seq_length=config.seq_length,
                micro_batch_size=config.micro_batch_size,
                forward_only=False,
            )
            dist.barrier()
            return (time.perf_counter() - start) * 1e3

        both = (ours, get_forward_backward_func())
        for run in both:
            iterate(run)
        pairs = [tuple(iterate(run) for run in both) for _ in range(config.steps)]
        if dist.get_rank() == 0:
            result = {"ours_ms": [a for a, _ in pairs], "megatron_ms": [b for _, b in pairs]}
            (Path(config.output) / RESULT_FILE).write_text(json.dumps(result))
        dist.destroy_process_group()


if __name__ == "__main__":
    from megatron_vocabpar.train.worker import run_worker

    sys.exit(run_worker(sys.argv[1], _run_rank))
