"""Reports of single iterations: idle time in the log, and the timeline of one iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.runtime.pass_times import IterationTimes, RankTimes
from megatron_vocabpar.runtime.timeline import Span, gather_trace
from megatron_vocabpar.schedule.make.families import family_of
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate


def iteration() -> int:
    """The number of the iteration that runs, from 1, as Megatron's log counts."""
    from megatron.training import get_args

    return get_args().curr_iteration + 1


class IdleTime:
    """Measures every iteration that Megatron logs, and reports how long ranks idle, beside the plan.

    Args:
        run: the forward-backward function.
        interval: Megatron's ``log_interval``.
    """

    def __init__(self, run: ForwardBackward, interval: int) -> None:
        self._run = run
        self._interval = interval
        self._m = 0
        self._known: tuple[Plan, float] | None = None

    def wants(self, m: int) -> bool:
        self._m = m
        return iteration() % self._interval == 0

    def saw(self, spans: list[Span]) -> None:
        """Write a line and three scalars on the last rank, which has Megatron's log and writers."""
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

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
        plan, is_first = self._run.plan(self._m), self._known is None
        if self._known is None or self._known[0] is not plan:  # a plan is simulated once
            self._known = plan, simulate(plan).mean_idle
        values = {
            "vocab-parallel-idle-time": times.idle,
            "vocab-parallel-planned-idle-time": self._known[1],
            "vocab-parallel-imbalance": times.imbalance,
        }
        name = f"{plan.schedule.method.name} in {family_of(plan.schedule) or 'an unknown family'}"
        write_scalars(get_tensorboard_writer(), get_wandb_writer(), values, iteration(), name * is_first)


def write_scalars(tensorboard: Any, wandb: Any, values: dict[str, float], step: int, name: str = "") -> None:
    """Give scalars, and a plan's name if there is one, to the writers of TensorBoard and W&B, or None."""
    if tensorboard is not None:
        for tag, value in values.items():
            tensorboard.add_scalar(tag, value, step)
        if name:
            tensorboard.add_text("vocab-parallel-plan", name, step)
    if wandb is not None:
        wandb.log(values, step)
        if name:
            wandb.config.update({"vocab-parallel-plan": name}, allow_val_change=True)


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
