"""Costs from measured spans: a simulated iteration gives back the times that it was simulated with."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_vocabpar.runtime.pass_times import IterationTimes, RankTimes, pass_costs
from megatron_vocabpar.runtime.timeline import COLLECTIVES, COMPUTE, WAIT, Span
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import (
    CommType,
    Instruction,
    Pass,
    parts_of,
)

P = 3
COSTS = PassCosts(
    F_ms=(8.0, 10.0, 6.0),
    B_ms=(11.0, 13.0, 9.0),
    W_ms=(9.0, 7.0, 5.0),
    IF_ms=(0.5, 0.25, 0.75),
    IB_ms=(1.0, 0.5, 0.25),
    methods={
        "vocab-2": {"S_ms": (3.0, 4.0, 5.0), "T_ms": (2.0, 1.0, 3.0)},
        "vocab-1": {"S_ms": (2.0, 2.5, 3.0), "T_ms": (4.0, 3.0, 5.0)},
    },
    p2p_ms=0.5,
    broadcast_ms=0.25,
    all_reduce_ms=0.75,
)
TRANSFERS = {CommType.SEND_F, CommType.RECV_F, CommType.SEND_B, CommType.RECV_B}


def spans_of(simulation: Simulation, rank: int) -> list[Span]:
    """What a timeline of this rank would hold."""
    schedule = simulation.schedule
    spans = []
    times: dict[Instruction, tuple[float, float]] = {**simulation.comms}
    for item in (item for row in schedule.rows for item in row):
        first, *_ = parts_of(item)
        assert isinstance(first, Pass)
        times[item] = simulation.passes[first]
    for item, (start, end) in times.items():
        if schedule.rank_of(item) == rank and item.type not in TRANSFERS:
            lane = COLLECTIVES if isinstance(item.type, CommType) else COMPUTE
            spans.append(Span(str(item), item.type.value, lane, start / 1e3, end / 1e3))
    return spans


def measured(plan: Plan) -> list[list[RankTimes]]:
    """Three iterations of two ranks a stage; the last has an outlier in every fourth pass, and waits."""
    simulation = simulate(plan)
    stages = []
    for rank in range(plan.schedule.p):
        spans = spans_of(simulation, rank)
        slow = [
            Span(s.name, s.kind, s.lane, s.start_s, s.end_s + (1.0 if i % 4 == 0 else 0.0))
            for i, s in enumerate(spans)
        ]
        slow += [Span(s.name, WAIT, COMPUTE, s.start_s, s.end_s) for s in spans]
        times = RankTimes.of([spans, spans, slow], 0.5 if rank < plan.schedule.p - 1 else None)
        stages.append([times, times])
    return stages


@pytest.mark.parametrize(
    ("method", "family", "chunks"),
    [
        ("vocab-2", "1f1b", 1),
        ("vocab-1", "zb-h1", 1),
        ("vocab-2", "interleaved", 2),
        ("vocab-1", "v-half", 2),
    ],
)
def test_costs_of_a_simulated_iteration_are_its_own(method: str, family: str, chunks: int) -> None:
    plan = make_plan(method, P, 6, family=family, chunks=chunks, costs=COSTS)
    costs = pass_costs(measured(plan), plan.schedule)
    found, given = (PassTimes.of(each, plan.schedule) for each in (costs, COSTS))
    for type_, times in given.passes.items():
        assert found.passes[type_] == pytest.approx(times), type_
    for kind, time in given.comms.items():
        assert found.comms[kind] <= time + 1e-9, kind
    assert costs.p2p_ms == 0.5
    assert PassCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize("family", ["dualpipev", "1f1b-overlap"])
def test_what_pairs_hide_is_measured(family: str) -> None:
    """F + B - FB of each rank, although some passes ran in pairs alone."""
    hiding = replace(COSTS, hidden_ms=(4.0, 6.0, 5.0))
    plan = make_plan("vocab-2", P, 8, family=family, costs=hiding)
    costs = pass_costs(measured(plan), plan.schedule)
    found, given = (PassTimes.of(each, plan.schedule) for each in (costs, hiding))
    assert plan.schedule.pairs
    assert found.hidden == pytest.approx(given.hidden)
    for type_, times in given.passes.items():
        assert found.passes[type_] == pytest.approx(times), type_
    assert not costs_of_pairs_that_are_slow(plan).hides


def costs_of_pairs_that_are_slow(plan: Plan) -> PassCosts:
    """Pairs that take longer than their passes one after the other hide nothing."""
    stages = []
    for rank in range(plan.schedule.p):
        spans = [
            replace(span, end_s=span.end_s + 0.02) if "+" in span.name else span
            for span in spans_of(simulate(plan), rank)
        ]
        stages.append([RankTimes.of([spans])])
    return pass_costs(stages, plan.schedule)


def test_the_whole_output_layer_is_all_shards_together() -> None:
    plan = make_plan("vocab-2", P, 6, costs=COSTS)
    costs = pass_costs(measured(plan), plan.schedule)
    assert sum(costs.last_rank_extra.values()) == pytest.approx(3 + 4 + 5 + 2 + 1 + 3)
    assert costs.first_rank_extra == {"B_ms": pytest.approx(1.75)}
    simulate(make_plan("baseline", P, 6, costs=costs))


def test_what_a_synchronous_pass_waits_for_is_told_apart() -> None:
    spans = [
        Span("0F0", "F", COMPUTE, 0.0, 0.010),
        Span("0B0", "B", COMPUTE, 0.020, 0.040),
        Span("0S0", "S", COMPUTE, 0.010, 0.012),
        Span("0S0", WAIT, COMPUTE, 0.012, 0.015),
        Span("0S0", "S", COLLECTIVES, 0.0125, 0.0145),
        Span("0S0", "S", COMPUTE, 0.015, 0.016),
    ]
    times = RankTimes.of([spans])
    costs = pass_costs([[times]], make_plan("interlaced", 1, 1).schedule)
    found = costs.methods["interlaced"]
    assert found["S_ms"] == pytest.approx((3.0,))
    assert (found["T_ms"], found["synchronous_ms"]) == pytest.approx((0.0, 2.0))
    assert costs.p2p_ms == 0.0


def test_idle_time_and_imbalance() -> None:
    ranks = [RankTimes({}, {}, 100.0, 90.0), RankTimes({}, {}, 98.0, 60.0)]
    times = IterationTimes.of(ranks)
    assert times.iteration_ms == 100.0
    assert times.idle == pytest.approx(0.25)
    assert times.imbalance == pytest.approx(0.2)
