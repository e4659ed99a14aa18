"""Advice: the fastest that fits, as the simulator says; flags that ours read; what would fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import cache

import pytest

from megatron_vocabpar.megatron_lm.flags import config_from_argv
from megatron_vocabpar.plan.advice import redistribution, remedies
from megatron_vocabpar.plan.choice import Choice, Request, costs_of
from megatron_vocabpar.plan.choice_flags import flags_of
from megatron_vocabpar.plan.choices import all_choices, best_of, choice_of, choices_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.layer_counts import layer_counts
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.plays import play_in_full
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.stage_memory import GIB, StageMemory
from megatron_vocabpar.plan.times import estimated_costs
from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.times.redistribution import layout
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.passes import PassType

H200 = hardware_named("h200")
ON_A100S_RATES = replace(hardware_named("h100"), rates=hardware_named("a100").rates)
SOME = ("1f1b", "interleaved")


def request(name: str, layers: int, limit_gib: float, p: int = 4, m: int = 40) -> Request:
    model = replace(model_preset(name), layers=layers)
    return Request(model, Job(p=p, m=m), H200, limit_gib)


best_layouts = cache(all_choices)
"""``all_choices``, worked out once for the tests that ask the same."""


@cache
def simulated_ms(model: Model, job: Job, method: str, family: str, factor: float) -> float:
    costs = estimated_costs(model, job, H200, factor)
    return simulate(make_plan(method, job.p, job.m, family=family, costs=costs)).iteration_ms


def check_best(asked: Request, methods: tuple[str, ...], among: tuple[str, ...]) -> Choice:
    """Compare the recommended choice with full simulations of all choices that fit, at each one's price."""
    choices = best_layouts(asked, methods, among)
    best = best_of(choices)
    assert best is not None
    times = {
        (one.method, one.family): simulated_ms(
            asked.model, asked.job, one.method, one.family, asked.factor(one.use)
        )
        for one in choices
        if one.peak_gib <= asked.limit_gib
    }
    assert times[best.method, best.family] <= 1.002 * min(times.values())
    assert best.exact
    assert best.iteration_ms > times[best.method, best.family]  # the optimizer's step
    return best


def test_a_gemma_like_request_with_room_and_without() -> None:
    roomy = request("gemma-2-9b", 40, 170.0, m=8)
    methods = ("vocab-1", "vocab-2")
    first = check_best(roomy, methods, SOME)
    second = check_best(replace(roomy, limit_gib=first.peak_gib - 1.0), methods, SOME)
    assert (first.name, second.name) == ("vocab-1 in interleaved", "vocab-2 in interleaved")


def test_a_cap_holds_in_the_whole_schedule_as_in_its_first_microbatches() -> None:
    asked = replace(request("llama-3.1-8b", 32, 139.0, m=24), max_activations=3.0)
    quick = choice_of(asked, "vocab-2", "zb-h1")
    full, uncapped = (
        play_in_full(replace(quick, request=replace(asked, max_activations=most))) for most in (3.0, None)
    )
    assert full.peak_gib == pytest.approx(quick.peak_gib)
    assert full.peak_gib < uncapped.peak_gib
    assert full.iteration_ms > uncapped.iteration_ms


def test_the_best_is_the_fastest_that_fits_of_those_simulated_in_full() -> None:
    asked = request("llama-3.1-8b", 32, 139.0)
    large = StageMemory(*(140.0 * GIB, *(0.0,) * 6))
    tried = [
        Choice(asked, "vocab-1", "1f1b", iteration_ms=4.0, is_full=True),
        Choice(asked, "vocab-2", "1f1b", iteration_ms=3.0, is_full=True),
        Choice(asked, "vocab-2", "v-half", iteration_ms=2.0),
        Choice(asked, "vocab-2", "v-zb", iteration_ms=1.0, stages=(large,), is_full=True),
        Choice(asked, "vocab-2", "v-min", problem="impossible", is_full=True),
    ]
    assert best_of(tried) is tried[1]
    assert best_of(tried[2:]) is tried[2]
    assert best_of(tried[3:]) is None


def test_one_whose_whole_schedule_is_lighter_is_chosen() -> None:
    asked = replace(request("llama-3.1-8b", 32, 114.0, p=4, m=12), hardware=ON_A100S_RATES)
    faster, slower = "interleaved", "1f1b"
    assert choice_of(asked, "vocab-1", faster).peak_gib > asked.limit_gib
    best = best_of(all_choices(asked, ("vocab-1",), (faster, slower)))
    assert best is not None
    assert best.family == faster


@pytest.mark.slow
@pytest.mark.parametrize("limit_gib", [139.0, 60.0])
def test_a_llama_like_request_over_all_families(limit_gib: float) -> None:
    asked = request("llama-3.1-8b", 32, limit_gib, p=8, m=64)
    check_best(asked, ("baseline", "vocab-1", "vocab-2"), tuple(families()))


def test_uneven_layers_are_placed_and_written_into_a_flag() -> None:
    asked = request("gemma-2-9b", 10, 139.0)
    choice, *others = choices_of(asked, "vocab-2", "1f1b")
    assert choice.layers == (2, 2, 3, 3)
    assert [one.layers for one in others] == [(3, 3, 2, 2), (3, 3, 3, 1)]
    assert choice_of(asked, "vocab-2", "1f1b") == min((choice, *others), key=lambda one: one.iteration_ms)
    assert f"--pipeline-model-parallel-layout '{layout(choice.layers)}'" in flags_of(choice)
    # Megatron counts stages along the pipeline; rank 3 of the V holds the fourth and the fifth of them.
    shaped = choices_of(asked, "vocab-2", "v-half")[0]
    assert shaped.layers == (1, 1, 2, 2, 1, 1, 1, 1)
    # Megatron takes the number of chunks from the layout, and refuses both.
    assert not any("--num-virtual-stages" in flag for flag in flags_of(shaped))
    assert choice_of(asked, "baseline", "1f1b").layers == (2, 3, 3, 2)
    assert choice_of(replace(asked, job=Job(p=16)), "vocab-2", "1f1b").problem


@pytest.mark.parametrize(
    ("method", "family"), [("baseline", "1f1b"), ("redis", "1f1b"), ("vocab-2", "zb-h1"), ("vocab-1", "v-zb")]
)
def test_our_flags_read_those_of_the_plan(method: str, family: str) -> None:
    asked = request("llama-3.1-8b", 8, 139.0)
    choice = choice_of(asked, method, family)
    flags = flags_of(choice)
    words = shlex.split(" ".join(flags))
    config = config_from_argv(words)
    assert (config.method, config.family) == (method, family)
    assert ("--num-virtual-stages-per-pipeline-rank 2" in flags) == (family == "v-zb")
    if method == "redis":
        assert config.final_stage_layers == choice.layers[-1] < choice.layers[0]


def test_an_impossible_request_says_what_fits_and_it_does() -> None:
    asked = request("llama-3.1-8b", 32, 50.0, p=4, m=8)
    assert best_of(all_choices(asked, ("vocab-2",), SOME)) is None
    said = remedies(asked)
    assert said[0].startswith("--recompute")
    recomputed = replace(asked, job=replace(asked.job, recompute="full"))
    assert any(choice_of(recomputed, "vocab-2", family).fits for family in SOME)


@pytest.mark.slow
def test_what_one_change_cannot_do_changes_do_together() -> None:
    asked = request("llama-3.1-405b", 126, 79.0, p=8, m=8)
    (said,) = remedies(asked)
    assert re.match(r"p \d+, t \d+, d 1, recompute full on \d+ GPUs of 79 GiB: vocab-2 in ", said)


def test_redistribution_suffices_for_large_mixtures_of_experts() -> None:
    def said(name: str, layers: int) -> list[str]:
        asked = replace(request(name, layers, 1e6), job=Job(p=8, m=16))
        return redistribution(all_choices(asked, ("redis", "vocab-2"), SOME[:1]))

    assert "Redistribution suffices for the time" in said("kimi-k2", 61)[0]
    assert said("gemma-3-4b", 32) == []


def test_a_larger_shard_of_experts_and_replicas_saves_memory() -> None:
    asked = replace(request("qwen3-30b-a3b", 48, 139.0), job=Job(p=4, d=8, m=8))
    plain = choice_of(asked, "vocab-2", SOME[0]).stages[0]
    divided = replace(asked, job=replace(asked.job, e=8, distributed_optimizer=True))
    stage = choice_of(divided, "vocab-2", SOME[0]).stages[0]
    assert stage.weights < plain.weights / 4
    # Experts have one replica, all other weights have eight.
    assert stage.weights * 6 / 8 < stage.optimizer < stage.weights * 6


EXPERTS = Request(
    replace(model_preset("qwen3-30b-a3b"), layers=16), Job(p=4, d=8, e=8, m=16), hardware_named("h100"), 79.0
)


def test_pairs_are_compared_where_an_exchange_can_be_hidden() -> None:
    def tried(e: int) -> set[str]:
        asked = replace(EXPERTS, job=replace(EXPERTS.job, p=2, e=e, m=2))
        return {one.family for one in all_choices(asked, ("baseline",))}

    paired = {"dualpipev", "1f1b-overlap"}
    assert paired < tried(8)
    assert not paired & tried(1)


def test_measured_pairs_count_where_megatron_can_run_them() -> None:
    measured = replace(EXPERTS.costs(), hidden_ms=1.0)
    asked = replace(EXPERTS, measured=measured)
    assert asked.costs() == measured
    assert not replace(asked, job=replace(asked.job, e=1)).costs().hides


def test_the_estimate_of_pairs_is_about_what_the_whole_schedule_takes() -> None:
    asked = replace(EXPERTS, job=replace(EXPERTS.job, m=64))
    for family in ("dualpipev", "1f1b-overlap"):
        few, whole = (choice_of(asked, "vocab-2", family, m) for m in (16, 64))
        assert few.iteration_ms == pytest.approx(whole.iteration_ms, rel=0.04)
        assert few.idle == pytest.approx(whole.idle, abs=0.04)


def test_pairs_hide_what_v_zb_waits_for() -> None:
    alone, together = (choice_of(EXPERTS, "vocab-2", family) for family in ("v-zb", "dualpipev"))
    assert together.iteration_ms < 0.95 * alone.iteration_ms
    assert together.peak_gib > alone.peak_gib


def test_uneven_layers_hide_in_proportion() -> None:
    uneven = replace(EXPERTS, model=replace(EXPERTS.model, layers=18))
    costs, family = uneven.costs(), families()["dualpipev"]
    layers = layer_counts(uneven, method_named("vocab-2"), family)[0]
    assert layers == (2, 2, 3, 3, 2, 2, 2, 2)
    frame = PlanRequest(method="vocab-2", p=4, m=8, family=family).frame()
    times = PassTimes.of(costs_of(uneven, layers), frame, splits_w=True)
    layer = costs.hidden_ms * 4 / 18  # type: ignore[operator]
    assert times.hidden[3, 3] == pytest.approx(3 * layer)
    assert times.hidden[3, 4] == times.hidden[4, 3] == pytest.approx(2 * layer)
    assert times.passes[PassType.F][3] == pytest.approx(1.5 * times.passes[PassType.F][4])


def test_the_rank_of_a_whole_output_layer_and_its_heads_gets_fewer_layers() -> None:
    """In a V it is the first rank; no rank is longer than the mean by more than a layer."""
    asked = replace(EXPERTS, model=replace(EXPERTS.model, layers=19, mtp_depths=1))
    costs = asked.costs()
    layer = (costs.F_ms + costs.B_ms + costs.W_ms) * 4 / 19  # type: ignore[operator]
    ends = (costs.last_stage_extra, costs.last_rank_extra, costs.first_rank_extra)
    whole = sum(sum(extra.values()) for extra in ends)
    *by_hand, even = layer_counts(asked, method_named("baseline"), families()["v-zb"])
    assert even == (3, 3, 3, 2, 2, 2, 2, 2)
    for layers in by_hand:
        assert sum(layers) == 19
        assert min(layers[:-1]) >= 1
        ranks = [(layers[rank] + layers[7 - rank]) * layer + (rank == 0) * whole for rank in range(4)]
        assert max(ranks) < (19 * layer + whole) / 4 + layer


@pytest.mark.slow
@pytest.mark.parametrize(("method", "family"), [("vocab-2", "v-half"), ("vocab-1", "v-min")])
def test_stages_that_are_longer_by_turns_are_the_fastest_where_ranks_have_odd_numbers(
    method: str, family: str
) -> None:
    """8 ranks with 3 layers each, played in full: more than 2 % before a V whose first half is longer."""
    model = replace(model_preset("llama-3.1-70b"), layers=24)
    asked = Request(model, Job(p=8, t=4, d=1, m=32), hardware_named("h100"), 1000.0)
    ms = {choice.layers: play_in_full(choice).iteration_ms for choice in choices_of(asked, method, family)}
    assert min(ms, key=ms.__getitem__) == (1, 2) * 8
    assert ms[(1, 2) * 8] < 0.98 * min(ms[(2,) * 8 + (1,) * 8], ms[(1,) * 8 + (2,) * 8])


def test_several_workers_give_the_same() -> None:
    asked = request("gemma-2-9b", 40, 170.0, m=8)
    alone = best_layouts(asked, ("vocab-1", "vocab-2"), SOME)
    assert all_choices(asked, ("vocab-1", "vocab-2"), SOME, workers=2) == alone
    assert any(choice.exact for choice in alone)


@pytest.mark.parametrize(
    ("method", "most"), [("interlaced", 1), ("vocab-1", 3), ("vocab-2", 3), ("baseline", 0)]
)
def test_a_rank_holds_softmax_shards_until_their_weight_gradient(method: str, most: int) -> None:
    """In interlaced S itself makes it, before the next S; the others hold those between S and T."""
    choice = choice_of(request("llama-3.1-8b", 32, 80.0), method, "1f1b")
    assert [held.softmax_shards for held in choice.held] == [most] * 4
