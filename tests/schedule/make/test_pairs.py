"""The families with pairs: what they reach, what they hold, and what they are with nothing to hide."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean

import pytest

from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.bounds import least_ms
from megatron_vocabpar.schedule.make.families import SEARCH, claimed_peak, families, family_named, family_of
from megatron_vocabpar.schedule.make.generate import generate, make_plan, schedule_for
from megatron_vocabpar.schedule.make.pair_candidates import pair_candidates
from megatron_vocabpar.schedule.make.pair_scheduling import arrange_in_pairs
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.make.rules import Rules
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import to_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import CommType, PassType
from tests.cases import covering, rest_is_slow
from tests.schedule import reference
from tests.support.claims import PAPERS

PAIRED = [name for name, family in families().items() if family.pairs]
ALONE = {"dualpipev": "v-zb", "1f1b-overlap": "interleaved"}


def exchanging(p: int, share: float) -> PassCosts:
    """The paper's times, with an exchange that makes F and B longer by ``share`` and that pairs hide."""
    costs = PassCosts.paper(p)
    assert isinstance(costs.F_ms, float)
    assert isinstance(costs.B_ms, float)
    longer = replace(costs, F_ms=costs.F_ms * (1 + share), B_ms=costs.B_ms * (1 + share))
    return replace(longer, hidden_ms=share * (costs.F_ms + costs.B_ms))


def over_the_ideal(plan: Plan, share: float) -> float:
    """The iteration's time over that of vocab-2's work without exchange and idle time."""
    costs, m = PassCosts.paper(plan.schedule.p), plan.schedule.m
    output = costs.methods["vocab-2"]
    parts = (costs.F_ms, costs.B_ms, costs.W_ms, costs.IF_ms, costs.IB_ms, output["S_ms"], output["T_ms"])
    return simulate(plan).iteration_ms / m / sum(ms for ms in parts if isinstance(ms, float))


@pytest.mark.parametrize(
    ("family", "p", "above", "share", "most"),
    [
        *rest_is_slow(
            [
                ("dualpipev", 8, 2, 0.2, 1.066),
                ("dualpipev", 8, 2, 0.4, 1.1),
                ("dualpipev", 8, 1, 0.2, 1.066),
                ("dualpipev", 8, 1, 0.4, 1.103),
                ("dualpipev", 8, 0, 0.2, 1.083),
                ("dualpipev", 8, 0, 0.4, 1.128),
                ("1f1b-overlap", 8, None, 0.2, 1.133),
                ("1f1b-overlap", 8, None, 0.4, 1.162),
                ("dualpipev", 16, 2, 0.2, 1.079),
                ("dualpipev", 16, 2, 0.4, 1.124),
            ]
        ),
        *(
            pytest.param("dualpipev", 32, 2, share, most, marks=pytest.mark.long)
            for share, most in ((0.2, 1.1), (0.4, 1.145))
        ),
    ],
)
def test_what_pairs_reach(family: str, p: int, above: int | None, share: float, most: float) -> None:
    """256k ids, 4p microbatches, vocab-2; ``above``: the cap less p. Simulated, with queues."""
    cap = None if above is None else p + above
    plan = make_plan("vocab-2", p, 4 * p, family=family, costs=exchanging(p, share), max_activations=cap)
    held = reference.peak_activations(json.loads(to_json(plan.schedule)))
    assert held <= (cap or claimed_peak(METHODS["vocab-2"], p, family_named(family), 2))
    assert over_the_ideal(plan, share) <= most
    assert simulate(plan).iteration_ms >= least_ms(plan)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vocab-2", "vocab-1"])
@pytest.mark.parametrize("p", [8, 16])
@pytest.mark.parametrize("share", [0.2, 0.4])
@pytest.mark.parametrize(
    ("family", "above"), [*(("dualpipev", above) for above in (2, 1, 0)), ("1f1b-overlap", None)]
)
def test_the_loss_function_in_between_costs_little(
    family: str, above: int | None, share: float, p: int, method: str
) -> None:
    """Against the paper's chain, under the same cap; 4p microbatches, and L takes no time."""
    cap = None if above is None else p + above
    before, ours = (
        simulate(make_plan(kind, p, 4 * p, family=family, costs=exchanging(p, share), max_activations=cap))
        for kind in (PAPERS[method], method)
    )
    print(method, family, p, cap, share, f"{ours.iteration_ms / before.iteration_ms - 1:+.4%}")
    assert ours.iteration_ms <= before.iteration_ms * 1.007


def test_a_pair_waits_for_the_loss_function() -> None:
    """The best way to play, and the same if L were eager: it runs long after C1 has brought the losses."""
    request = PlanRequest(method="vocab-2", p=8, m=32, family="dualpipev", costs=exchanging(8, 0.4))
    problem = Problem.of(request)
    graph = problem.graph
    best = next(pair_candidates(problem.shape, graph, problem.times, problem.family, problem.cap))
    (loss,), brings = graph.of_type(PassType.L), graph.numbering.first_node[CommType.C1]
    assert loss not in best.rules.eager
    eager = replace(best.rules, eager=(*best.rules.eager, loss))

    def waits_ms(rules: Rules) -> float:
        ends = arrange_in_pairs(graph, 32, best.block, rules).ends
        return mean(ends[loss * 32 + mb] - ends[brings * 32 + mb] for mb in range(32))

    assert waits_ms(best.rules) < 0.5 * waits_ms(eager)


@covering(("family", PAIRED), ("method", METHODS), ("p", [1, 2, 4]))
def test_every_method_keeps_the_rules_and_its_claim(family: str, method: str, p: int) -> None:
    costs = replace(PassCosts.default(p), hidden_ms=4.0)
    for m in {1, 2 * p + 1}:
        plan = make_plan(method, p, m, family=family, costs=costs)
        validate(plan.schedule, claimed_peak(METHODS[method], p, family_named(family), 2))
        data = json.loads(to_json(plan.schedule))
        kinds = [set(keys) for keys in reference.wanted(data, family == "dualpipev")]
        assert [set(row) for row in reference.keys_of(data)] == kinds
        # In so few microbatches these two gain nothing from pairs.
        assert plan.schedule.pairs or m <= p or method in ("interlaced", "naive")
        assert m > 1 or not plan.schedule.pairs
        assert simulate(plan).iteration_ms >= least_ms(plan) - 1e-6
        if plan.schedule.pairs:
            assert family_of(plan.schedule) == family


@pytest.mark.parametrize("family", PAIRED)
def test_with_nothing_to_hide_they_are_the_families_without_pairs(family: str) -> None:
    made = generate("vocab-2", 3, 5, family=family, max_activations=4)
    assert not made.pairs
    assert made == generate("vocab-2", 3, 5, family=ALONE[family], max_activations=4)


@pytest.mark.parametrize("family", PAIRED)
def test_little_to_hide_is_no_loss(family: str) -> None:
    costs = replace(PassCosts.default(3), hidden_ms=0.05)
    paired, alone = (
        simulate(make_plan("vocab-2", 3, 9, family=name, costs=costs, max_activations=4)).iteration_ms
        for name in (family, ALONE[family])
    )
    assert paired <= 1.01 * alone


def test_pairs_of_some_ranks_alone() -> None:
    """A rank without an exchange gains nothing by a pair; the others do."""
    costs = replace(PassCosts.default(3), hidden_ms=(6.0, 0.0, 6.0))
    plan = make_plan("vocab-2", 3, 9, family="dualpipev", costs=costs)
    assert (
        simulate(plan).iteration_ms
        < 0.99
        * simulate(make_plan("vocab-2", 3, 9, family="v-zb", costs=costs, max_activations=5)).iteration_ms
    )


def test_a_search_tries_pairs_where_there_is_something_to_hide() -> None:
    said: list[str] = []
    costs = replace(PassCosts.default(2), hidden_ms=6.0)
    request = PlanRequest(
        method="vocab-2", p=2, m=5, family=SEARCH, max_activations=3, among=["v-zb", "dualpipev"]
    )
    found = schedule_for(replace(request, costs=costs), said.append)
    assert found.pairs
    alone = generate("vocab-2", 2, 5, family="dualpipev", costs=costs, max_activations=3)
    assert simulate(Plan.of(found, costs)).iteration_ms <= simulate(Plan.of(alone, costs)).iteration_ms
    assert any("dualpipev" in line for line in said)
    said.clear()
    assert not schedule_for(request, said.append).pairs
    assert not any("dualpipev" in line for line in said)
    only, without = (replace(request, among=[family]) for family in ("dualpipev", "v-zb"))
    assert schedule_for(only) == schedule_for(without)
