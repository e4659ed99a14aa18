"""Stages of unequal length, in families with several chunks."""

from dataclasses import replace

import pytest

from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule
from tests.cases import covering

LAYERS = (3, 2, 2, 3, 2, 2, 2, 1)  # of 4 ranks in a V: rank 0 holds the first and the last stage
COSTS = replace(PassCosts.default(4), layers_per_stage=LAYERS, hidden_ms=6.0)
FAMILIES = ("interleaved", "v-half", "v-min", "v-zb", "dualpipev", "1f1b-overlap")


def held_layers(schedule: Schedule, rank: int) -> int:
    """The most layers whose activations a rank holds, counted pass by pass."""
    release = PassType.W if schedule.splits_w else PassType.B
    held, most = [], 0
    for pass_ in schedule.ranks[rank]:
        if pass_.type is PassType.F:
            held += [(pass_.stage, pass_.microbatch)] * LAYERS[pass_.stage]
        elif pass_.type is release:
            held = [one for one in held if one != (pass_.stage, pass_.microbatch)]
        most = max(most, len(held))
    return most


@covering(("family", FAMILIES), ("method", ["baseline", "vocab-2"]))
def test_a_given_cap_weighs_chunks_by_their_layers(family: str, method: str) -> None:
    """The baseline's last stage also has the whole output layer."""
    plan = make_plan(method, 4, 8, family=family, costs=COSTS, max_activations=4)
    validate(plan.schedule)
    for rank in range(4):
        layers = [LAYERS[stage] for stage in plan.schedule.placement.stages_of(rank)]
        assert held_layers(plan.schedule, rank) <= 4 * sum(layers)
    problem = Problem.of(PlanRequest(method=method, p=4, m=8, family=family, costs=COSTS, max_activations=4))
    assert problem.bound_ms() <= simulate(plan).iteration_ms


def test_stages_take_as_long_as_their_layers() -> None:
    """An even stage has 17/8 layers, and takes half of a rank's 10 ms."""
    plan = make_plan("vocab-2", 4, 4, family="dualpipev", costs=COSTS)
    times = PassTimes.of(COSTS, plan.schedule)
    assert times.passes[PassType.F] == pytest.approx([count * 5 * 8 / 17 for count in LAYERS])
    assert {pair for pair in times.hidden if pair[0] == 0} == {(0, 0), (0, 7)}
    assert times.hidden[0, 7] == times.hidden[7, 0] == pytest.approx(3 * 8 / 17)  # one layer with one
    assert times.hidden[0, 0] == pytest.approx(3 * 3 * 8 / 17)


def test_times_of_each_stage_take_the_place_of_all_others() -> None:
    frame = make_plan("baseline", 2, 4, family="v-zb").schedule
    row = dict.fromkeys(("F_ms", "B_ms", "W_ms"), (4.0, 3.0, 2.0, 7.0))
    costs = replace(PassCosts.default(2, 1), stage_ms=row, hidden_ms=1.0, last_rank_extra={"F_ms": 5.0})
    times = PassTimes.of(costs, frame)
    assert times.passes[PassType.W] == (4.0, 3.0, 2.0, 7.0)
    assert times.passes[PassType.F] == (4.0, 3.0, 2.0, 12.0)  # with the whole output layer
    assert not times.hidden
    assert not costs.hides
    assert PassCosts.from_dict(costs.to_dict()) == costs
    with pytest.raises(ValueError, match="stage_ms lists 4 F_ms, but there are 2 stages"):
        make_plan("baseline", 2, 4, costs=costs)
