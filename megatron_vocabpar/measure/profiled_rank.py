"""What the processes of ``vocabpar profile`` run: one measures passes, several measure communication."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, Listeners, vocab_groups
from megatron_vocabpar.runtime.comm import VocabGroups, all_gather, all_reduce, broadcast, warm_up
from megatron_vocabpar.runtime.pass_times import RankTimes, transfer_ms
from megatron_vocabpar.runtime.streams import backend, clock, default_device
from megatron_vocabpar.runtime.timeline import Span, Timeline
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.train.build import DTYPES, build_chunks
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.cpu import megatron_on
from megatron_vocabpar.train.trainer import forward_step

_FAMILY = "zb-h1"  # it splits W from B
_STATISTICS = 2  # numbers a token


def measure_passes(config: TrainConfig, groups: VocabGroups, device: torch.device) -> dict[str, Any]:
    """For every method that partitions the vocabulary, median ms of its passes, by name."""
    chunks = build_chunks(config, Placement(1), device)
    return {
        name: _by_type(RankTimes.of(list(_iterations(name, config, chunks, groups, device))))
        for name, method in METHODS.items()
        if method.vocabulary_parallel
    }


def _by_type(times: RankTimes) -> dict[str, float]:
    """The rank has one stage."""
    return {type_.value: ms for (type_, _), ms in times.passes.items()}


def _iterations(
    method: str, config: TrainConfig, chunks: list[Any], groups: VocabGroups, device: torch.device
) -> Iterator[list[Span]]:
    """The spans of each of ``config.steps`` iterations, after one that is not measured."""
    timeline = Timeline(device)
    plans = partial(make_plan, method, 1, family=_FAMILY)
    run = ForwardBackward(method, groups, device, make_plan=plans, listeners=Listeners(timeline=timeline))
    for step in range(config.steps + 1):
        chunks[0].zero_grad_buffer()
        timeline.start()
        run(
            forward_step_func=partial(forward_step, device),
            data_iterator=random_batches(config),
            model=chunks,
            num_microbatches=config.microbatches,
            seq_length=config.seq_length,
            micro_batch_size=config.micro_batch_size,
        )
        spans = timeline.stop()
        if step > 0:
            yield spans
    run.close()


def random_batches(config: TrainConfig) -> Iterator[dict[str, Any]]:
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


def measure_communication(config: TrainConfig, groups: VocabGroups, device: torch.device) -> dict[str, Any]:
    """ms of a transfer, of C0, and of statistics and input gradient together: vocab-2's C1."""
    warm_up(groups, device)
    n = config.micro_batch_size * config.seq_length
    hidden = torch.zeros((n, config.hidden), dtype=DTYPES[config.dtype], device=device)
    gradient, statistics = hidden.float(), torch.zeros((n, _STATISTICS), device=device)

    def barrier_of_vocab_2() -> None:
        all_gather(groups, statistics)
        all_reduce(groups, gradient)

    slowest = transfer_ms(groups, lambda: torch.zeros_like(hidden))
    trips: list[float | None] = [None] * groups.pipeline
    dist.all_gather_object(trips, slowest)
    return {
        "p2p_ms": median(trip for trip in trips if trip is not None),
        "broadcast_ms": _slowest_ms(lambda: broadcast(groups, [hidden], [0]), config, device),
        "all_reduce_ms": _slowest_ms(barrier_of_vocab_2, config, device),
    }


def _slowest_ms(run: Callable[[], None], config: TrainConfig, device: torch.device) -> float:
    """The slowest rank's time of each round, which begins with a barrier; the median over the rounds."""
    mark, times = clock(device), []
    for _ in range(config.steps + 1):
        dist.barrier()
        start = mark()
        run()
        end = mark()
        times.append(1e3 * (end() - start()))
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return median(slowest.tolist())


def measure(config: TrainConfig) -> dict[str, Any] | None:
    """Measure on all processes of the job; returns the result on rank 0."""
    device = default_device(config.device, int(os.environ["LOCAL_RANK"]))
    with megatron_on(device):
        dist.init_process_group(backend(device))
        parallel_state.initialize_model_parallel(1, config.pp)
        model_parallel_cuda_manual_seed(config.seed)
        body = measure_passes if config.pp == 1 else measure_communication
        measured = body(config, vocab_groups(), device)
        leads = dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
    return measured if leads else None
