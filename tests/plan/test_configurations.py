"""The best configurations fit, nothing that is left out is better, and it is said what binds them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from multiprocessing import active_children

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.plan import choices as choosing
from megatron_vocabpar.plan import configurations as planning
from megatron_vocabpar.plan import orders
from megatron_vocabpar.plan.advice import binds, shares, shown, sources, stock_best
from megatron_vocabpar.plan.answer import answer_for_gpus, answer_json
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choice_flags import flags_of
from megatron_vocabpar.plan.choices import choice_of, choices_of, mapping
from megatron_vocabpar.plan.configurations import (
    best_configurations,
    configurations,
    kind_of,
    quick_plays,
    usual_batch,
)
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import RECOMPUTE, Job
from megatron_vocabpar.plan.layer_counts import layouts_of
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.plays import play_in_full, quick_stock_choices, stock_choices
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.stage_memory import GIB, StageMemory
from megatron_vocabpar.plan.variants import Question, bound_ms, memory_variants
from megatron_vocabpar.schedule.make.problem import Problem

H100 = hardware_named("h100")


def small(name: str = "llama-3.2-3b", layers: int = 8) -> Model:
    return replace(model_preset(name), layers=layers)


searched = cache(lambda **settings: best_configurations(question(small(), **settings)))
"""The answer for a small model, worked out once for the tests that ask the same."""


def question(model: Model, gpus: int = 4, limit_gib: float = 79.0, **fixed: int | bool | str) -> Question:
    return Question(model, H100, gpus, 32, limit_gib, fixed)


@pytest.mark.slow
def test_the_best_of_all_ways_is_found() -> None:
    """The search agrees with trying every way, method and rung in turn, without bounds."""
    asked = question(small(), limit_gib=20.0)
    found = best_configurations(asked)
    every = [*planning.OURS, *(("vocab-2", family) for _, family in planning.OURS), ("interlaced", "1f1b")]
    times = []
    for t, p, c, offload, recompute in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (0.0, 1.0), RECOMPUTE):
        if 4 % (t * p * c) or asked.model.seq_length < 2048 * c:
            continue
        d = 4 // (t * p * c)
        divided = d * c > 1
        job = Job(p=p, t=t, c=c, d=d, m=32 // d, distributed_optimizer=divided)
        job = replace(job, recompute=recompute, offload=offload)
        if offload and not job.distributed_optimizer:
            continue
        request = Request(asked.model, job, H100, 20.0)
        choices = stock_choices(request)
        choices += [choice_of(request, *pair, job.m) for pair in every] if p > 1 else []
        times += [one.iteration_ms for one in choices if one.fits]
    assert found
    assert found[0].iteration_ms <= 1.03 * min(times)
    assert found[0].fits
    assert found[0].exact


def test_the_best_sizes_are_played_with_every_method() -> None:
    """Each is no slower than the other methods in its family, with the same sizes."""
    for one in searched(gpus=2, p=2, t=1, c=1):
        if not one.stock:
            methods = ("vocab-1", "vocab-2", "interlaced")[: 3 if one.family == "1f1b" else 2]
            times = [choice_of(one.request, method, one.family).iteration_ms for method in methods]
            assert one.iteration_ms <= 1.001 * min(times)


@pytest.mark.slow
def test_pairs_are_found_where_they_hide_an_exchange() -> None:
    """Without a search: dualpipev is the fastest of ours on these sizes, and no slower than Megatron's."""
    asked = replace(question(small("qwen3-30b-a3b", 16), gpus=16, p=4, t=1, c=1, e=4), batch=64)
    first, *_ = best_configurations(asked)
    assert first.family == "dualpipev"
    alone = replace(first, family="v-zb")
    rest, whole = (shares(one)["the exchange of experts"] for one in (first, alone))
    assert rest == pytest.approx(0.07 * whole)
    ours = [choice_of(first.request, *each, first.request.job.m) for each in planning.OURS]
    assert min(ours, key=lambda one: one.iteration_ms).family == "dualpipev"
    assert first.iteration_ms <= min(one.iteration_ms for one in stock_choices(first.request))


@pytest.mark.parametrize(("limit_gib", "recompute"), [(12.0, None), (22.0, "selective")])
def test_pairs_are_not_played_with_a_full_recomputation(
    monkeypatch: pytest.MonkeyPatch, limit_gib: float, recompute: str | None
) -> None:
    """Megatron refuses ``--overlap-moe-expert-parallel-comm`` with it, and nothing would be hidden."""
    monkeypatch.setattr(planning, "OURS", (("vocab-1", "dualpipev"),))
    asked = Question(small("qwen3-30b-a3b", 16), H100, 32, 128, limit_gib)
    job = Job(p=4, d=8, e=8, m=16, distributed_optimizer=True)
    found = [choice.request.job.recompute for choice in quick_plays(asked, job, stock_ms=0.0)]
    assert found == ([recompute] if recompute else [])


def test_bounds_are_below_what_is_played() -> None:
    asked = question(small())
    for bound, job in configurations(asked):
        for one in quick_plays(asked, job):
            assert bound <= 1.0001 * one.iteration_ms
            assert bound_ms(asked, one.request.job) <= 1.0001 * one.iteration_ms


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets a word for each order of passes that is played from now on; none is known yet."""
    forget()
    plays: list[str] = []

    def counting(where: object, name: str) -> None:
        play = getattr(where, name)

        def counts(*given: object) -> object:
            plays.append(name)
            return play(*given)

        monkeypatch.setattr(where, name, counts)

    counting(Problem, "_try")
    counting(orders, "run_passes")
    return plays


def forget() -> None:
    """Forget the orders of former searches."""
    orders._order.cache_clear()
    orders.stock_order.cache_clear()


@pytest.mark.slow
def test_what_is_left_out_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer as by playing and pricing every schedule of every way, with fewer played."""
    asked = question(small("qwen3-30b-a3b", 12), gpus=8, limit_gib=40.0)
    plays = counted(monkeypatch)
    found, needed = best_configurations(asked), len(plays)
    monkeypatch.setattr(planning, "_known_ms", lambda *_: inf)
    monkeypatch.setattr(
        planning, "choices_of", lambda *given, below_ms, near_ms, most: choices_of(*given, most=most)
    )
    monkeypatch.setattr(choosing, "play_in_full", lambda choice, below_ms=inf: play_in_full(choice))
    forget()
    whole = best_configurations(asked)
    rows = [[(kind_of(one), one.name, one.iteration_ms) for one in each] for each in (found, whole)]
    assert rows[0][: planning.BEST] == rows[1][: planning.BEST]
    assert needed < 0.8 * (len(plays) - needed)


def test_a_rung_that_is_too_slow_does_not_hide_a_faster_one() -> None:
    """Gemma 3 27B, p 2, t 2, c 2: recomputing all takes at least 238 s, the optimizer on the host 187."""
    model = model_preset("gemma-3-27b")
    asked = Question(model, H100, 8, usual_batch(model, 8), H100.memory_gib)
    job = next(job for _, job in configurations(asked) if (job.p, job.t, job.c) == (2, 2, 2))
    recomputed = bound_ms(asked, replace(job, recompute="full"))
    (found,) = quick_plays(asked, job, ours_ms=0.0, stock_ms=recomputed)
    assert (found.request.job.offload, found.request.job.recompute) == (True, "none")
    assert found.iteration_ms < 0.8 * recomputed


@pytest.mark.parametrize(("layers", "p", "limit_gib"), [(6, 2, 18.0), (6, 2, 19.0), (12, 4, 18.5)])
def test_every_layout_is_played_in_every_variant_that_may_be_faster(
    layers: int, p: int, limit_gib: float
) -> None:
    """Whole layers run again, so a layout's fastest variant may have a greater bound; others are lighter."""
    asked = Question(replace(small(layers=layers), seq_length=4096), H100, p, p, limit_gib)
    least = inf
    for variant in memory_variants(asked, Job(p=p, m=p)):
        request = Request(asked.model, variant, H100, limit_gib)
        choices = quick_stock_choices(request, layouts_of(request), least)
        least = min([least, *(one.iteration_ms for one in choices if one.fits and not one.problem)])
    (found,) = quick_plays(asked, Job(p=p, m=p), ours_ms=0.0)
    assert found.iteration_ms <= 1.003 * least < inf


@pytest.mark.slow
def test_a_search_plays_few_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,370 orders of 128 configurations, half of them Megatron's, on a pipeline of up to 32 ranks."""
    model, gpu = model_preset("glm-4.5"), hardware_named("GB300")
    plays = counted(monkeypatch)
    assert best_configurations(Question(model, gpu, 64, usual_batch(model, 64), gpu.memory_gib))
    assert len(plays) <= 1_380


def test_the_same_question_has_the_same_answer() -> None:
    asked = question(small(), gpus=2, p=2, t=1, c=1)
    assert searched(gpus=2, p=2, t=1, c=1) == best_configurations(asked, workers=2)


def test_what_is_fixed_stays() -> None:
    found = searched(gpus=2, t=2, c=1, recompute="full", offload=0.0)
    assert found
    for job in (choice.request.job for choice in found):
        assert (job.t, job.recompute, job.offload) == (2, "full", 0.0)


def test_a_rung_is_climbed_where_memory_lacks() -> None:
    asked = question(small(), gpus=2, p=2, t=1, c=1)
    tried = [(job.recompute, job.recomputed) for job in memory_variants(asked, Job(p=2))]
    assert sorted(tried) == sorted(
        [("none", 1.0), ("selective", 1.0), *(("full", k / 8) for k in range(1, 9))]
    )
    assert [tried[0], tried[-1]] == [("none", 1.0), ("full", 1.0)]
    assert searched(gpus=2, p=2, t=1, c=1)[0].request.job.recompute == "none"
    saved = searched(gpus=2, limit_gib=24.0, p=2, t=1, c=1)
    assert "none" not in {choice.request.job.recompute for choice in saved}
    assert all(choice.needed_gib > 24.0 for choice in saved)
    assert all("memory: more than 24 GiB" in binds(choice) for choice in saved)


def test_variants_come_by_their_bounds() -> None:
    asked = question(small(), gpus=4, p=2, t=1, c=1)
    tried = memory_variants(asked, Job(p=2, d=2, distributed_optimizer=True))
    times = [bound_ms(asked, job) for job in tried]
    assert times == sorted(times)
    assert [job.precision_aware for job in tried[:2]] == [False, True]
    assert tried[0] == Job(p=2, d=2, distributed_optimizer=True)
    halves = [job.offload for job in tried if job.recompute == "none" and not job.precision_aware]
    assert halves == [0.0, 0.5, 1.0]


def test_tokens_of_experts_go_once_to_a_node_where_the_gpu_can() -> None:
    model = replace(model_preset("qwen3-30b-a3b"), layers=8)
    for name, flex in (("H100", True), ("A100", False)):
        gpu = hardware_named(name)
        jobs = [job for _, job in configurations(Question(model, gpu, 16, 16, 79.0, {"p": 2, "c": 1}))]
        assert {job.flex_dispatcher for job in jobs if job.e > 1} == {flex}
        assert not any(job.flex_dispatcher for job in jobs if job.e == 1)


def test_tensor_parallelism_is_hidden_where_w_is_not_split_off() -> None:
    asked = question(small(), gpus=4, p=2, t=2, c=1)
    ((_, job),) = configurations(asked)
    assert job.tp_overlap
    request = Request(asked.model, job, H100, 79.0)
    (apart, *_), (together, *_) = (choices_of(request, "vocab-1", family) for family in ("zb-h1", "1f1b"))
    (stock, *_) = stock_choices(request)
    assert "--tp-comm-overlap" not in flags_of(apart)
    assert "--tp-comm-overlap" in flags_of(together)
    assert "--tp-comm-overlap" in flags_of(stock)
    tensor = [shares(choice)["tensor parallelism"] * choice.iteration_ms for choice in (together, apart)]
    assert tensor[0] == pytest.approx(0.3 * tensor[1])


def test_experts_are_exchanged_within_a_node_if_they_can_be() -> None:
    model = replace(model_preset("qwen3-30b-a3b"), layers=8)
    found = best_configurations(
        Question(model, H100, 16, 16, 79.0, {"p": 2, "t": 1, "c": 1, "micro_batch": 1})
    )
    assert found[0].request.job.e <= 8
    job = Job(p=1, d=16, e=16, m=4, distributed_optimizer=True)
    across, within = (
        stock_choices(Request(model, job, gpu, 79.0))[0] for gpu in (H100, H100.connected(per_node=16))
    )
    assert "exchange of experts" in binds(across)
    slow, fast = (shares(choice)["the exchange of experts"] for choice in (across, within))
    assert slow > 2 * fast
    assert within.iteration_ms < across.iteration_ms


def test_kinds_differ_and_megatrons_best_is_shown() -> None:
    found = searched(gpus=2, t=1, c=1)
    rows = shown(found)
    assert len({kind_of(one) for one in rows}) == len(rows) <= planning.BEST + 1
    stock = stock_best(found)
    assert stock in rows
    assert stock is not None
    assert stock.stock


def test_a_batch_is_four_million_tokens_or_two_sequences_a_gpu() -> None:
    assert usual_batch(small(), 64) == 512
    assert usual_batch(small(), 1024) == 2048


def test_every_number_has_a_source() -> None:
    lines = list(sources(H100))
    assert any(line.startswith("tflops 989: NVIDIA H100") for line in lines)
    assert any(line.startswith("share layers") and "published_runs.json" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dp 2", "--dp cannot be combined with --gpus"),
        ("--gpus 0", "--gpus 0: give 1 or more"),
    ],
)
def test_what_a_search_does_not_take_is_refused(flags: str, says: str) -> None:
    result = CliRunner().invoke(main, ["plan", "--preset", "llama-3.2-3b", "--gpus", "2", *flags.split()])
    assert result.exit_code == 2
    assert says in result.output


def test_the_verb_prints_the_best_and_its_flags() -> None:
    sizes = ["--gpus", "2", "--pp", "2", "--tp", "1", "--cp", "1", "--global-batch-size", "4"]
    words = ["plan", "--preset", "llama-3.2-3b", *sizes, "--sources"]
    result = CliRunner().invoke(main, [*words, "--", "--weight-decay", "0.1"])
    assert result.exit_code == 0, result.output
    assert "Recommended: " in result.output
    assert "--pipeline-model-parallel-size 2" in result.output
    assert "--weight-decay 0.1" in result.output.split("Not used")[1]
    assert "NVIDIA H100 SXM data sheet" in result.output
    assert max(map(len, result.output.splitlines())) <= 160


def test_the_json_of_a_search_has_the_best_first() -> None:
    asked = question(small(), gpus=2, p=2, t=1, c=1)
    data = json.loads(answer_json(answer_for_gpus(asked, searched(gpus=2, p=2, t=1, c=1))))
    times = [one["iteration_ms"] for one in data["choices"]]
    assert times[0] == min(times)
    assert sum(data["choices"][0]["shares"].values()) < 1


def test_nothing_fits_ends_with_1_and_says_what_to_change() -> None:
    result = CliRunner().invoke(main, ["plan", "--preset", "llama-3.1-405b", "--gpus", "8"])
    assert result.exit_code == 1
    assert "Nothing fits" in result.output
    assert "--gpus" in result.output


@pytest.mark.timeout(60)
def test_what_ends_the_search_ends_its_workers() -> None:
    """As Ctrl-C, which the workers leave to this process: each would sleep for ten minutes."""
    before = set(active_children())

    def interrupted() -> None:
        with mapping(2) as each:
            assert next(each(time.sleep, [0.0, 600.0, 600.0, 600.0])) is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for worker in set(active_children()) - before:
        worker.join()


def test_what_could_be_the_fastest_is_simulated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least three, at most two of one family, and what is estimated below the best; b does not fit."""
    full = {"a": 1390.0, "b": 1362.0, "c": 1374.0, "d": 1300.0, "e": 1385.0, "f": 1380.0}
    request = Request(small(), Job(p=2), H100, 79.0)
    large = StageMemory(80.0 * GIB, *(0.0,) * 6)

    def played(choice: Choice, below_ms: float = inf) -> Choice:
        stages = (large,) if choice.layers == (1,) else ()
        return replace(choice, iteration_ms=full["abcdef"[choice.layers[0]]], stages=stages, is_full=True)

    monkeypatch.setattr(choosing, "play_in_full", played)
    families = ("v-zb", "zb-h1", "v-zb", "v-zb", "zb-h1", "v-half")
    estimates = [Choice(request, "vocab-1", family, (k,), 1370.0 + k) for k, family in enumerate(families)]
    found = [("abcdef"[one.layers[0]], one.is_full) for one in planning._play_side_in_full(estimates, False)]
    assert found == [("c", True), ("a", True), ("e", False), ("f", False)]


@pytest.mark.slow
def test_sharded_configurations_take_no_full_play_from_pipelines() -> None:
    """Qwen3-30B on 8 H100 has more kinds of FSDP than are played in full, all slower than pipelines."""
    model = model_preset("qwen3-30b-a3b")
    found = best_configurations(Question(model, H100, 8, usual_batch(model, 8), H100.memory_gib, {"c": 1}))
    stock = stock_best(found)
    assert stock is not None
    assert stock.request.job.p > 1
    assert stock.exact
