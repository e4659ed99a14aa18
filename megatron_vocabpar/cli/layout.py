"""``vocabpar layout``: the fastest layout of layers for Megatron's own schedules.

Exit code 0: a layout fits; 1: none does, and what would is said; 2: bad input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import click

from megatron_vocabpar.cli.files import FORMAT, click_options
from megatron_vocabpar.cli.given_layout import checked_layout
from megatron_vocabpar.cli.job_options import LayoutOptions, checked_options
from megatron_vocabpar.cli.plan import (
    MEGATRON_ARGUMENTS,
    NOTHING_FITS,
    WORKERS,
    given_of,
    hardware_of,
    model_of,
)
from megatron_vocabpar.cli.plan_gpus import progress_bar, question_of, switches_of
from megatron_vocabpar.plan.advice import nothing_fits, remedies, sizes_of, stock_best
from megatron_vocabpar.plan.answer import choice_json, folded
from megatron_vocabpar.plan.choice import Choice, Request, costs_of
from megatron_vocabpar.plan.choice_flags import flags_of
from megatron_vocabpar.plan.choices import all_choices, best_of
from megatron_vocabpar.plan.configurations import best_configurations
from megatron_vocabpar.plan.job import refused
from megatron_vocabpar.plan.layer_counts import StockLayout, layouts_of
from megatron_vocabpar.plan.plays import play_in_full, play_stock, quick_stock_choices, stock_choice
from megatron_vocabpar.plan.read_arguments import job_from_arguments
from megatron_vocabpar.plan.stage_memory import GIB
from megatron_vocabpar.plan.variants import Question, Variants
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule


@dataclass(frozen=True)
class LayoutAnswer:
    """The best layout of Megatron's own schedules, and what it is compared with.

    Attributes:
        best: the fastest layout that fits; else the fastest, with the memory that it would need; None if a
            search found nothing that fits.
        given: the layout of ``--check``, if there is one.
        ours: this package's fastest schedule in the same configuration, or on the same GPUs in a search.
        remedies: sentences on what would fit, where nothing does.
        sizes_chosen: the job is not the given one: the search or the memory decided on parts of it.
    """

    best: Choice | None
    given: Choice | None = None
    ours: Choice | None = None
    remedies: Sequence[str] = ()
    sizes_chosen: bool = False

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.fits


@click.command("layout", params=click_options(LayoutOptions))
@FORMAT
@MEGATRON_ARGUMENTS
@click.pass_context
def layout_command(
    ctx: click.Context, output_format: str, arguments: tuple[str, ...], **options: Any
) -> None:
    """The flag that places the layers of Megatron's own 1F1B or interleaved schedule.

    Layers, embedding, output layer and heads are balanced by time, within the memory. If no layout fits with
    the given sizes, activations are recomputed and the optimizer's states moved to the host, unless you have
    decided on these. With --gpus the sizes are searched, too. All is estimated.
    """
    options = checked_options(LayoutOptions, options)
    given = given_of(options, arguments)
    model, gpu = model_of(options, given), hardware_of(options)
    limit_gib = options["memory_gib"] or gpu.memory_gib
    if options["gpus"] is not None:
        answer = _searched(question_of(model, given, gpu, limit_gib, options), options)
    else:
        job = job_from_arguments(given, options)
        for problem in refused(model, job):
            raise ValueError(problem)
        answer = _answer(Request(model, job, gpu, limit_gib), switches_of(given, options, job), options)
    click.echo(_as_json(answer) if output_format == "json" else "\n".join(_lines(answer, options)))
    if not answer.fits:
        ctx.exit(NOTHING_FITS)


def _searched(question: Question, options: dict[str, Any]) -> LayoutAnswer:
    """The fastest of Megatron's own over all parallel configurations of some GPUs."""
    for name, flag in (("chunks", "--chunks"), ("given_layout", "--check")):
        if options[name] is not None:
            raise click.UsageError(
                f"{flag} cannot be combined with --gpus; leave it out, or give --pp instead"
            )
    with progress_bar() as progress:
        choices = best_configurations(question, workers=min(WORKERS, os.cpu_count() or 1), progress=progress)
    best = stock_best(choices)
    ours = next((choice for choice in choices if not choice.stock), None)
    return LayoutAnswer(best, ours=ours, remedies=() if best else [nothing_fits(question)], sizes_chosen=True)


def _answer(request: Request, decided: dict[str, Any], options: dict[str, Any]) -> LayoutAnswer:
    """The best layout of a job whose sizes are given."""
    job, chunks, given_layout = request.job, options["chunks"], options["given_layout"]
    checked = None if given_layout is None else checked_layout(request, given_layout, "--check")
    question = Question(request.model, request.hardware, job.gpus, job.m * job.d, request.limit_gib, decided)
    best, changed = _best(request, chunks), request
    if not best.fits:
        found = _of_fastest_variant(question, request, chunks)
        best, changed = found or (best, request)

    def fitting(request: Request) -> Choice | None:
        choice = _best(request, None)
        return choice if choice.fits else None

    return LayoutAnswer(
        best,
        given=None if checked is None else play_stock(stock_choice(replace(changed, limit_gib=inf), checked)),
        ours=best_of(all_choices(changed)),
        remedies=() if best.fits else remedies(request, fitting),
        sizes_chosen=changed.job != job,
    )


def _of_fastest_variant(
    question: Question, request: Request, chunks: int | None
) -> tuple[Choice, Request] | None:
    """The fastest layout of all variants in which any fits, and the request with its variant."""

    def played(changed: Request, below_ms: float) -> list[Choice]:
        choices = quick_stock_choices(changed, _layouts(changed, chunks), below_ms)
        found = _fitting(choices)
        return [found] if found else choices

    found = Variants(question, request.job).fastest(None, played, inf)
    return (found[1][0], replace(request, job=found[0])) if found else None


def _best(request: Request, chunks: int | None) -> Choice:
    """The fastest layout that fits; else the fastest as it is estimated, with the memory that it would need.

    Raises:
        ValueError: if there is no layout of so many chunks.
    """
    layouts = _layouts(request, chunks)
    if fitting := _fitting(quick_stock_choices(request, layouts)):
        return fitting
    unlimited = quick_stock_choices(replace(request, limit_gib=inf), layouts)
    return replace(choose(unlimited, play_in_full, most=0)[0], request=request)


def _layouts(request: Request, chunks: int | None) -> list[StockLayout]:
    """The layouts of so many chunks.

    Raises:
        ValueError: if there are none.
    """
    model, job = request.model, request.job
    layouts = [layout for layout in layouts_of(request) if chunks in (None, layout.chunks)]
    if not layouts:
        raise ValueError(
            f"no layout of {model.layers} layers has {chunks} chunks on each of {job.p} ranks with {job.m} "
            "microbatches; give fewer --chunks, or --microbatches that --pp divides"
        )
    return layouts


def _fitting(choices: Sequence[Choice]) -> Choice | None:
    """The fastest that fits, played in full."""
    fitting = [choice for choice in choices if choice.fits]
    return choose(fitting, play_in_full, most=1)[0] if fitting else None


def _lines(answer: LayoutAnswer, options: dict[str, Any]) -> Iterator[str]:
    """The answer for people to read."""
    best = answer.best
    if best is not None:
        request = best.request
        if not answer.fits:
            yield "Nothing fits. The fastest layout needs more memory:"
        sizes = f"{sizes_of(request.job)}, " if answer.sizes_chosen else ""
        yield (
            f"{request.model.name} on {request.job.p} stages of {request.hardware.name}, {best.name}, {sizes}"
            f"{request.job.m} microbatches of {request.job.micro_batch} x {request.model.seq_length} tokens:"
        )
        yield _description(best)
        flags = flags_of(best) if answer.sizes_chosen else best.flags
        yield folded(flags) or "no flag: the layers are even"
        if answer.given is not None:
            slower = answer.given.iteration_ms / best.iteration_ms - 1.0
            yield f"{options['given_layout']}: {_description(answer.given)}; {slower:+.1%}"
    if answer.ours is not None:
        sizes = f" with {sizes_of(answer.ours.request.job)}" if options["gpus"] else ""
        yield f"this package's {answer.ours.name}{sizes}: {_figures(answer.ours)}"
    if not answer.fits:
        yield "Nothing fits. What would:" if best is None else "What would fit:"
        yield from (f"- {line}" for line in answer.remedies or ["nothing that was tried; use --gpus"])


def _as_json(answer: LayoutAnswer) -> str:
    """The answer as one JSON object; times in ms, memory in GiB."""
    choices = {"best": answer.best, "given": answer.given, "ours": answer.ours}
    return json.dumps(
        {
            "fits": answer.fits,
            **{name: None if choice is None else choice_json(choice) for name, choice in choices.items()},
            "would_fit": list(answer.remedies),
        },
        indent=1,
    )


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
