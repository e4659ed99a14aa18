"""``vocabpar plan --gpus``: search parallel configurations, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from megatron_vocabpar.cli.files import is_quiet, tell
from megatron_vocabpar.plan.answer import answer_for_gpus, answer_json, print_answer
from megatron_vocabpar.plan.configurations import best_configurations, usual_batch
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job, refused
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.read_arguments import job_from_arguments, other_gpus
from megatron_vocabpar.plan.variants import Question
from megatron_vocabpar.text_tables import console

_WORKERS = 4
_COLUMNS = 150
# Sizes that stay as they are where they are given: the field of Job, the option, Megatron's flag.
_SIZES = (
    ("p", "pp", "pipeline-model-parallel-size"),
    ("t", "tp", "tensor-model-parallel-size"),
    ("c", "cp", "context-parallel-size"),
    ("e", "ep", "expert-model-parallel-size"),
    ("micro_batch", "micro_batch_size", "micro-batch-size"),
)
_SWITCHES = (
    ("distributed_optimizer", ("use-distributed-optimizer",)),
    ("offload", ("optimizer-cpu-offload",)),
    ("fp8", ("fp8-format", "fp8")),
    ("fp4", ("fp4-format",)),
    ("flex_dispatcher", ("moe-token-dispatcher-type",)),
    ("recompute", ("recompute-granularity", "recompute-activations", "recompute-modules")),
    ("recomputed", ("recompute-method", "recompute-num-layers")),
    ("precision_aware", ("exp-avg-dtype",)),
    ("tp_overlap", ("tp-comm-overlap",)),
)


def plan_gpus(
    model: Model,
    given: Given,
    gpu: Hardware,
    limit_gib: float,
    options: Mapping[str, Any],
    notes: Sequence[str],
    output_format: str,
) -> bool:
    """Print the best configurations, with ``notes`` on what was given; whether anything fits."""
    question = question_of(model, given, gpu, limit_gib, options)
    notes = [*notes, *other_gpus(given, question.gpus), *given.unread()]
    with progress_bar() as progress:
        choices = best_configurations(question, workers=min(_WORKERS, os.cpu_count() or 1), progress=progress)
    answer = answer_for_gpus(question, choices, notes)
    if output_format == "json":
        click.echo(answer_json(answer))
    else:
        print_answer(answer, console(_COLUMNS))
    return bool(choices)


def question_of(
    model: Model, given: Given, gpu: Hardware, limit_gib: float, options: Mapping[str, Any]
) -> Question:
    """The question: the sizes and settings that are given stay."""
    unusable = [name for name in ("dp", "microbatches", "costs_file") if options.get(name)]
    if unusable:
        named = ", ".join(f"--{name.replace('_file', '').replace('_', '-')}" for name in unusable)
        raise click.UsageError(f"{named} cannot be combined with --gpus; leave it out, or leave --gpus out")
    gpus = int(options["gpus"])
    job = job_from_arguments(given, {**options, "dp": 1, "ep": 1, "microbatches": 1})
    batch = options["global_batch_size"] or given.number("global-batch-size", 0) or usual_batch(model, gpus)
    fixed: dict[str, Any] = {
        name: options[option] or given.number(flag)
        for name, option, flag in _SIZES
        if options[option] or flag in given
    }
    fixed |= switches_of(given, options, job)
    _check_sizes(model, gpus, fixed)
    return Question(model, gpu, gpus, int(batch), limit_gib, fixed)


def switches_of(given: Given, options: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The settings of a job that are given, by the names of its fields; the others may be changed."""
    return {
        name: getattr(job, name)
        for name, flags in _SWITCHES
        if options.get(name) or any(flag in given for flag in flags)
    }


def _check_sizes(model: Model, gpus: int, fixed: Mapping[str, Any]) -> None:
    """Refuse sizes that no configuration of these GPUs can have, by ValueError with the arithmetic."""
    p, t, c, e = (int(fixed.get(name, 1)) for name in "ptce")
    if gpus % (p * t * c):
        raise ValueError(
            f"p {p} x t {t} x c {c} = {p * t * c} GPUs of a replica do not divide the {gpus} GPUs; give "
            "another number of GPUs (--gpus), or other sizes (--pp, --tp, --cp)"
        )
    for problem in refused(model, Job(p=p, t=t, c=c, d=gpus // (p * t * c), e=e, m=1)):
        raise ValueError(problem)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar that counts on a terminal, else a line."""
    terminal = Console(stderr=True)
    if is_quiet() or not terminal.is_terminal:
        tell("searching parallel configurations; this takes up to a minute")
        yield lambda done, of: None
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=terminal, transient=True) as progress:
        task = progress.add_task("parallel configurations", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
