"""The planner beside published trainings: the error that ``docs/plan.md`` says; what a dispatcher changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from click.testing import CliRunner

from lab.fit import starting_values, with_values
from lab.pairs import configurations, schedules
from lab.pairs import table as pairs_table
from lab.published_runs import errors, published_runs, schedules_table
from lab.rates import in_short
from lab.verbs.rates import rates_command
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.price import pair_error
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.times import layer_ms

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_a_third_of_the_runs_is_held_out_by_the_hash_of_their_sizes() -> None:
    runs = published_runs()
    assert all(run.held_out == run.is_held_out for run in runs)
    assert 0.28 < mean(run.held_out for run in runs) < 0.38
    for kind in ("dense", "experts"):
        assert 0.2 < mean(run.held_out for run in runs if run.kind == kind) < 0.45
    assert all(run.source for run in runs)


@pytest.mark.slow
def test_published_runs_are_met_as_the_page_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    said = CliRunner().invoke(rates_command).stdout
    assert [
        line for line in in_short(list(errors(published_runs()))) if line not in page or line not in said
    ] == []


@pytest.mark.slow
def test_sharded_runs_are_met_though_nothing_was_fitted_to_them() -> None:
    found = [abs(error) for run, error in errors(run for run in published_runs() if run.fsdp)]
    assert len(found) >= 15
    assert mean(found) < 0.12


@pytest.mark.slow
def test_pairs_are_met_as_the_page_and_the_planner_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in (*schedules_table(), *pairs_table()) if row not in page] == []
    for alike, found in ((True, schedules()), (False, configurations())):
        for kind, of_kind in found.items():
            assert pair_error(kind, alike=alike) == pytest.approx(mean(map(abs, of_kind)), abs=6e-4)


def test_sorting_within_the_exchange_takes_less_time_than_beside_it() -> None:
    run = next(run for run in published_runs() if run.model == "qwen3-30b-a3b" and run.flex)
    gpu = run.gpu
    within = layer_ms(run.planned, replace(run.job, graphed=True), gpu)
    beside = layer_ms(run.planned, replace(run.job, graphed=True, flex_dispatcher=False), gpu)
    assert (within.products, within.attention) == (beside.products, beside.attention)
    tokens = run.seq_length * run.micro_batch
    copied = 2 * tokens * run.planned.exchanged_width / (gpu.memory_gb_s * 1e6)  # bytes over bytes a ms
    more = (gpu.rates.moved - gpu.rates.moved_flex) * copied
    assert beside.traffic - within.traffic == pytest.approx(more)


@pytest.mark.parametrize("name", ["H100", "B200", "GB200", "B300", "GB300"])
def test_the_values_of_the_fit_are_those_that_the_planner_has(name: str) -> None:
    gpu = hardware_named(name)
    rates, again = gpu.rates, with_values(gpu, starting_values()).rates
    for share in (
        "layers",
        "fp8_layers",
        "experts",
        "fp8_experts",
        "attention",
        "output",
        "traffic",
        "moved",
    ):
        assert getattr(again, share) == pytest.approx(getattr(rates, share), rel=1e-3)


def test_a_graph_of_the_whole_iteration_leaves_nothing_to_wait_for() -> None:
    """A layer of Qwen3-30B computes 4,096 tokens in less time than its kernels take to start."""
    model, gpu = model_preset("qwen3-30b-a3b"), hardware_named("GB200")
    job = Job(p=1, e=8, d=8, fp8=True, flex_dispatcher=True)
    waiting, graphed = layer_ms(model, job, gpu), layer_ms(model, replace(job, graphed=True), gpu)
    passes_ms = graphed.forward + graphed.backward + graphed.weights
    computing = passes_ms - 2 * graphed.exchange
    assert graphed.launch == 0.0
    assert 3 * waiting.launch == pytest.approx(gpu.rates.launch_ms - computing)
    assert layer_ms(model, replace(job, micro_batch=8), gpu).launch == 0.0
