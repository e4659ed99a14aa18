"""Megatron's own schedules: their order, their known lengths, and layouts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import OVERLAP, Job
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.stock import (
    Layout,
    Stages,
    StockPass,
    held_layers,
    layouts,
    order,
    play,
    stages_of,
)
from megatron_vocabpar.plan.stock_choices import stock_choices
from megatron_vocabpar.plan.times import estimated_costs
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.passes import Pair, Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule
from tests.schedule.simulated import simulated

H100 = hardware_named("h100")


def named(steps: tuple[StockPass, ...]) -> str:
    return "+".join(f"{'F' if one.forward else 'B'}{one.stage}.{one.microbatch}" for one in steps)


def pass_of(step: StockPass) -> Pass:
    return Pass(PassType.F if step.forward else PassType.B, step.stage, step.microbatch)


def even(stages: int, forward: float = 1.0, backward: float = 2.0) -> Stages:
    return Stages((1,) * stages, (forward,) * stages, (backward,) * stages)


def test_the_order_is_megatrons() -> None:
    """Megatron's tables for p 2, two chunks and four microbatches: rank 0 has stages 0 and 2."""
    passes = [named(steps) for steps in order(0, 2, 2, 4)]
    warm_up, rest = passes[:4], passes[4:]
    assert warm_up == ["F0.0", "F0.1", "F2.0", "F2.1"]
    assert rest[:4] == ["F0.2", "B2.0", "F0.3", "B2.1"]
    assert rest[-4:] == ["B2.2", "B2.3", "B0.2", "B0.3"]
    assert list(order(3, 4, 1, 3))[:2] == [(StockPass(True, 3, 0),), (StockPass(False, 3, 0),)]


def test_with_overlap_the_warm_up_is_one_longer_and_f_runs_with_b() -> None:
    passes = [named(steps) for steps in order(0, 2, 2, 4, overlaps=True)]
    assert passes[:7] == ["F0.0", "F0.1", "F2.0", "F2.1", "F0.2", "F0.3+B2.0", "F2.2+B2.1"]
    assert [named(steps) for steps in order(0, 1, 1, 3, overlaps=True)] == [
        "F0.0", "F0.1+B0.0", "F0.2+B0.1", "B0.2",
    ]  # fmt: skip


@pytest.mark.parametrize(("p", "chunks", "m"), [(1, 1, 5), (2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 2)])
def test_pairs_take_as_long_as_the_simulator_says(p: int, chunks: int, m: int) -> None:
    """Megatron's order, written as a schedule of ours and simulated."""
    ms = {"F_ms": 10.0 * chunks, "B_ms": 11.0 * chunks, "W_ms": 9.0 * chunks}
    costs = PassCosts(**ms, hidden_ms=6.0 * chunks, layers=p * chunks)
    rows = [list(order(rank, p, chunks, m, overlaps=True)) for rank in range(p)]
    pairs = [Pair(*map(pass_of, steps)) for row in rows for steps in row if len(steps) > 1]
    schedule = Schedule(
        method_named("baseline"),
        Placement(p, chunks, "standard"),
        m,
        ranks=tuple(tuple(pass_of(step) for steps in row for step in steps) for row in rows),
        pairs=frozenset(pairs),
    )
    warm_up = [2 * (p - rank - 1) + (chunks - 1) * p + 1 for rank in range(p)]
    assert len(pairs) == sum(max(0, m * chunks - ahead) for ahead in warm_up)
    placed = Layout("", chunks, (1,) * (p * chunks), (), overlaps=True)
    played = play(stages_of(placed, p, costs), p, m, costs.p2p_ms)
    expected = simulated(schedule, costs)
    assert played.length_ms == pytest.approx(expected.iteration_ms)
    assert played.work_ms == pytest.approx(expected.busy_ms)
    held = held_layers(placed.layers, p, m, placed.overlaps)
    assert [layers / chunks for layers in held] == pytest.approx(expected.peak_activations)
    if pairs:
        assert played.further_ms == pytest.approx([chunks * (30.0 - 6.0)] * p)


def test_overlap_has_layouts_where_megatron_has_it() -> None:
    model = replace(model_preset("qwen3-30b-a3b"), layers=12)

    def overlapping(job: Job, **changes: int) -> list[Layout]:
        costs = estimated_costs(replace(model, **changes), job, H100)  # type: ignore[arg-type]
        return [one for one in layouts(12, job.p, costs) if one.overlaps]

    several = overlapping(Job(p=4, d=8, e=8))
    assert {one.chunks for one in several} == {2, 3}
    assert all(set(OVERLAP) < set(one.flags) and " with overlap" in one.name for one in several)
    assert all(sum(one.layers) == 12 for one in several)
    assert {one.chunks for one in overlapping(Job(p=1, d=8, e=8))} == {1}
    assert overlapping(Job(p=1, d=8, e=8), mtp_depths=1) == []
    assert overlapping(Job(p=4, d=8)) == []


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (2, 7)])
def test_even_stages_take_as_long_as_is_known(p: int, m: int) -> None:
    """1F1B takes m + p - 1 intervals; in interleaved, the bubble is divided by the number of chunks."""
    assert play(even(p), p, m, 0.0).length_ms == pytest.approx(3 * (m + p - 1))
    for chunks in (2, 4):
        if m % p == 0:
            assert play(even(p * chunks), p, m, 0.0).length_ms == pytest.approx(3 * (m * chunks + p - 1))
    assert held_layers((1,) * p, p, m, False) == tuple(p - rank for rank in range(p))
    assert play(even(p), p, m, 0.0).work_ms == (3.0 * m,) * p


def test_a_transfer_delays_the_first_and_the_last_microbatch() -> None:
    assert play(even(4), 4, 1, 0.5).length_ms == pytest.approx(4 * 3 + 6 * 0.5)


def test_1f1b_takes_as_long_as_the_simulators_baseline() -> None:
    model = replace(model_preset("llama-3.1-8b"), layers=32)
    request = Request(model, Job(p=4, m=24), H100, 1e6)
    stock = next(one for one in stock_choices(request) if one.family == "1f1b")
    ours = choice_of(request, "baseline", "1f1b", 24)
    assert stock.iteration_ms == pytest.approx(ours.iteration_ms, rel=0.005)
    assert [one.total for one in stock.stages] == pytest.approx([one.total for one in ours.stages])


@pytest.mark.parametrize("shorter", [False, True])
def test_several_chunks_need_microbatches_that_divide(shorter: bool) -> None:
    """Megatron refuses others: 30 microbatches on 6 ranks make whole rounds, 32 do not."""
    for m, several in ((30, True), (32, False)):
        request = Request(model_preset("gemma-2-9b"), Job(p=6, m=m), H100, 1e6)
        kinds = [one.family for one in stock_choices(request, shorter=shorter)]
        assert any(kind.startswith("interleaved") for kind in kinds) == several
        assert any(kind.startswith("1f1b") for kind in kinds)


def test_layers_move_away_from_the_output_layer() -> None:
    request = Request(model_preset("gemma-2-9b"), Job(p=4, m=32), H100, 1e6)
    choices = {one.family: one for one in stock_choices(request)}
    by_hand = next(one for name, one in choices.items() if name.startswith("interleaved") and "hand" in name)
    baseline = choice_of(request, "baseline", "1f1b", 32)
    assert by_hand.iteration_ms < 0.85 * baseline.iteration_ms
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


def test_stages_have_the_work_of_their_layers_and_the_vocabularys() -> None:
    costs = estimated_costs(model_preset("llama-3.1-8b"), Job(p=4), H100)
    stages = stages_of(Layout("", 1, (9, 9, 9, 5), ()), 4, costs)
    layer = float(costs.F_ms) / 8  # type: ignore[arg-type]
    assert stages.forward[1] == pytest.approx(9 * layer)
    assert stages.forward[3] == pytest.approx(5 * layer + costs.last_rank_extra["F_ms"])
    assert stages.backward[0] > stages.backward[1]
