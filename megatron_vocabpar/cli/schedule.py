"""``vocabpar schedule``: generate a schedule; print it, draw it, or check that it cannot hang."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from typing import Any

import click
from click.core import ParameterSource

from megatron_vocabpar.cli.files import completing, garbage_collection_paused, read_plan, tell, write_output
from megatron_vocabpar.schedule import draw
from megatron_vocabpar.schedule.make.bounds import least_ms
from megatron_vocabpar.schedule.make.families import SEARCH, families, family_of
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.hang import find_hangs, iteration_ms
from megatron_vocabpar.schedule.play.memory import BufferSizes
from megatron_vocabpar.schedule.serialize import plan_to_csv, plan_to_json, to_json
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import DEFAULT, METHODS
from megatron_vocabpar.schedule.words.schedule import MOST_FORWARDS

_FILE_WIDTH = 160  # columns of the text form where it is not shown on a terminal
_LAYERS = 8
_BETWEEN = f"launching between layers as trainings do, {_LAYERS} a pass"
_OF_A_FILE = ("schedule_file", "check", "costs_file", "output")
_LARGE = 8192  # microbatches of all ranks: planning takes more than a few seconds


@click.command("schedule")
@click.argument("schedule_file", metavar="[SCHEDULE.json]", required=False)
@click.option(
    "--method",
    default=DEFAULT,
    shell_complete=completing(METHODS),
    help=f"One of {', '.join(METHODS)}.",
)
@click.option("--pp", "p", type=int, default=4, help="Pipeline size.")
@click.option("--microbatches", "m", type=int, default=8, help="Microbatches.")
@click.option(
    "--family",
    default="1f1b",
    shell_complete=completing((*families(), SEARCH)),
    help=f"One of {', '.join((*families(), SEARCH))}.",
)
@click.option("--chunks", type=int, help="Model chunks on each rank; by default the family's own.")
@click.option("--costs", "costs_file", metavar="FILE", help="Times of the passes, as JSON.")
@click.option("--max-activations", type=float, help="Most microbatches a rank may hold.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "program", "csv", "svg", "html", "trace"]),
    default="text",
    help="A time grid; as data the passes, or the program with its communication; a picture; a page to zoom "
    "in; a timeline for a trace viewer.",
)
@click.option(
    "--check",
    type=click.Choice(["nccl"]),
    help="Instead of printing the schedule, or that of the file, try whether its program can hang on GPUs.",
)
@click.option(
    "--width",
    type=click.IntRange(min=100),
    help="Most pixels of time in a picture; by default passes are wide enough to be read.",
)
@click.option("--output", metavar="FILE", help="Write there instead of to the terminal.")
@garbage_collection_paused()
@click.pass_context
def schedule_command(
    ctx: click.Context,
    schedule_file: str | None,
    costs_file: str | None,
    output_format: str,
    check: str | None,
    width: int | None,
    output: str | None,
    method: str,
    **planned: Any,
) -> None:
    """Generate a schedule; print it or draw it in time.

    With --check a SCHEDULE.json can be given instead, such as that of a training.
    """
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    if schedule_file is not None:
        _check_alone(ctx, schedule_file)
        _write(hang_report(read_plan(schedule_file, costs)), output)
        return
    if _LARGE < (size := planned["p"] * planned["m"]) <= MOST_FORWARDS:
        tell(f"planning {planned['p']} ranks x {planned['m']} microbatches")
    named = families().get(planned["family"])
    if named is not None and named.pairs and (costs is None or not costs.hides):
        tell(f"{named.name}: nothing to hide, so no pairs; give --costs with hidden_ms, what a pair hides")
    plan = make_plan(method, **planned, costs=costs, progress=tell)
    if size > _LARGE and output_format not in ("json", "program", "csv"):
        tell(f"planned; now simulating and drawing {sum(map(len, plan.program)):,} instructions")
    sizes = BufferSizes.load(costs_file, plan.schedule.p) if costs_file is not None else None
    on_terminal = output is None and sys.stdout.isatty()
    family = planned["family"] if planned["family"] != SEARCH else family_of(plan.schedule)
    rendered = hang_report(plan) if check else render(plan, family, output_format, sizes, width, on_terminal)
    _write(rendered, output)


def render(
    plan: Plan,
    family: str,
    output_format: str,
    sizes: BufferSizes | None,
    width: int | None,
    on_terminal: bool,
) -> str:
    """The plan in one of the formats of ``--format``; ``width`` is in pixels."""
    if output_format == "json":
        return to_json(plan.schedule)
    if output_format == "program":
        return plan_to_json(plan)
    if output_format == "csv":
        return plan_to_csv(plan)
    simulation = simulate(plan)
    if output_format == "trace":
        return draw.draw_trace(simulation)
    if output_format == "text":
        columns = shutil.get_terminal_size().columns if on_terminal else _FILE_WIDTH
        grid = draw.draw_text(simulation, width=columns, colour=on_terminal)
        return f"{_summary(plan, family, simulation)}\n\n{grid}"
    charts = [draw.planned_chart(simulation, family=family, sizes=sizes)]
    if output_format == "html":
        return draw.draw_html(charts)
    return draw.draw_svg(draw.lay_out(charts, width))


def _summary(plan: Plan, family: str, simulation: Simulation) -> str:
    schedule, method = plan.schedule, plan.schedule.method
    barriers = f"{method.barriers} barrier{'' if method.barriers == 1 else 's'}"
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    bubbles = " ".join(f"{100 * bubble:.1f}" for bubble in simulation.bubble)
    pairs = Counter(schedule.rank_of(pair) for pair in schedule.pairs)
    shares = " ".join(f"{100 * pairs[rank] / schedule.chunks / schedule.m:.0f}" for rank in range(schedule.p))
    return (
        f"{method.name} ({barriers}), {family}, p = {schedule.p}, m = {schedule.m}: "
        f"{simulation.iteration_ms:.1f} ms an iteration; with this memory none takes less than "
        f"{least_ms(plan):.1f} ms\n"
        f"idle time of each rank, %:              {bubbles}\n"
        f"peak activations, microbatches:         {peaks}"
        + (f"\nF that run together with a B, %:        {shares}" if pairs else "")
    )


def _write(rendered: str, output: str | None) -> None:
    click.echo(rendered) if output is None else write_output(output, rendered)


def _check_alone(ctx: click.Context, schedule_file: str) -> None:
    """Refuse flags that a schedule of a file has no use for, or none that checks it."""
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if "check" not in given:
        raise ValueError(
            f"{schedule_file}: a file is only checked here; give --check nccl, or vocabpar simulate "
            f"{schedule_file}"
        )
    flags = {option.name: option.opts[0] for option in ctx.command.params if option.name not in _OF_A_FILE}
    if useless := [flag for name, flag in flags.items() if name in given]:
        raise ValueError(f"{', '.join(useless)}: the schedule is that of {schedule_file}; leave it out")


def hang_report(plan: Plan) -> str:
    """For training and evaluation, a line for each model: the iteration's time, or the ranks that hang."""
    parts = {"training": plan}
    if not plan.late:
        launched = plan.launched_late((_LAYERS,) * plan.schedule.placement.num_stages)
        parts |= {f"training, {_BETWEEN}": launched} if launched.late else {}
    lines = []
    for name, part in (parts | {"evaluation": plan.forward_only}).items():
        schedule, program, late = part.schedule, part.program, part.late
        times = PassTimes.of(part.costs, schedule)
        lines.append(f"{name}:")
        for model, circle in find_hangs(schedule, program, late=late).items():
            length_ms = 0.0 if circle else iteration_ms(schedule, program, times, model, late=late)
            verdict = "hangs" if circle else f"no hang, {length_ms:.1f} ms"
            lines.append(f"  {model.name:<22}{verdict:<22}{model.summary}")
            lines += [f"      {wait}" for wait in circle]
    return "\n".join(lines)
