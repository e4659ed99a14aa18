"""``vocabpar simulate``: predict what a schedule takes, from its JSON form and the times of its passes."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_vocabpar.cli.files import write_output
from megatron_vocabpar.cli.simulate_report import as_json, as_text
from megatron_vocabpar.schedule.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.draw import Chart, draw_html, measured_times, planned_chart, read_timeline
from megatron_vocabpar.schedule.memory import BufferSizes
from megatron_vocabpar.schedule.schedule import Schedule
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.validate import validate

_HELP = """Check a schedule and predict its time, idle time and memory.

Transfers and collectives run beside the passes; those between the same two ranks in one direction, and
those of one group, take turns. The critical path says what the iteration's length is made of.
"""


@click.command("simulate", help=_HELP, short_help="Predict a schedule's time, idle time and memory.")
@click.argument("schedule_file", metavar="SCHEDULE.json")
@click.option(
    "--costs",
    "costs_file",
    default=None,
    metavar="FILE",
    help="Times of the passes, as JSON; with the model's shape in it, memory is given in MiB too.",
)
@click.option("--max-activations", type=float, default=None, help="Refuse more than these microbatches.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option("--html", "html_file", default=None, metavar="FILE", help="Also draw it, as a page to zoom in.")
@click.option(
    "--measured",
    "timeline_file",
    default=None,
    metavar="TIMELINE.json",
    help="What a training run measured: drawn below the plan; without --costs it gives the plan's times.",
)
def simulate_command(
    schedule_file: str,
    costs_file: str | None,
    max_activations: float | None,
    output_format: str,
    html_file: str | None,
    timeline_file: str | None,
) -> None:
    """Check a schedule and predict its time, idle time and memory."""
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    plan = plan_from_json(_read(schedule_file), costs)
    schedule = plan.schedule
    sizes = BufferSizes.load(costs_file, schedule.p) if costs_file is not None else None
    validate(schedule, max_activations)
    measured = read_timeline(timeline_file, schedule) if timeline_file is not None else None
    result = simulate(plan, _times(schedule, costs, measured))
    if html_file is not None:
        charts = [planned_chart(result, title=_title(schedule, measured), sizes=sizes)]
        page = draw_html([*charts, *([measured] if measured else [])])
        write_output(html_file, page, "--html")
    click.echo(as_json(result, sizes) if output_format == "json" else as_text(result, sizes))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"cannot read the schedule {path}: {reason}") from error


def _times(schedule: Schedule, costs: PassCosts | None, measured: Chart | None) -> PassTimes | None:
    """The given times, else the measured ones, else those of the plan."""
    if costs is not None:
        return PassTimes.of(costs, schedule)
    return None if measured is None else measured_times(measured, schedule)


def _title(schedule: Schedule, measured: Chart | None) -> str:
    title = f"{schedule.method.name}, p = {schedule.p}, m = {schedule.m}"
    return title if measured is None else f"{title}, planned"
