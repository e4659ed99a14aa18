"""``vocabpar schedule``: generate a schedule, and print or draw it."""

from __future__ import annotations

import shutil
import sys

import click

from megatron_vocabpar.cli.files import write_output
from megatron_vocabpar.schedule.costs import PassCosts
from megatron_vocabpar.schedule.draw import (
    draw_html,
    draw_image,
    draw_text,
    draw_trace,
    planned_chart,
    svg_of,
)
from megatron_vocabpar.schedule.families import SEARCH, families
from megatron_vocabpar.schedule.generate import generate
from megatron_vocabpar.schedule.memory import BufferSizes
from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.schedule.schedule import Schedule
from megatron_vocabpar.schedule.serialize import to_json
from megatron_vocabpar.schedule.simulate import Simulation, simulate

_FILE_WIDTH = 160  # columns of the text form where it is not shown on a terminal
_BINARY = ("png", "pdf")


@click.command("schedule", help="Generate a schedule; print it or draw it in time.")
@click.option("--method", default="vocab-2", show_default=True, help=f"One of {', '.join(METHODS)}.")
@click.option("--pp", "p", type=int, default=4, show_default=True, help="Pipeline size.")
@click.option("--microbatches", "m", type=int, default=8, show_default=True, help="Microbatches.")
@click.option(
    "--family", default="1f1b", show_default=True, help=f"One of {', '.join((*families(), SEARCH))}."
)
@click.option(
    "--chunks", type=int, default=None, help="Model chunks on each rank; by default the family's own."
)
@click.option("--costs", "costs_file", default=None, metavar="FILE", help="Times of the passes, as JSON.")
@click.option("--max-activations", type=float, default=None, help="Most microbatches a rank may hold.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "svg", "png", "pdf", "html", "trace"]),
    default="text",
    show_default=True,
    help="A time grid, the passes as data, a picture, a page to zoom in, or a timeline for a trace viewer.",
)
@click.option(
    "--width",
    type=click.IntRange(min=100),
    default=None,
    help="Most pixels of time in a picture; by default passes are wide enough to be read.",
)
@click.option("--output", default=None, metavar="FILE", help="Write there instead of to the terminal.")
def schedule_command(
    method: str,
    p: int,
    m: int,
    family: str,
    chunks: int | None,
    costs_file: str | None,
    max_activations: float | None,
    output_format: str,
    width: int | None,
    output: str | None,
) -> None:
    """Generate a schedule; print it or draw it."""
    if output is None and output_format in _BINARY:
        raise ValueError(f"--format {output_format} is no text; give --output FILE")
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    sizes = BufferSizes.load(costs_file, p) if costs_file is not None else None
    schedule = generate(
        method, p, m, family=family, chunks=chunks, costs=costs, max_activations=max_activations
    )
    on_terminal = output is None and sys.stdout.isatty()
    content = render(schedule, costs, output_format, sizes=sizes, width=width, on_terminal=on_terminal)
    if output is not None:
        write_output(output, content)
    else:
        click.echo(content)


def render(
    schedule: Schedule,
    costs: PassCosts | None,
    output_format: str,
    *,
    sizes: BufferSizes | None = None,
    width: int | None = None,
    on_terminal: bool,
) -> str | bytes:
    """The schedule in one of the formats of ``--format``; ``width`` is in pixels."""
    if output_format == "json":
        return to_json(schedule)
    simulation = simulate(schedule, costs)
    if output_format == "trace":
        return draw_trace(schedule, simulation=simulation)
    if output_format == "text":
        columns = shutil.get_terminal_size().columns if on_terminal else _FILE_WIDTH
        grid = draw_text(schedule, width=columns, colour=on_terminal, simulation=simulation)
        return f"{_summary(schedule, simulation)}\n\n{grid}"
    charts = [planned_chart(schedule, simulation, sizes=sizes)]
    if output_format == "html":
        return draw_html(charts)
    if output_format == "svg":
        return svg_of(charts, width)
    return draw_image(charts, output_format, width)


def _summary(schedule: Schedule, simulation: Simulation) -> str:
    method = METHODS[schedule.method]
    barriers = f"{method.barriers} barrier{'' if method.barriers == 1 else 's'}"
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    bubbles = " ".join(f"{100 * bubble:.1f}" for bubble in simulation.bubble)
    return (
        f"{schedule.method} ({barriers}), p = {schedule.p}, m = {schedule.m}: "
        f"{simulation.iteration_ms:.1f} ms an iteration\n"
        f"idle time of each rank, %:              {bubbles}\n"
        f"peak activations, microbatches:         {peaks}"
    )
