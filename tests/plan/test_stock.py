"""Choices of Megatron's own schedules, and layouts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import OVERLAP, Job
from megatron_vocabpar.plan.layer_counts import StockLayout, layouts, layouts_of
from megatron_vocabpar.plan.plays import play_stock, stock_choice, stock_choices
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.times import estimated_costs

H100 = hardware_named("h100")


def test_overlap_has_layouts_where_megatron_has_it() -> None:
    model = replace(model_preset("qwen3-30b-a3b"), layers=12)

    def overlapping(job: Job, **changes: int) -> list[StockLayout]:
        costs = estimated_costs(replace(model, **changes), job, H100)  # type: ignore[arg-type]
        return [one for one in layouts(12, job.p, costs) if one.overlaps]

    several = overlapping(Job(p=4, d=8, e=8))
    assert {one.chunks for one in several} == {2, 3}
    assert all(set(OVERLAP) < set(one.flags) and " with overlap" in one.name for one in several)
    assert all(sum(one.layers) == 12 for one in several)
    assert {one.chunks for one in overlapping(Job(p=1, d=8, e=8))} == {1}
    assert overlapping(Job(p=1, d=8, e=8), mtp_depths=1) == []
    assert overlapping(Job(p=4, d=8)) == []


def test_1f1b_takes_as_long_as_the_simulators_baseline() -> None:
    model = replace(model_preset("llama-3.1-8b"), layers=32)
    request = Request(model, Job(p=4, m=24), H100, 1e6)
    stock = next(one for one in stock_choices(request) if one.family == "1f1b")
    ours = choice_of(request, "baseline", "1f1b", 24)
    assert stock.iteration_ms == pytest.approx(ours.iteration_ms, rel=0.005)
    assert [one.total for one in stock.stages] == pytest.approx([one.total for one in ours.stages])


def test_several_chunks_need_microbatches_that_divide() -> None:
    """Megatron refuses others: 30 microbatches on 6 ranks make whole rounds, 32 do not."""
    for m, several in ((30, True), (32, False)):
        request = Request(model_preset("gemma-2-9b"), Job(p=6, m=m), H100, 1e6)
        kinds = [layout.name for layout in layouts_of(request)]
        assert any(kind.startswith("interleaved") for kind in kinds) == several
        assert any(kind.startswith("1f1b") for kind in kinds)


def test_layers_move_away_from_the_output_layer() -> None:
    request = Request(model_preset("gemma-2-9b"), Job(p=4, m=32), H100, 1e6)
    choices = {one.family: one for one in stock_choices(request)}
    by_hand = next(one for name, one in choices.items() if name.startswith("interleaved") and "hand" in name)
    baseline = choice_of(request, "baseline", "1f1b", 32)
    assert by_hand.iteration_ms < 0.9 * baseline.iteration_ms
    assert sum(by_hand.layers) == 42
    assert by_hand.layers[-1] < max(by_hand.layers)
    flag = by_hand.flags[0]
    assert flag.count("t") - flag.split(" ")[0].count("t") == 42
    assert flag.count("|") == len(by_hand.layers) - 1


def test_megatron_counts_the_loss_as_a_layer_where_that_comes_out_even() -> None:
    model = replace(model_preset("llama-3.1-8b"), layers=31)
    costs = estimated_costs(model, Job(p=4), H100)
    counted = [one for one in layouts(31, 4, costs) if "--account-for-loss-in-pipeline-split" in one.flags]
    assert [one.chunks for one in counted] == [1, 2, 4]
    assert counted[0].layers == (8, 8, 8, 7)


@pytest.mark.parametrize(
    ("name", "job"),
    [("gemma-2-9b", Job(p=4, m=40)), *(("qwen3-30b-a3b", Job(p=4, d=8, e=8, m=m)) for m in (4, 40))],
)
def test_bounds_are_below_what_is_played(name: str, job: Job) -> None:
    request = Request(model_preset(name), job, H100, 1e6)
    for layout in layouts_of(request):
        choice = stock_choice(request, layout)
        played = play_stock(choice, quick=True)
        assert 0.5 * played.iteration_ms < choice.iteration_ms <= 1.0001 * played.iteration_ms
        assert "takes at least" in play_stock(choice, below_ms=choice.iteration_ms).problem


@pytest.mark.parametrize("m", [4, 32])
def test_bounds_of_pairs_hold_where_chunks_are_unlike(m: int) -> None:
    """F and B of one chunk hide more than those of a longer and a shorter one."""
    model = replace(model_preset("deepseek-v3"), layers=18)
    request = Request(model, Job(p=4, d=8, e=8, m=m), H100, 1e6)
    overlap = OVERLAP[:1]
    for layers in ((3, 2, 2, 3, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2, 2, 4), (3, 2, 2, 2, 2, 2, 2, 3)):
        choice = stock_choice(request, StockLayout("uneven", 2, layers, overlap, True))
        assert choice.iteration_ms <= 1.0001 * min(
            play_stock(choice, quick=quick).iteration_ms for quick in (False, True)
        )


def test_every_number_of_chunks_that_fills_the_stages_is_tried() -> None:
    request = Request(model_preset("llama-3.1-405b"), Job(p=9, m=18), hardware_named("H200"), 140.0)
    assert {one.chunks for one in layouts_of(request)} == set(range(1, 15))
    shallow = replace(request, job=Job(p=4, m=16), model=model_preset("llama-3.1-70b"))
    assert {5, 7, 10, 14, 16, 20} <= {one.chunks for one in layouts_of(shallow)}
