"""Chains: what follows from them, what is no chain, and a method of one's own from schedule to picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vocabpar.schedule.draw import draw_text
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.play.hang import find_hangs
from megatron_vocabpar.schedule.serialize import plan_from_json, plan_to_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS, Method, placed, without_gradients
from megatron_vocabpar.schedule.words.passes import CommType, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from tests.cases import rest_is_slow


@pytest.mark.parametrize(
    ("name", "barriers", "passes", "collectives"),
    [
        ("baseline", 0, "", ""),
        ("redis", 0, "", ""),
        ("naive", 3, "S S2 T L TW", "C0 C1 C2 C3 CG"),
        ("vocab-1", 2, "S T L TW", "C0 C1 C2 CG"),
        ("vocab-2", 1, "S L T", "C0 C1 CG"),
        ("interlaced", 0, "S", "C0"),
    ],
)
def test_what_follows_from_a_chain(name: str, barriers: int, passes: str, collectives: str) -> None:
    method = METHODS[name]
    assert method.barriers == barriers
    assert [type_.value for type_ in method.passes] == passes.split()
    assert [type_.value for type_ in method.collectives] == collectives.split()
    assert method.vocabulary_parallel == bool(passes)


def test_what_waits_for_what() -> None:
    vocab_2 = METHODS["vocab-2"]
    assert vocab_2.waits_for == {
        PassType.S: (CommType.C0,),
        PassType.B: (CommType.C1, CommType.CG),
        PassType.L: (CommType.C1,),
        PassType.T: (CommType.C1, CommType.CG),
    }
    assert vocab_2.producers == {CommType.C1: PassType.S, CommType.CG: PassType.L}
    assert METHODS["interlaced"].waits_for[PassType.B] == (PassType.S,)
    assert METHODS["interlaced"].in_step == {PassType.S}


@pytest.mark.parametrize(
    ("name", "evaluation", "ranking"),
    [
        ("baseline", "", ""),
        ("vocab-1", "C0 S C1 L", "C0 S C1 R C2 L"),
        ("vocab-2", "C0 S C1 L", "C0 S C1 R C2 L"),
        ("interlaced", "C0 S C1 L", "C0 S C1 R C2 L"),
        ("naive", "C0 S C1 S2 C2 L", "C0 S C1 S2 C2 R C3 L"),
    ],
)
def test_the_chain_of_an_evaluation(name: str, evaluation: str, ranking: str) -> None:
    method = without_gradients(METHODS[name])
    assert (method.chain, method.beside) == (evaluation, "")
    assert without_gradients(METHODS[name], ranks_targets=True).chain == ranking


def test_a_whole_layer_far_from_the_loss_function_has_a_chain() -> None:
    v_shape, straight = Placement(2, 2, "vshape"), Placement(2, 2)
    far = placed(METHODS["redis"], v_shape)
    assert (far.chain, far.barriers, far.vocabulary_parallel) == ("C0 L CG B", 0, False)
    assert without_gradients(far, ranks_targets=True).chain == "C0 L"
    assert placed(METHODS["redis"], straight) == METHODS["redis"]
    assert placed(METHODS["vocab-2"], v_shape) == METHODS["vocab-2"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_an_evaluation_that_ranks_targets(method: str) -> None:
    plan = make_plan(method, 2, 3).ranking_targets
    assert set(plan.schedule.method.waits_for) >= {PassType.R, PassType.L} or not METHODS[method].chain
    assert not any(find_hangs(plan.schedule, plan.program).values())


@pytest.mark.parametrize(
    ("chain", "beside", "message"),
    [
        ("C0 X B", "", "method trial: 'X' in its chain; there are S, S2, T, L, TW, R, B, C0"),
        ("S C1 B", "", "must lead from C0 to B"),
        ("C0 S C1 T", "", "must lead from C0 to B"),
        ("C0 S C1 B", "C2 T", "'C2 T' must start with a word of 'C0 S C1 B'"),
        ("C0 S C1 S C2 B", "", "names a word twice"),
        ("C0 S C1 B", "C1 S", "names a word twice"),
        ("C0 S C1 B", "C1 T, CG T", "must start with a word of"),
        ("C0 S C1 B", "C1 T, C1 T B", "names a word twice"),
    ],
)
def test_what_is_no_chain_is_named(chain: str, beside: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Method("trial", "", chain, beside)


TRIAL = Method("two-step", "statistics in two barriers, T delayed at will", "C0 S C1 S2 C2 B", "C2 T")


@pytest.mark.parametrize("family", rest_is_slow(["1f1b", "v-half"], "v-half"))
def test_a_method_of_ones_own(family: str) -> None:
    """A new method, with two barriers and a late T, needs only its chain and its times."""
    usual = PassCosts.default(4)
    costs = replace(usual, methods={"two-step": {"S_ms": 2.5, "S2_ms": 2.5, "T_ms": 2.5}})
    plan = make_plan(TRIAL, 4, 8, family=family, costs=costs)
    assert TRIAL.barriers == 2
    assert not any(find_hangs(plan.schedule, plan.program).values())
    simulation = simulate(plan)
    for mb in range(8):
        ends = {str(item): end for item, (_, end) in (*simulation.passes.items(), *simulation.comms.items())}
        starts = {str(item): start for item, (start, _) in simulation.passes.items()}
        for rank in range(4):
            assert ends[f"{rank}S{mb}"] <= ends[f"{rank}C1.{mb}"] <= starts[f"{rank}S2.{mb}"]
            assert ends[f"{rank}C2.{mb}"] <= starts[f"{rank}T{mb}"]
    vocab_2 = simulate(make_plan("vocab-2", 4, 8, family=family))
    assert max(simulation.peak_activations) == max(vocab_2.peak_activations) + 1
    assert "M" in draw_text(simulation, width=400)
    assert plan_from_json(plan_to_json(plan), methods={"two-step": TRIAL}) == plan
    with pytest.raises(ValueError, match="'algorithm' is 'two-step'"):
        plan_from_json(plan_to_json(plan))
