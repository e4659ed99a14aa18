"""``vocabpar schedule``: generate a schedule, and print or draw it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from megatron_vocabpar.schedule.costs import PassCosts
from megatron_vocabpar.schedule.draw import draw_svg, draw_text, draw_trace
from megatron_vocabpar.schedule.families import families
from megatron_vocabpar.schedule.generate import generate
from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.schedule.schedule import Schedule
from megatron_vocabpar.schedule.serialize import to_json
from megatron_vocabpar.schedule.simulate import Simulation, simulate

_FILE_WIDTH = 160  # columns of the text form where it is not shown on a terminal


@click.command("schedule", help="Generate a schedule; print it or draw it in time.")
@click.option("--method", default="vocab-2", show_default=True, help=f"One of {', '.join(METHODS)}.")
@click.option("--pp", "p", type=int, default=4, show_default=True, help="Pipeline size.")
@click.option("--microbatches", "m", type=int, default=8, show_default=True, help="Microbatches.")
@click.option("--family", default="1f1b", show_default=True, help=f"One of {', '.join(families())}.")
@click.option("--chunks", type=int, default=1, show_default=True, help="Model chunks on each rank.")
@click.option("--costs", "costs_file", default=None, metavar="FILE", help="Times of the passes, as JSON.")
@click.option("--max-activations", type=float, default=None, help="Most microbatches a rank may hold.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "svg", "trace"]),
    default="text",
    show_default=True,
    help="A time grid, the passes as data, a picture, or a timeline for a trace viewer.",
)
@click.option("--output", default=None, metavar="FILE", help="Write there instead of to the terminal.")
def schedule_command(
    method: str,
    p: int,
    m: int,
    family: str,
    chunks: int,
    costs_file: str | None,
    max_activations: float | None,
    output_format: str,
    output: str | None,
) -> None:
    """Generate a schedule; print it or draw it."""
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    schedule = generate(
        method, p, m, family=family, chunks=chunks, costs=costs, max_activations=max_activations
    )
    text = render(schedule, costs, output_format, on_terminal=output is None and sys.stdout.isatty())
    if output is None:
        click.echo(text)
        return
    try:
        Path(output).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error.strerror}; give another --output") from error


def render(schedule: Schedule, costs: PassCosts | None, output_format: str, *, on_terminal: bool) -> str:
    """The schedule in one of the formats of ``--format``."""
    if output_format == "json":
        return to_json(schedule)
    if output_format == "svg":
        return draw_svg(schedule, costs)
    if output_format == "trace":
        return draw_trace(schedule, costs)
    simulation = simulate(schedule, costs)
    width = shutil.get_terminal_size().columns if on_terminal else _FILE_WIDTH
    grid = draw_text(schedule, width=width, colour=on_terminal, simulation=simulation)
    return f"{_summary(schedule, simulation)}\n\n{grid}"


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
