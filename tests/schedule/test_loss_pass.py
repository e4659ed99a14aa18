"""Schedules for any loss: L, CG and TW in every family, what they cost, and what they hold."""

from __future__ import annotations

import json

import pytest

from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.draw import draw_text
from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.play.hang import find_hangs
from megatron_vocabpar.schedule.play.memory import SOFTMAX_SHARDS
from megatron_vocabpar.schedule.play.numbering import Numbering
from megatron_vocabpar.schedule.serialize import plan_from_json, plan_to_json, to_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS, Method
from megatron_vocabpar.schedule.words.passes import CommType, PassType
from tests.cases import covering, rest_is_slow
from tests.schedule import reference
from tests.support.claims import PAPERS, claimed

NAMES = ("naive", "vocab-1", "vocab-2")
MS = {
    "F": 10.0,
    "B": 20.0,
    "W": 9.0,
    "S": 5.0,
    "S2": 0.5,
    "T": 2.5,
    "IF": 0.5,
    "IB": 0.5,
    "L": 0.1,
    "TW": 2.0,
}


def test_what_waits_for_the_loss() -> None:
    """The weight gradient and B alone: the loss function is no barrier."""
    told = {name: (METHODS[name].barriers, METHODS[name].weight_pass.value) for name in NAMES}
    assert told == {"naive": (3, "TW"), "vocab-1": (2, "TW"), "vocab-2": (1, "T")}
    vocab_1, vocab_2 = METHODS["vocab-1"].waits_for, METHODS["vocab-2"].waits_for
    assert vocab_1[PassType.T] == vocab_1[PassType.L] == vocab_2[PassType.L] == (CommType.C1,)
    assert vocab_1[PassType.TW] == vocab_2[PassType.T] == (CommType.C1, CommType.CG)
    assert set(vocab_1[PassType.B]) == {CommType.C2, CommType.CG}
    assert METHODS["interlaced"].weight_pass is PassType.S


@covering(("method", NAMES), ("family", families()), ("p", [1, 2, 3]))
def test_keeps_every_rule_by_an_independent_reading(family: str, method: str, p: int) -> None:
    """Only the rank of the loss function runs L; in V shapes that is not the rank of the last stage."""
    for m in {1, 2 * p + 1}:
        plan = make_plan(method, p, m, family=family)
        data = json.loads(to_json(plan.schedule))
        rows = reference.keys_of(data)
        wanted = reference.wanted(data, plan.schedule.splits_w)
        assert list(map(sorted, rows)) == list(map(sorted, wanted))
        assert reference.starts(data, MS, comm=0.3) is not None, "deadlock"
        validate(plan.schedule, claimed(family, method, p))
        assert not any(find_hangs(plan.schedule, plan.program).values())
        launched = [item for row in plan.forward_only.program for item in row if item.type is CommType.CG]
        assert not launched, "an evaluation has no gradients"


@pytest.mark.parametrize(
    ("method", "p"), rest_is_slow([(m, p) for m in ("vocab-1", "vocab-2") for p in (8, 16)], ("vocab-2", 8))
)
def test_the_loss_function_in_between_costs_nothing(method: str, p: int) -> None:
    """8p microbatches, vocabulary 256k; the time of L is on neither side."""
    before, ours = (
        simulate(make_plan(kind, p, 8 * p, costs=PassCosts.paper(p))) for kind in (PAPERS[method], method)
    )
    print(method, p, f"{ours.iteration_ms / before.iteration_ms - 1:+.4%}")
    assert ours.iteration_ms <= before.iteration_ms * 1.001
    assert max(ours.peak_activations) <= max(before.peak_activations)
    assert max(ours.peak(SOFTMAX_SHARDS)) <= 4


def test_softmax_shards_are_counted_until_the_weight_gradient() -> None:
    simulation = simulate(make_plan("vocab-1", 2, 4))
    spans = simulation.passes
    starts = {(p.stage, p.microbatch): s for p, (s, _) in spans.items() if p.type is PassType.S}
    ends = {(p.stage, p.microbatch): e for p, (_, e) in spans.items() if p.type is PassType.TW}
    expected = {rank: sorted((starts[rank, mb], ends[rank, mb]) for mb in range(4)) for rank in range(2)}
    assert {rank: sorted(simulation.alive[rank]["softmax_shards"]) for rank in range(2)} == expected


def test_times_of_the_halves() -> None:
    """T and TW share the time that the paper measured of both; or a cost file has both."""

    def times(method: str | Method, **given: float) -> tuple[float, ...]:
        costs = PassCosts(10.0, 11.0, 9.0, methods={"vocab-1": {"S_ms": 2.0, **given}})
        read = PassTimes.of(costs, generate(method, 2, 1)).passes
        return tuple(read[type_][0] for type_ in (PassType.T, PassType.TW, PassType.L))

    assert times("vocab-1", T_ms=6.0) == (3.0, 3.0, 0.0)
    assert times("vocab-1", T_ms=2.0, TW_ms=5.0, L_ms=0.5) == (2.0, 5.0, 0.5)
    assert times(PAPERS["vocab-1"], T_ms=6.0)[:2] == (6.0, 0.0)
    assert times(PAPERS["vocab-1"], T_ms=2.0, TW_ms=5.0)[:2] == (7.0, 0.0)


@pytest.mark.parametrize(("method", "family"), [("vocab-2", "1f1b"), ("baseline", "v-half")])
def test_there_and_back_and_drawn(method: str, family: str) -> None:
    plan = make_plan(method, 3, 4, family=family)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "loss function" in draw_text(simulate(plan))


@covering(("family", [name for name, kind in families().items() if kind.shape == "vshape"]), ("p", [2, 3]))
def test_a_whole_layer_sends_its_losses_to_the_loss_function(family: str, p: int) -> None:
    """In a V the last stage is on rank 0, the loss function on the last."""
    plan = make_plan("baseline", p, 2 * p + 1, family=family)
    row, first = ([str(item) for item in plan.program[rank]] for rank in (p - 1, 0))
    for at_rank, words in (
        (row, (f"{p - 1}C0.0", f"{p - 1}L0", f"{p - 1}CG0")),
        (first, (f"{2 * p - 1}F0", "0C0.0", "0CG0", f"{2 * p - 1}B0")),
    ):
        places = list(map(at_rank.index, words))
        assert places == sorted(places)
    assert not any(find_hangs(plan.schedule, plan.program).values())
    validate(plan.schedule)
    evaluation = [str(item) for item in plan.forward_only.program[p - 1]]
    assert f"{p - 1}L0" in evaluation
    assert f"{p - 1}CG0" not in evaluation


@pytest.mark.parametrize("family", ["1f1b", "v-half"])
def test_only_the_rank_of_the_loss_has_something_to_send(family: str) -> None:
    numbering = Numbering(generate("vocab-2", 3, 1, family=family))
    producers = [numbering.producers(node) for node in numbering.nodes_of(CommType.CG)]
    assert [list(map(numbering.type_of, row)) for row in producers] == [[], [], [PassType.L]]
