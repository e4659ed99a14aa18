"""Reports of single iterations: idle time in the log, and the timeline of one iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.runtime.pass_times import IterationTimes, RankTimes
from megatron_vocabpar.runtime.timeline import Span, gather_trace


def iteration() -> int:
    """The number of the iteration that runs, from 1, as Megatron's log counts."""
    from megatron.training import get_args

    return get_args().curr_iteration + 1


class IdleTime:
    """Measures each iteration that Megatron logs, and reports how long ranks idle.

    Args:
        interval: Megatron's ``log_interval``.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def wants(self, m: int) -> bool:
        return iteration() % self._interval == 0

    def saw(self, spans: list[Span]) -> None:
        """Write a line and two scalars on the last rank, which has Megatron's log and writers."""
        from megatron.training.global_vars import get_tensorboard_writer

        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, RankTimes.of([spans]))
        if dist.get_rank() < len(everyone) - 1:
            return
        times = IterationTimes.of(everyone)
        print(
            f"> vocabulary parallelism: iteration {iteration()}: idle time {times.idle:.1%}, the busiest "
            f"rank {times.imbalance:.1%} above the average",
            flush=True,
        )
        writer = get_tensorboard_writer()
        if writer is not None:
            writer.add_scalar("vocab-parallel-idle-time", times.idle, iteration())
            writer.add_scalar("vocab-parallel-imbalance", times.imbalance, iteration())


class TimelineFile:
    """Writes the trace of one iteration of all ranks, and pictures of it.

    Args:
        run: the forward-backward function.
        iteration: its number in Megatron's log.
        folder: gets the folder ``vocab_parallel_timeline_<iteration>``.
    """

    def __init__(self, run: ForwardBackward, iteration: int, folder: Path) -> None:
        self._run = run
        self._iteration = iteration
        self._folder = folder
        self._m = 0

    def wants(self, m: int) -> bool:
        self._m = m
        return iteration() == self._iteration

    def saw(self, spans: list[Span]) -> None:
        trace = gather_trace(spans)
        if trace is not None:
            # Only the rank that writes pictures, once, needs what draws them.
            from megatron_vocabpar.schedule.draw.pictures import write_pictures

            folder = self._folder / f"vocab_parallel_timeline_{self._iteration:07d}"
            write_pictures(folder, self._run.plan(self._m), trace)
            print(f"> vocabulary parallelism: the timeline of iteration {self._iteration} is in {folder}")
