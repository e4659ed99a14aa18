"""How long collectives are resident, against a walk along the program that adds up elementary intervals."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import pairwise

import pytest

from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.residence import busy_share, resident, resident_beside_layers, shared
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.words.passes import COLLECTIVES, CommType, Pass

QUEUES = [COLLECTIVES, {CommType.RECV_F}, {CommType.RECV_B}]


def walked(plan: Plan, result: Simulation, rank: int, types: Collection[CommType], *, beside: str) -> float:
    """Kernels on average while a pass whose type is in ``beside`` runs."""
    now, queued, held = 0.0, 0.0, []
    for item in plan.program[rank]:
        if isinstance(item, Pass):
            now = result.passes[item][1]
            continue
        if item.type in types:
            held.append((max(now, queued), result.comms[item][1]))
            queued = result.comms[item][1]
    passes = [span for item, span in result.passes.items() if plan.schedule.rank_of(item) == rank]
    during = [
        span
        for item, span in result.passes.items()
        if plan.schedule.rank_of(item) == rank and item.type.value in beside
    ]
    moments = sorted({0.0, *(moment for span in [*held, *passes] for moment in span)})
    kernels = length = 0.0
    for start, end in pairwise(moments):
        if any(a <= start and end <= b for a, b in during):
            length += end - start
            kernels += (end - start) * sum(a <= start and end <= b for a, b in held)
    return kernels / length


_plan = cache(lambda method, family: make_plan(method, 4, 8, family=family))


@pytest.mark.parametrize(("method", "family"), [("vocab-1", "1f1b"), ("vocab-2", "v-half")])
@pytest.mark.parametrize("types", QUEUES)
def test_kernels_are_resident_from_their_launch_to_their_end(
    method: str, family: str, types: Collection[CommType]
) -> None:
    plan = _plan(method, family)
    result = simulate(plan)
    beside = resident_beside_layers(result.events, types)
    assert beside == pytest.approx([walked(plan, result, rank, types, beside="FBW") for rank in range(4)])
    assert max(beside) > 0.0


def test_the_share_of_the_iteration_counts_idle_time() -> None:
    """One collective of each kind, each 1 ms after the last rank's pass: no rank's kernel lasts longer."""
    plan = make_plan("vocab-2", 4, 8)
    result = simulate(plan)
    busy, whole = busy_share(result.events), [(0.0, result.iteration_ms)]
    assert busy == pytest.approx([1.0 - bubble for bubble in result.bubble])
    transferred = sum(end - start for item, (start, end) in result.comms.items() if item.type in COLLECTIVES)
    assert all(
        shared(resident(result.events, rank), whole) > transferred / 4 / result.iteration_ms
        for rank in range(4)
    )


def test_a_method_without_collectives_has_none() -> None:
    events = simulate(make_plan("baseline", 4, 8)).events
    assert [resident(events, rank) for rank in range(4)] == [[]] * 4
