"""``vocabpar layout``: the fastest layout of layers for Megatron's own schedules.

Exit code 0: a layout fits; 1: none does; 2: bad input.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import click

from megatron_vocabpar.cli.files import click_options
from megatron_vocabpar.cli.job_options import LayoutOptions, checked_options
from megatron_vocabpar.cli.plan import MEGATRON_ARGUMENTS, NOTHING_FITS, given_of, hardware_of, model_of
from megatron_vocabpar.megatron_lm.layouts import heads_elsewhere, layers_of, other_order
from megatron_vocabpar.plan.choice import Choice, Request, costs_of
from megatron_vocabpar.plan.choices import all_choices, best_of
from megatron_vocabpar.plan.job import refused
from megatron_vocabpar.plan.layer_counts import StockLayout, layouts_of
from megatron_vocabpar.plan.plays import play_in_full, play_stock, quick_stock_choices, stock_choice
from megatron_vocabpar.plan.read_arguments import job_from_arguments
from megatron_vocabpar.plan.stage_memory import GIB
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule


@click.command("layout", params=click_options(LayoutOptions))
@MEGATRON_ARGUMENTS
@click.pass_context
def layout_command(ctx: click.Context, arguments: tuple[str, ...], **options: Any) -> None:
    """The flag that places the layers of Megatron's own 1F1B or interleaved schedule.

    Layers, embedding, output layer and heads are balanced by time, within the memory. All is estimated.
    """
    options = checked_options(LayoutOptions, options)
    chunks, given_layout = options["chunks"], options["given_layout"]
    given = given_of(options, arguments)
    model, gpu = model_of(options, given), hardware_of(options)
    job = job_from_arguments(given, options)
    for problem in refused(model, job):
        raise ValueError(problem)
    request = Request(model, job, gpu, options["memory_gib"] or gpu.memory_gib)
    checked = None if given_layout is None else _checked(request, given_layout)
    layouts = [layout for layout in layouts_of(request) if chunks in (None, layout.chunks)]
    if not layouts:
        raise ValueError(
            f"no layout of {model.layers} layers has {chunks} chunks on each of {job.p} ranks with {job.m} "
            "microbatches; give fewer --chunks, or --microbatches that --pp divides"
        )
    fitting = [choice for choice in quick_stock_choices(request, layouts) if choice.fits]
    if fitting:
        choice, *_ = choose(fitting, play_in_full, most=1)
    else:  # the fastest is printed as it is estimated, with the memory that it would need
        choice, *_ = choose(
            quick_stock_choices(replace(request, limit_gib=inf), layouts), play_in_full, most=0
        )
    ours = best_of(all_choices(request))  # impossible requests are refused before anything is printed
    click.echo(f"{model.name} on {job.p} stages of {gpu.name}, {choice.name}, {job.m} microbatches:")
    click.echo(_description(replace(choice, request=request)))
    click.echo(" ".join(choice.flags) or "no flag: the layers are even")
    if checked is not None:
        given_choice = play_stock(stock_choice(request, checked))
        slower = given_choice.iteration_ms / choice.iteration_ms - 1.0
        click.echo(f"{given_layout}: {_description(given_choice)}; {slower:+.1%}")
    if ours is not None:
        click.echo(f"this package's {ours.name}: {_figures(ours)}")
    if not fitting:
        ctx.exit(NOTHING_FITS)


def _checked(request: Request, layout: str) -> StockLayout:
    """The layout, if Megatron takes it.

    Raises:
        ValueError: if it has other layers, has them where Megatron does not, or cannot run the microbatches.
    """
    model, p = request.model, request.job.p
    counts = layers_of(layout)
    chunks, left = divmod(len(counts), p)
    if model.pattern:
        raise ValueError(
            f"--check {layout}: bars in its pattern place the layers of {model.name}; leave it out"
        )
    if order := other_order(layout, model.layers, model.mtp_depths):
        raise ValueError(
            f"--check {layout}: in order it has {order.given}, but {model.name} has {order.wanted}; write "
            "these letters, with | between stages"
        )
    if left:
        raise ValueError(f"--check {layout}: {len(counts)} stages; give a multiple of {p}")
    if chunks > 1 and (p == 1 or request.job.m % p):
        raise ValueError(
            f"--check {layout}: Megatron has no schedule of {chunks} model chunks on each of {p} ranks with "
            f"{request.job.m} microbatches; write {p} stages, or give --microbatches that --pp divides"
        )
    if heads_elsewhere(layout, p):
        raise ValueError(
            f"--check {layout}: Megatron keeps all m together, in the last model chunk of a rank; write them "
            f"into one of the last {p} stages"
        )
    return StockLayout("the given layout", chunks, counts, ())


def _description(choice: Choice) -> str:
    """A layout's time, memory, and how much more than the mean its busiest rank works."""
    request, p = choice.request, choice.request.job.p
    frame = Schedule(method_named(BASELINE), Placement(p, len(choice.layers) // p, "standard"), request.job.m)
    passes = PassTimes.of(costs_of(request, choice.layers), frame, splits_w=False).passes
    stage_ms = [sum(ms) for ms in zip(passes[PassType.F], passes[PassType.B], strict=True)]
    ranks = [sum(stage_ms[rank::p]) for rank in range(p)]
    busiest = max(ranks) * p / sum(ranks) - 1.0
    fits = "" if choice.fits else f", more than the {request.limit_gib:.1f} of a GPU"
    return f"{_figures(choice)}{fits}; the busiest rank works {busiest:.1%} more than the mean"


def _figures(choice: Choice) -> str:
    memory = f"{min(stage.total for stage in choice.stages) / GIB:.1f} to {choice.peak_gib:.1f} GiB a rank"
    return f"{choice.iteration_ms:,.0f} ms, idle {choice.idle:.1%}, {memory}"
