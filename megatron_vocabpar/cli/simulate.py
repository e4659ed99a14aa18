"""``vocabpar simulate``: predict what a schedule takes, from its JSON form and the times of its passes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from megatron_vocabpar.cli.files import FORMAT, garbage_collection_paused, read_plan, tell, write_output
from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.draw import (
    WHY_THEY_DIFFER,
    draw_html,
    measured_times,
    name_of,
    planned_chart,
    read_timeline,
)
from megatron_vocabpar.schedule.play.critical_path import Step, time_by_rank, time_by_type
from megatron_vocabpar.schedule.play.memory import (
    BUFFERS,
    EMBEDDED_INPUTS,
    INPUT_GRADIENTS,
    SOFTMAX_SHARDS,
    WEIGHT_INPUTS,
    BufferSizes,
    peak_memory,
)
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes

_COLUMNS = "rank    busy ms  idle %  activations  held for W  softmax  inputs  gradients"
_FIELDS = ("busy_ms", "bubble", "idle_ms", "peak_activations")
_PEAKS = (SOFTMAX_SHARDS, EMBEDDED_INPUTS, INPUT_GRADIENTS)


@click.command("simulate")
@click.argument("schedule_file", metavar="SCHEDULE.json")
@click.option(
    "--costs",
    "costs_file",
    metavar="FILE",
    help="Times of the passes, as JSON; with the model's shape in it, memory is given in MiB too.",
)
@click.option("--max-activations", type=float, help="Refuse more than these microbatches.")
@FORMAT
@click.option(
    "--html", "html_file", metavar="FILE", help="Also draw it, as a page to zoom in; - is standard output."
)
@click.option(
    "--measured",
    "timeline_file",
    metavar="TIMELINE.json",
    help="What a training run measured: drawn below the plan; without --costs it gives the plan's times.",
)
@garbage_collection_paused()
def simulate_command(
    schedule_file: str,
    costs_file: str | None,
    max_activations: float | None,
    output_format: str,
    html_file: str | None,
    timeline_file: str | None,
) -> None:
    """Check a schedule and predict its time, idle time and memory.

    Transfers and collectives run beside the passes; those between the same two ranks in one direction, and
    those of one group, take turns. The critical path says what the iteration's length is made of.
    """
    inputs = {Path(file).resolve() for file in (schedule_file, costs_file, timeline_file) if file is not None}
    if html_file not in (None, "-") and Path(html_file).resolve() in inputs:
        raise ValueError(f"--html {html_file} would overwrite an input; give another file")
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    plan = read_plan(schedule_file, costs)
    schedule = plan.schedule
    sizes = BufferSizes.load(costs_file, schedule.p) if costs_file is not None else None
    validate(schedule, max_activations)
    measured = read_timeline(timeline_file, schedule) if timeline_file is not None else None
    times = None if measured is None else measured_times(measured, schedule)
    result = simulate(plan, times if costs is None else PassTimes.of(costs, schedule))
    if html_file is not None:
        title = name_of(schedule)
        planned = planned_chart(result, title=f"{title}, planned" if measured else title, sizes=sizes)
        page = draw_html([planned, measured], note=WHY_THEY_DIFFER) if measured else draw_html([planned])
        write_output(html_file, page, "--html")
        if html_file != "-":
            tell(f"wrote {html_file}")
    answer = as_json(result, sizes) if output_format == "json" else as_text(result, sizes)
    click.echo(answer, err=html_file == "-")  # beside a page on standard output


def as_json(result: Simulation, sizes: BufferSizes | None) -> str:
    """Everything, as one JSON object: times in ms, peaks in microbatches (and MiB where sizes are known)."""
    path, p = result.critical_path, result.schedule.p
    return json.dumps(
        {
            "iteration_ms": result.iteration_ms,
            "ranks": [_rank(result, rank, sizes) for rank in range(p)],
            "critical_path": {
                "ms_by_type": time_by_type(path),
                "ms_by_rank": time_by_rank(path, p),
                "steps": [_step(step) for step in path],
            },
        },
        indent=1,
    )


def _rank(result: Simulation, rank: int, sizes: BufferSizes | None) -> dict[str, Any]:
    row = {name: getattr(result, name)[rank] for name in _FIELDS}
    row["peak_weight_inputs"] = result.peak(WEIGHT_INPUTS)[rank] / result.schedule.chunks
    row |= {f"peak_{buffer}": result.peak(buffer)[rank] for buffer in _PEAKS}
    if sizes is not None:
        peak = peak_memory(result.alive[rank], sizes, result.schedule.chunks)
        row["peak_memory_mib"], row["memory_at_peak_mib"] = peak.mib, dict(peak.parts)
    return row


def _step(step: Step) -> dict[str, Any]:
    return {"item": str(step.item), "rank": step.rank, "start_ms": step.start_ms, "end_ms": step.end_ms}


def as_text(result: Simulation, sizes: BufferSizes | None) -> str:
    """Tables: each rank's time and peaks, its memory, its waiting, and the critical path."""
    path, p = result.critical_path, result.schedule.p
    weight_inputs = [peak / result.schedule.chunks for peak in result.peak(WEIGHT_INPUTS)]
    shards, inputs, gradients = map(result.peak, _PEAKS)
    rows = [
        f"{rank:>4} {result.busy_ms[rank]:>10.1f} {100 * result.bubble[rank]:>7.1f} "
        f"{result.peak_activations[rank]:>12g} {weight_inputs[rank]:>11g} "
        f"{shards[rank]:>8} {inputs[rank]:>7} {gradients[rank]:>10}"
        for rank in range(p)
    ]
    by_rank = ", ".join(f"{rank}: {ms:.1f}" for rank, ms in enumerate(time_by_rank(path, p)) if ms)
    return "\n".join(
        [
            f"{result.iteration_ms:.1f} ms an iteration",
            "",
            _COLUMNS,
            *rows,
            "activations (F to B, or to W) and the buffers after them: the most microbatches alive at once",
            *(_memory(result, sizes) if sizes is not None else ()),
            "",
            "idle ms of each rank, by what it waited for ('end': after its last pass)",
            *(f"{rank:>4}  {_parts(result.idle_ms[rank])}" for rank in range(p)),
            "",
            f"critical path, {len(path)} steps: {_parts(time_by_type(path))}",
            f"of it in passes of rank {by_rank}",
        ]
    )


def _memory(result: Simulation, sizes: BufferSizes) -> list[str]:
    lines = ["", "peak MiB of each rank (weights and optimizer apart), and what it is made of"]
    for rank, alive in enumerate(result.alive):
        peak = peak_memory(alive, sizes, result.schedule.chunks)
        parts = {name.replace("_", " "): peak.parts[name] for name in BUFFERS if peak.parts[name]}
        lines.append(f"{rank:>4} {peak.mib:>10.0f}  {_parts(parts)}")
    return lines


def _parts(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items()) or "none"
