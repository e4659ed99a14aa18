"""``vocabpar plan``: which method and family, how fast, and does it fit; before a GPU is rented.

Exit code 0: something fits; 2: nothing does (what would is said), or bad input.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import click
from rich.console import Console

from megatron_vocabpar.cli.files import FORMAT, write_output
from megatron_vocabpar.plan.hardware import hardware_named, hardware_presets
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.options import Request
from megatron_vocabpar.plan.read_model import (
    Arguments,
    load_config,
    model_from_arguments,
    model_preset,
    model_presets,
    read_arguments,
    read_script,
    whole,
)
from megatron_vocabpar.plan.tables import advice_json, advise, print_advice
from megatron_vocabpar.plan.times import Job
from megatron_vocabpar.schedule.times.costs import PassCosts

_WORKERS = 4
_FILE_COLUMNS = 100  # of the tables where they are not shown on a terminal


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.option("--preset", help=f"A model: {', '.join(model_presets())}.")
@click.option("--config", "config_file", metavar="FILE", help="A Hugging Face config.json.")
@click.option("--script", metavar="FILE", help="A launch script: Megatron's arguments in its text.")
@click.option("--hardware", default="H100", help=f"One of {', '.join(hardware_presets())}.")
@click.option("--costs", "costs_file", metavar="FILE", help="Measured times of the passes, as JSON.")
@click.option("--pp", type=int, help="Pipeline size; by default the arguments', or 8.")
@click.option("--tp", type=int, help="Tensor parallel size; by default the arguments', or 1.")
@click.option("--dp", type=int, default=1, help="Data parallel size.")
@click.option("--ep", type=int, help="Expert parallel size; by default the arguments', or 1.")
@click.option("--microbatches", type=int, help="Of an iteration and replica; by default 128.")
@click.option("--micro-batch-size", type=int, help="Sequences of a microbatch.")
@click.option("--seq-length", type=int, help="Tokens of a sequence.")
@click.option(
    "--mtp-depths", type=click.IntRange(0), help="Heads of multi-token prediction, whatever the model has."
)
@click.option("--memory-gib", type=float, help="What a GPU may hold; by default all that it has.")
@click.option("--distributed-optimizer", is_flag=True, help="Divide optimizer states over the replicas.")
@click.option("--recompute", is_flag=True, help="Full recomputation of activations.")
@FORMAT
@click.option("--html", "html_file", metavar="FILE", help="Also write a page with memory and schedules.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- MEGATRON ARGUMENTS]")
@click.pass_context
def plan_command(
    ctx: click.Context,
    hardware: str,
    costs_file: str | None,
    memory_gib: float | None,
    output_format: str,
    html_file: str | None,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Which method in which family: time, MFU, memory of each stage, launch line, and why.

    The model is a preset, a config.json, a launch script, or Megatron's arguments after --.
    """
    chosen = _ModelOptions(**{name: options.pop(name) for name in _ModelOptions._fields})
    given = read_arguments(arguments)
    if chosen.script is not None:
        given = read_script(chosen.script) | given
    source = chosen.script or "your arguments"
    model = _model(chosen, given, source)
    gpu = hardware_named(hardware)
    limit = gpu.memory_gib if memory_gib is None else memory_gib
    if not 0 < limit < math.inf:
        raise ValueError(f"--memory-gib {limit}: give more than 0")
    if chosen.seq_length is not None and chosen.seq_length < 1:
        raise ValueError(f"--seq-length {chosen.seq_length}: give at least 1")
    for name, value in options.items():
        if value is not None and value is not False and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give at least 1")
    costs = PassCosts.load(costs_file) if costs_file is not None else None
    request = Request(model, _job(given, source, options), gpu, limit, costs)
    advice = advise(request, workers=min(_WORKERS, os.cpu_count() or 1))
    if html_file is not None:
        from megatron_vocabpar.plan.page import draw_page

        write_output(html_file, draw_page(advice), "--html")
    if output_format == "json":
        click.echo(advice_json(advice))
    else:
        terminal = sys.stdout.isatty()
        print_advice(advice, Console(width=None if terminal else _FILE_COLUMNS, highlight=False))
    if advice.best is None:
        ctx.exit(2)


class _ModelOptions(NamedTuple):
    """The options that say which model it is."""

    preset: str | None
    config_file: str | None
    script: str | None
    seq_length: int | None
    mtp_depths: int | None


def _model(chosen: _ModelOptions, given: Arguments, source: str) -> Model:
    if sum(map(bool, (chosen.preset, chosen.config_file, given))) != 1:
        raise click.UsageError(
            "give one model: --preset, --config, --script, or Megatron's arguments after --"
        )
    seq_length = chosen.seq_length
    if chosen.preset is not None:
        model = model_preset(chosen.preset)
        if seq_length is not None:
            model = replace(model, seq_length=seq_length)
    elif chosen.config_file is not None:
        model = load_config(chosen.config_file, seq_length)
    else:
        length = {} if seq_length is None else {"seq-length": str(seq_length)}
        model = model_from_arguments(given | length, source)
    return model if chosen.mtp_depths is None else replace(model, mtp_depths=chosen.mtp_depths)


def _job(given: Arguments, source: str, sizes: dict[str, int | bool | None]) -> Job:
    """Options, then Megatron's arguments, then what is usual."""

    def size(option: str, flag: str, default: int) -> int:
        value = sizes[option]
        return whole(given, flag, source, default) if value is None else int(value)

    d, micro_batch = int(sizes["dp"] or 1), size("micro_batch_size", "micro-batch-size", 1)
    microbatches = 128
    if "global-batch-size" in given:
        batch = whole(given, "global-batch-size", source)
        microbatches = max(1, batch // (micro_batch * d))
    return Job(
        p=size("pp", "pipeline-model-parallel-size", 8),
        t=size("tp", "tensor-model-parallel-size", 1),
        d=d,
        e=size("ep", "expert-model-parallel-size", 1),
        m=microbatches if sizes["microbatches"] is None else int(sizes["microbatches"]),
        micro_batch=micro_batch,
        distributed_optimizer=bool(sizes["distributed_optimizer"]) or "use-distributed-optimizer" in given,
        recompute=bool(sizes["recompute"]) or given.get("recompute-granularity") == "full",
    )
