"""Our executor beside megatron-core's own 1F1B, on the same stock model, processes and machine in one run.

Method ``baseline`` leaves the vocabulary layers where Megatron has them, so only the executor differs. The
two take turns, iteration by iteration, and the ratio is taken pair by pair, so the machine's drift cancels.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_vocabpar.runtime.processes import run
from megatron_vocabpar.schedule.words.methods import BASELINE
from megatron_vocabpar.train.config import TrainConfig


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
    return run(_run_rank, replace(config, method=BASELINE), ranks=config.world_size)[0]


def _run_rank(config: TrainConfig) -> RuntimeResult:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
    from megatron_vocabpar.runtime.streams import backend, default_device
    from megatron_vocabpar.schedule.words.placement import Placement
    from megatron_vocabpar.train.core_on_cpu import megatron_on
    from megatron_vocabpar.train.state import build_chunks
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
        ours = ForwardBackward(config.method, vocab_groups(), device)
        has_batch = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()

        def iterate(forward_backward: Callable[..., Any]) -> float:
            chunks[0].zero_grad_buffer()
            dist.barrier()
            start = time.perf_counter()
            forward_backward(
                forward_step_func=partial(forward_step, device),
                data_iterator=_random_batches(config) if has_batch else None,
                model=chunks,
                num_microbatches=config.microbatches,
                seq_length=config.seq_length,
                micro_batch_size=config.micro_batch_size,
                forward_only=False,
            )
            dist.barrier()
            return (time.perf_counter() - start) * 1e3

        both = (ours, get_forward_backward_func())
        for each in both:
            iterate(each)
        pairs = [tuple(map(iterate, both)) for _ in range(config.steps)]
        dist.destroy_process_group()
    return RuntimeResult(*map(tuple, zip(*pairs, strict=True)))


def _random_batches(config: TrainConfig) -> Iterator[dict[str, Any]]:
    import torch

    shape = (config.micro_batch_size, config.seq_length)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.microbatches):
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
        yield {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(config.seq_length).expand(shape).contiguous(),
            "attention_mask": None,
        }
