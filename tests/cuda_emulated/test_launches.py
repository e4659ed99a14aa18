"""How long collectives are resident beside layers, on the clocks of emulated GPUs and in the simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_vocabpar.pipeline import forward_backward
from megatron_vocabpar.schedule.draw.chart import Bar, Chart
from megatron_vocabpar.schedule.draw.measured import measured_times, read_timeline
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.residence import joined, resident_beside_layers, shared
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.passes import LAYERS
from megatron_vocabpar.schedule.words.schedule import NONE_LATE
from tests.cuda_emulated import jobs

JOB = replace(
    jobs.SMALL, pp=4, layers=32, hidden=64, heads=4, seq_length=64, vocab_size=8192, microbatches=12, steps=3
)


def launched_between_passes(_: int) -> None:
    """A fault to plant: nothing is launched between layers."""
    execute = forward_backward.execute

    def early(rank: int, program: Any, handlers: Any, observers: Any, *_: Any) -> None:
        execute(rank, program, handlers, observers)

    forward_backward.execute = early


def spans(bars: tuple[Bar, ...]) -> list[tuple[float, float]]:
    return [(bar.start_ms, bar.end_ms) for bar in bars]


def measured(chart: Chart) -> float:
    """Collectives that are resident beside layers, on average over ranks."""
    return fmean(
        shared(
            joined(spans(row.collectives)),
            joined(spans(tuple(bar for bar in row.passes if bar.item.type in LAYERS))),
        )
        for row in chart.rows
    )


def costs_of(times: PassTimes, method: str) -> dict[str, Any]:
    """A cost file of measured times, one stage a rank."""
    passes = {f"{type_.value}_ms": list(row) for type_, row in times.passes.items()}
    named = {name: passes[name] for name in ("F_ms", "B_ms", "IF_ms", "IB_ms")}
    output = {f"{type_.value}_ms": passes[f"{type_.value}_ms"] for type_ in method_named(method).passes}
    comms = sorted(times.comms.values())
    return {
        **named,
        "W_ms": 0.0,
        "methods": {method: {name: row for name, row in output.items() if name != "L_ms"}},
        "broadcast_ms": comms[len(comms) // 2],
        "all_reduce_ms": comms[len(comms) // 2],
    }


@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_the_clocks_show_what_the_simulation_says(method: str, tmp_path: Path) -> None:
    """Both within a quarter, launched between passes and between layers, and the second has less."""
    job, found = replace(JOB, method=method), {}
    for name, plant in (("passes", launched_between_passes), ("layers", None)):
        outcome = jobs.run(job, tmp_path / name, plant=plant)
        assert outcome.well, outcome.message
        folder = tmp_path / name / method
        plan: Plan = plan_from_json((folder / "schedule.json").read_text())
        assert plan.late
        chart = read_timeline(folder / "timeline.json", plan.schedule)
        times = measured_times(chart, plan.schedule)
        played = plan if plant is None else replace(plan, late=NONE_LATE)
        simulated = fmean(resident_beside_layers(simulate(played, times).events))
        found[name] = measured(chart), simulated
        costs = tmp_path / "costs.json"
        costs.write_text(json.dumps(costs_of(times, method)))
        job = replace(job, costs=str(costs))
    for of_clocks, of_simulation in found.values():
        assert of_clocks == pytest.approx(of_simulation, rel=0.25)
    assert found["layers"][0] < 0.6 * found["passes"][0]
