"""``python -m lab emulate``: the executor runs a schedule in real time, with sleeps for its passes.

Real are the programs, the executor, its side streams, the process groups, and every message and collective of
an iteration, over gloo. Not real are the passes, which sleep as long as a cost table says, and the size of
the messages. Sleeping takes no processor, so dozens of ranks share a few cores.

A pass costs the processes some time besides its sleep. The same run measures it: the median pass of the same
program with all costs zero. This time is subtracted once for each pass on the predicted critical path.

Next: ``emulated_passes.py`` (the handlers).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from lab.emulated_passes import EmulatedRank
from megatron_vocabpar.runtime.comm import create_groups, warm_up
from megatron_vocabpar.runtime.pass_times import pass_ms
from megatron_vocabpar.runtime.processes import run
from megatron_vocabpar.runtime.timeline import Span
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import Comm

_PATIENCE_S, _PATIENCE = 120.0, 10.0  # a rank waits for another this long, plus this many predicted times

_LONGEST_S = 86_400.0


@dataclass(frozen=True)
class Emulation:
    """A schedule as it ran, beside the simulator's prediction. Times are ms of the cost table."""

    name: str  # of the schedule
    predicted_ms: float  # an iteration
    predicted_idle: float  # share of an iteration, mean over the ranks
    measured_ms: tuple[float, ...]  # each iteration as it ran, the processes' overhead included
    measured_idle: float  # mean over ranks and iterations
    empty_pass_ms: float  # a pass with all costs zero
    critical_passes: int  # passes on the predicted critical path

    @property
    def net_ms(self) -> float:
        """The median iteration less its empty passes: 1000 ms with 94 passes of 0.5 ms are 953 ms."""
        return median(self.measured_ms) - self.critical_passes * self.empty_pass_ms

    @property
    def error(self) -> float:
        """How much longer ``net_ms`` is than predicted, as a share of the prediction."""
        return self.net_ms / self.predicted_ms - 1.0


def emulate(plans: dict[str, Plan], scale: float, iterations: int) -> list[Emulation]:
    """Run plans for the same number of ranks, one after the other, on a process a rank.

    Args:
        plans: by the name to show.
        scale: the time that passes for one millisecond of the plans' costs, in milliseconds.
        iterations: of each plan; the median counts.

    Raises:
        ValueError: if the plans take longer than a day.
        ProcessFailed: if a process fails.
    """
    predictions = {name: simulate(plan) for name, plan in plans.items()}
    (world_size,) = {plan.schedule.p for plan in plans.values()}
    lengths_s = {name: each.iteration_ms * scale / 1e3 for name, each in predictions.items()}
    total_s = iterations * sum(lengths_s.values())
    if total_s > _LONGEST_S:
        raise ValueError(
            f"scale {scale:g} and {iterations} iterations: the schedules take {total_s:,.0f} s, more than a "
            "day; give a smaller scale, or fewer iterations"
        )
    _say(f"emulating on {world_size} processes: their schedules take {total_s:.0f} s")
    timeout = timedelta(seconds=_PATIENCE_S + _PATIENCE * max(lengths_s.values()))
    by_rank = run(_run_rank, plans, scale, iterations, timeout, ranks=world_size)
    emulations = []
    for number, (name, prediction) in enumerate(predictions.items()):
        empty, *measured = [
            _Iteration.of(each) for each in zip(*(rank[number] for rank in by_rank), strict=True)
        ]
        emulations.append(
            Emulation(
                name=name,
                predicted_ms=prediction.iteration_ms,
                predicted_idle=mean(prediction.bubble),
                measured_ms=tuple(each.length_ms / scale for each in measured),
                measured_idle=mean(each.idle for each in measured),
                empty_pass_ms=empty.pass_ms / scale,
                critical_passes=sum(not isinstance(step.item, Comm) for step in prediction.critical_path),
            )
        )
    return emulations


def record(emulations: Sequence[Emulation], **settings: Any) -> dict[str, Any]:
    """Emulations and their settings as JSON: ``pp``, ``microbatches``, ``scale``, the cost table's name …"""
    rows = [{**asdict(each), "net_ms": each.net_ms, "error": each.error} for each in emulations]
    return {**settings, "schedules": rows}


@dataclass(frozen=True)
class _Iteration:
    """Length, mean idle share and median pass of one iteration."""

    length_ms: float
    idle: float
    pass_ms: float

    @staticmethod
    def of(ranks: Sequence[Sequence[Span]]) -> _Iteration:
        """From the first start to the last end on any rank: the ranks share the machine's clock."""
        everything = [span for spans in ranks for span in spans]
        length_ms = 1e3 * (max(span.end_s for span in everything) - min(span.start_s for span in everything))
        passes = [took for spans in ranks for took in pass_ms(spans)]
        return _Iteration(length_ms, 1.0 - sum(passes) / len(ranks) / length_ms, median(passes))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run_rank(
    plans: Mapping[str, Plan], scale: float, iterations: int, timeout: timedelta
) -> list[list[list[Span]]]:
    """For each plan, this rank's spans with all costs zero, then those of each iteration."""
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    groups = create_groups((0, rank, 0), dist.get_world_size(), 1, timeout)
    warm_up(groups, torch.device("cpu"))
    emulated = EmulatedRank(groups)
    runs = []
    for number, (name, plan) in enumerate(plans.items(), 1):
        if rank == 0:
            _say(f"[{number}/{len(plans)}] {name}")
        times = PassTimes.of(plan.costs, plan.schedule)
        empty, slowed = times.scaled(0.0, 0.0), times.scaled(scale, scale)
        runs.append([emulated.run(plan, each) for each in (empty, *[slowed] * iterations)])
    dist.barrier()  # a rank that leaves early closes connections that others still use
    return runs
