"""Schedules beside proven optima, on small problems drawn from a seed: ``python -m lab optima --seed N``.

A problem is drawn anew: ranks, microbatches, a family, a method, the cap, costs, heads of multi-token
prediction, and layers of each stage by hand. CP-SAT of OR-Tools looks for its least time: passes are
intervals that do not overlap on a rank, the graph of ``schedule/make/pass_graph.py`` gives what each waits
for and how long, and activations are a cumulative resource. Problems that it does not prove within the limit
are left out. Communication does not queue, in the proven problem or in ours, and any number of T and IB may
wait in the proven one, so a schedule under our caps may have a smaller excess than is printed. Methods whose
passes start together on all ranks, pairs of F and B, and `baseline` in 1F1B, whose order is Megatron's own,
are not drawn.

Needs OR-Tools: ``pip install ortools``.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.make.generate import schedule_for
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.play.events import run_passes
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import BASELINE, NAIVE, VOCAB_1, VOCAB_2
from megatron_vocabpar.schedule.words.passes import PassType

_METHODS = (BASELINE, NAIVE, VOCAB_1, VOCAB_2)
_MICRO = 1000  # whole microseconds of a ms


@dataclass(frozen=True)
class Proven:
    """A problem with the time of our schedule and its least time, in ms."""

    request: PlanRequest
    made_ms: float
    least_ms: float

    @property
    def excess(self) -> float:
        """Relative."""
        return self.made_ms / self.least_ms - 1.0

    @property
    def name(self) -> str:
        request = self.request
        costs = request.costs
        assert costs is not None
        cap = "" if request.max_activations is None else f", cap {request.max_activations:g}"
        heads = f", {costs.mtp_depths} heads" if costs.mtp_depths else ""
        layers = f", layers {'/'.join(map(str, costs.layers_per_stage))}" if costs.layers_per_stage else ""
        family = getattr(request.family, "name", request.family)
        return f"{family} {request.method}, p {request.p}, m {request.m}{cap}{heads}{layers}"


def drawn(seed: int) -> Iterator[PlanRequest]:
    """Problems without end: the same for the same seed."""
    chance = random.Random(seed)
    single = [name for name, family in families().items() if not family.pairs]
    while True:
        name = chance.choice(single)
        family, p, m = families()[name], chance.randint(2, 4), chance.randint(2, 5)
        method = chance.choice([of for of in _METHODS if (name, of) != ("1f1b", BASELINE)])
        heads = chance.choice((0, 0, 1))
        costs = replace(
            PassCosts.default(p, heads),
            F_ms=chance.uniform(5, 20), B_ms=chance.uniform(5, 20),
            W_ms=chance.choice((0, 1)) * chance.uniform(3, 15), p2p_ms=chance.choice((0.0, 0.3, 3.0)),
            last_rank_extra={key: chance.uniform(0, 6) for key in ("F_ms", "B_ms", "W_ms")},
        )  # fmt: skip
        if chance.random() < 0.4:
            stages = p * family.chunks
            costs = replace(costs, layers_per_stage=tuple(chance.randint(1, 3) for _ in range(stages)))
        most = float(chance.randint(1, p)) if chance.random() < 0.4 else None
        yield PlanRequest(method=method, p=p, m=m, family=family, costs=costs, max_activations=most)


def proven(request: PlanRequest, seconds: float) -> Proven | None:
    """The problem with its least time; None if it is not valid, or not proven within ``seconds``."""
    try:
        problem, schedule = Problem.of(request), schedule_for(request)
    except ValueError:
        return None
    made_ms = max(run_passes(schedule, problem.times).ends)
    least_ms = least(problem, seconds)
    return None if least_ms is None else Proven(request, made_ms, least_ms)


def least(problem: Problem, seconds: float) -> float | None:
    """The least ms of any order of passes, by CP-SAT; None unless it is proven within ``seconds``."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ValueError("proven optima need OR-Tools: pip install ortools") from error

    graph, m, cap = problem.graph, problem.shape.m, problem.cap
    model = cp_model.CpModel()
    horizon = m * sum(map(_whole, graph.duration.values())) + m * _whole(
        sum(need.latency for needs in graph.needs.values() for need in needs)
    )
    ends: dict[tuple[int, int], Any] = {}
    starts: dict[tuple[int, int], Any] = {}
    of_rank: dict[int, list[Any]] = defaultdict(list)
    for node, duration in graph.duration.items():
        for k in range(m):
            starts[node, k] = model.new_int_var(0, horizon, "")
            ends[node, k] = starts[node, k] + _whole(duration)
            interval = model.new_fixed_size_interval_var(starts[node, k], _whole(duration), "")
            of_rank[graph.rank[node]].append(interval)
            if k:
                model.add(starts[node, k] >= ends[node, k - 1])
    producers: dict[int, list[int]] = defaultdict(list)
    for node, groups in graph.feeds.items():
        for group in groups:
            producers[group].append(node)
    for node, needs in graph.needs.items():
        for need in needs:
            for source in producers.get(need.node, [need.node]):
                for k in range(need.back, m):
                    model.add(starts[node, k] >= ends[source, k - need.back] + _whole(need.latency))
    release = graph.of_type(PassType.W) or graph.of_type(PassType.B)
    for rank, intervals in of_rank.items():
        model.add_no_overlap(intervals)
        held, weights = [], []
        for stage in problem.shape.placement.stages_of(rank):
            for k in range(m):
                start, end = starts[graph.of_type(PassType.F)[stage], k], ends[release[stage], k]
                length = model.new_int_var(0, horizon, "")
                held.append(model.new_interval_var(start, length, end, ""))
                weights.append(cap.weights[stage])
        model.add_cumulative(held, weights, cap.room(rank, m))
    last = model.new_int_var(0, horizon, "")
    for end in ends.values():
        model.add(last >= end)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return solver.objective_value / _MICRO if status == cp_model.OPTIMAL else None


def _whole(ms: float) -> int:
    """Whole microseconds, rounded down, so that no proven time is too long."""
    return int(ms * _MICRO + 1e-6)


def lines(seed: int, count: int, seconds: float) -> Iterator[str]:
    """The problems that were proven of ``count``, each with its times, and the mean and the worst excess."""
    requests = drawn(seed)
    found = []
    for _ in range(count):
        one = proven(next(requests), seconds)
        if one is not None:
            found.append(one)
            yield f"{one.name}: {one.made_ms:.2f} ms, least {one.least_ms:.2f}, {100 * one.excess:+.2f} %"
    if not found:
        yield f"Seed {seed}: none of {count} was proven; give more --seconds."
        return
    worst, mean = max(found, key=lambda one: one.excess), fmean(one.excess for one in found)
    yield (
        f"Seed {seed}: {len(found)} of {count} proven; schedules are {100 * mean:.2f} % above the least time "
        f"on average, at worst {100 * worst.excess:.1f} % ({worst.name})."
    )
