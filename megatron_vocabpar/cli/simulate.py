"""``vocabpar simulate``: predict what a schedule takes, from its JSON form and the times of its passes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from megatron_vocabpar.schedule.costs import PassCosts
from megatron_vocabpar.schedule.schedule import Schedule
from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.validate import validate


@click.command("simulate", help="Check a schedule and predict its time, idle time and memory.")
@click.argument("schedule_file", metavar="SCHEDULE.json")
@click.option("--costs", "costs_file", default=None, metavar="FILE", help="Times of the passes, as JSON.")
@click.option("--max-activations", type=float, default=None, help="Refuse more than these microbatches.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def simulate_command(
    schedule_file: str, costs_file: str | None, max_activations: float | None, output_format: str
) -> None:
    """Check a schedule and predict its time, idle time and memory."""
    try:
        text = Path(schedule_file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the schedule {schedule_file}: {error.strerror}") from error
    schedule = from_json(text)
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    validate(schedule, max_activations)
    result = simulate(schedule, costs)
    click.echo(_as_json(schedule, result) if output_format == "json" else _as_text(schedule, result))


def _as_json(schedule: Schedule, result: Simulation) -> str:
    ranks = [
        {
            "busy_ms": result.busy_ms[rank],
            "bubble": result.bubble[rank],
            "peak_activations": result.peak_activations[rank],
            "peak_softmax_shards": result.peak_softmax_shards[rank],
            "peak_embedded_inputs": result.peak_embedded_inputs[rank],
            "peak_input_gradients": result.peak_input_gradients[rank],
        }
        for rank in range(schedule.p)
    ]
    return json.dumps({"iteration_ms": result.iteration_ms, "ranks": ranks}, indent=1)


def _as_text(schedule: Schedule, result: Simulation) -> str:
    head = "rank    busy ms  idle %  activations  softmax  inputs  gradients"
    rows = [
        f"{rank:>4} {result.busy_ms[rank]:>10.1f} {100 * result.bubble[rank]:>7.1f} "
        f"{result.peak_activations[rank]:>12g} {result.peak_softmax_shards[rank]:>8} "
        f"{result.peak_embedded_inputs[rank]:>7} {result.peak_input_gradients[rank]:>10}"
        for rank in range(schedule.p)
    ]
    return "\n".join(
        [
            f"{result.iteration_ms:.1f} ms an iteration",
            head,
            *rows,
            "activations, softmax shards, embedded inputs and input gradients: the most microbatches alive",
        ]
    )
