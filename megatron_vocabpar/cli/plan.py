"""``vocabpar plan``: which method and family, how fast, and does it fit; before a GPU is rented.

Exit code 0: something fits; 1: nothing does, and what would is said; 2: bad input.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from megatron_vocabpar.cli.files import FORMAT, click_options, tell
from megatron_vocabpar.cli.given_layout import layout_of_arguments, recomputed_with
from megatron_vocabpar.cli.job_options import PlanOptions, checked_options
from megatron_vocabpar.plan.answer import answer_for_job, answer_json, print_answer
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.given import Given, read_words
from megatron_vocabpar.plan.hardware import Hardware, hardware_named
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.price import Price, read_measured, usual_price
from megatron_vocabpar.plan.read_arguments import (
    job_from_arguments,
    model_from_arguments,
    other_gpus,
    overruled,
    refuse_unknown_layers,
)
from megatron_vocabpar.plan.read_config import load_config, model_preset
from megatron_vocabpar.plan.read_script import STARTERS, read_script, run_script
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.text_tables import console

MEGATRON_ARGUMENTS = click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- MEGATRON ARGUMENTS]"
)
NOTHING_FITS = 1  # the exit code
WORKERS = 4
_COLUMNS = 100


@click.command("plan", params=click_options(PlanOptions))
@FORMAT
@MEGATRON_ARGUMENTS
@click.pass_context
def plan_command(ctx: click.Context, output_format: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Which method in which family: time, MFU, memory of each stage, flags, and why.

    The model is a preset, a config.json, a launch script, or Megatron's arguments after --. The plan
    lists what it does not use of them.
    """
    options = checked_options(PlanOptions, options)
    given = given_of(options, arguments)
    notes = overruled(given, options)
    model = model_of(options, given)
    gpu = hardware_of(options)
    limit = gpu.memory_gib if options["memory_gib"] is None else options["memory_gib"]
    if options["sources"]:
        from megatron_vocabpar.plan.advice import sources

        click.echo("\n".join(sources(gpu)), err=output_format == "json")
    if options["gpus"] is not None:
        from megatron_vocabpar.cli.plan_gpus import plan_gpus

        found = plan_gpus(model, given, gpu, limit, options, notes, output_format)
        ctx.exit(0 if found else NOTHING_FITS)
    job = job_from_arguments(given, options)
    costs, price = _measured(options["costs_file"])
    request = Request(model, job, gpu, limit, costs, price)
    own = layout_of_arguments(given, request)
    if own and not options["recompute"]:
        job = replace(job, recomputed=recomputed_with(given, job, own.layers))
        request = replace(request, job=job)
    notes += [*other_gpus(given, job.gpus), *unused(given, options)]
    answer = answer_for_job(request, notes, own, workers=min(WORKERS, os.cpu_count() or 1))
    if output_format == "json":
        click.echo(answer_json(answer))
    else:
        print_answer(answer, console(_COLUMNS))
    if answer.best is None:
        ctx.exit(NOTHING_FITS)


def _measured(file: str | None) -> tuple[PassCosts | None, Price]:
    """The passes' times in a cost file, and its price; a file may have the price alone."""
    price, costs = read_measured(file) if file else (None, None)
    return costs, price or usual_price()


def given_of(options: Mapping[str, Any], words: tuple[str, ...]) -> Given:
    """Megatron's arguments, those after ``--`` before the script's."""
    if words and not words[0].startswith("--"):
        raise click.UsageError(
            f"unexpected {words[0]!r}: a model is --preset, --config or --script; Megatron's arguments "
            "stand after --"
        )
    script, given = options["script"], read_words(words)
    if script is None:
        if options["run"]:
            raise click.UsageError("--run needs a --script FILE")
        return Given(given, "your arguments")
    if not options["run"]:
        return Given(read_script(script) | given, script)
    tell(f"Running {script}: {', '.join(STARTERS)} only record their arguments; other commands are run.")
    return Given(run_script(script) | given, script)


def model_of(options: dict[str, Any], given: Given) -> Model:
    """The model of a preset or a configuration, whose job may be a script's; else of Megatron's arguments."""
    preset, config, seq_length = options["preset"], options["config_file"], options["seq_length"]
    named = [flag for flag, value in (("--preset", preset), ("--config", config)) if value]
    if _layers_in(given):
        named.append(given.source)
    if len(named) != 1:
        raise click.UsageError(
            f"{' and '.join(named) or 'nothing'} given for the model; give one of --preset, --config, "
            "--script, or Megatron's arguments after --"
        )
    if not (preset or config):
        given.values.update({} if seq_length is None else {"seq-length": str(seq_length)})
        refuse_unknown_layers(given)
        model = model_from_arguments(given)
    else:
        if seq_length is None and "seq-length" in given:
            seq_length = given.number("seq-length")
        model = load_config(config, seq_length) if config else model_preset(preset)
        model = model if seq_length is None else replace(model, seq_length=seq_length)
    depths = options["mtp_depths"]
    return model if depths is None else replace(model, mtp_depths=depths)


def _layers_in(given: Given) -> bool:
    return any(name in given for name in ("num-layers", "hybrid-layer-pattern", "hybrid-override-pattern"))


def hardware_of(options: dict[str, Any]) -> Hardware:
    return hardware_named(options["hardware"]).connected(
        tflops=options["tflops"],
        link_gb_s=options["link_gb_s"],
        network_gb_s=options["network_gb_s"],
        per_node=options["gpus_per_node"],
    )


def unused(given: Given, options: dict[str, Any]) -> list[str]:
    """What was given and nothing read."""
    lines = given.unread()
    if options["costs_file"] is not None:
        asked = ("tflops", "link_gb_s", "network_gb_s", "gpus_per_node", "fp8", "fp4")
        named = [f"--{name.replace('_', '-')}" for name in asked if options[name]]
        lines += (
            [f"Not used beside --costs, but for memory and the step: {', '.join(named)}."] if named else []
        )
    return lines
