"""``vocabpar plan``: which method and family, how fast, and does it fit; before a GPU is rented.

Exit code 0: something fits; 1: nothing does, and what would is said; 2: bad input.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import click

from megatron_vocabpar.cli.files import FORMAT, completing
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.given import Given, read_script, read_words
from megatron_vocabpar.plan.hardware import Hardware, hardware_named, hardware_presets
from megatron_vocabpar.plan.job import RECOMPUTE
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.price import Price, read_measured, readings
from megatron_vocabpar.plan.read_arguments import (
    job_from_arguments,
    model_from_arguments,
    other_gpus,
    overruled,
)
from megatron_vocabpar.plan.read_config import load_config, model_preset, model_presets
from megatron_vocabpar.plan.tables import answer_for_job, answer_json, print_answer
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.text_tables import console

NOTHING_FITS = 1  # the exit code
_WORKERS = 4
_COLUMNS = 100


_OF_A_JOB = (
    click.option(
        "--preset",
        help=f"A model: {', '.join(model_presets())}.",
        shell_complete=completing(model_presets()),
    ),
    click.option("--config", "config_file", metavar="FILE", help="A Hugging Face config.json."),
    click.option("--script", metavar="FILE", help="A launch script: Megatron's arguments in its text."),
    click.option(
        "--hardware",
        default="H100",
        help=f"One of {', '.join(hardware_presets())}.",
        shell_complete=completing(hardware_presets()),
    ),
    click.option("--tflops", type=float, help="10^12 operations a second of dense products in 16 bits."),
    click.option("--link-gb-s", type=float, help="GB/s of a GPU's link within a node, one direction."),
    click.option("--network-gb-s", type=float, help="GB/s of a GPU's share of the network, one direction."),
    click.option("--gpus-per-node", type=int, help="GPUs that the link connects."),
    click.option("--pp", type=int, help="Pipeline size; by default the arguments', or 8."),
    click.option("--tp", type=int, help="Tensor parallel size; by default the arguments', or 1."),
    click.option(
        "--dp", type=int, help="Data parallel size; by default what the script's processes leave, or 1."
    ),
    click.option("--cp", type=int, help="Context parallel size; by default the arguments', or 1."),
    click.option("--ep", type=int, help="Expert parallel size; by default the arguments', or 1."),
    click.option("--microbatches", type=int, help="Of an iteration and replica; by default 128."),
    click.option("--micro-batch-size", type=int, help="Sequences of a microbatch."),
    click.option("--global-batch-size", type=int, help="Sequences of an iteration."),
    click.option("--seq-length", type=int, help="Tokens of a sequence."),
    click.option(
        "--mtp-depths",
        type=click.IntRange(0),
        help="Heads of multi-token prediction, whatever the model has.",
    ),
    click.option("--memory-gib", type=float, help="What a GPU may hold; by default all that it has."),
    click.option("--distributed-optimizer", is_flag=True, help="Divide optimizer states over the replicas."),
    click.option("--offload", is_flag=True, help="Keep optimizer states on the host."),
    click.option("--fp8", is_flag=True, help="Products of layers in 8 bits."),
    click.option(
        "--recompute",
        type=click.Choice(RECOMPUTE),
        is_flag=False,
        flag_value="full",
        help="Recomputation of activations; full where nothing follows.",
    ),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- MEGATRON ARGUMENTS]"),
)


def of_a_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say the model, the GPUs and how the model is spread over them."""
    for add in reversed(_OF_A_JOB):
        command = add(command)
    return command


@click.command("plan")
@of_a_job
@click.option("--costs", "costs_file", metavar="FILE", help="Measured times of passes.")
@click.option("--gpus", type=int, help="Search how to spread the model over so many; sizes given stay.")
@click.option("--sources", is_flag=True, help="Also say where each number about the GPU is from.")
@FORMAT
@click.pass_context
def plan_command(ctx: click.Context, **options: Any) -> None:
    """Which method in which family: time, MFU, memory of each stage, flags, and why.

    The model is a preset, a config.json, a launch script, or Megatron's arguments after --. The plan
    lists what it does not use of them.
    """
    check(options)
    given = given_of(options["script"], options["arguments"])
    notes = overruled(given, options)
    model = model_of(options, given)
    gpu = hardware_of(options)
    limit = gpu.memory_gib if options["memory_gib"] is None else options["memory_gib"]
    if options["sources"]:
        from megatron_vocabpar.plan.advice import sources

        click.echo("\n".join(sources(gpu)), err=options["output_format"] == "json")
    if options["gpus"] is not None:
        from megatron_vocabpar.cli.configurations import plan_gpus

        found = plan_gpus(model, given, gpu, limit, options, notes)
        ctx.exit(0 if found else NOTHING_FITS)
    job = job_from_arguments(given, options)
    costs, prices = _measured(options["costs_file"])
    notes += [*other_gpus(given, job.gpus), *unused(given, options)]
    request = Request(model, job, gpu, limit, costs, prices)
    answer = answer_for_job(request, notes, workers=min(_WORKERS, os.cpu_count() or 1))
    if options["output_format"] == "json":
        click.echo(answer_json(answer))
    else:
        print_answer(answer, console(_COLUMNS))
    if answer.best is None:
        ctx.exit(NOTHING_FITS)


def _measured(file: str | None) -> tuple[PassCosts | None, Mapping[str, Price]]:
    """The passes' times in a cost file, and its price; a file may have the price alone."""
    if file is None:
        return None, readings()
    price, costs = read_measured(file)
    return costs, {"measured": price} if price else readings()


def check(options: dict[str, Any]) -> None:
    limit = options["memory_gib"]
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"--memory-gib {limit}: give more than 0")
    for name, value in options.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and name not in ("memory_gib", "mtp_depths") and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give at least 1")


def given_of(script: str | None, words: tuple[str, ...]) -> Given:
    """Megatron's arguments, those after ``--`` before the script's."""
    if words and not words[0].startswith("--"):
        raise click.UsageError(
            f"unexpected {words[0]!r}: a model is --preset, --config or --script; Megatron's arguments "
            "stand after --"
        )
    given = read_words(words)
    if script is None:
        return Given(given, "your arguments")
    return Given(read_script(script) | given, script)


def model_of(options: dict[str, Any], given: Given) -> Model:
    preset, config, seq_length = options["preset"], options["config_file"], options["seq_length"]
    of_arguments = options["script"] is not None or _layers_in(given) or not (preset or config)
    if bool(preset) + bool(config) + (of_arguments and bool(given.values)) != 1:
        raise click.UsageError(
            "give one model: --preset, --config, --script, or Megatron's arguments after --"
        )
    if preset:
        model = model_preset(preset)
        model = model if seq_length is None else replace(model, seq_length=seq_length)
    elif config:
        model = load_config(config, seq_length)
    else:
        length = {} if seq_length is None else {"seq-length": str(seq_length)}
        given.values.update(length)
        model = model_from_arguments(given)
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
        asked = ("tflops", "link_gb_s", "network_gb_s", "gpus_per_node", "fp8")
        named = [f"--{name.replace('_', '-')}" for name in asked if options[name]]
        lines += (
            [f"Not used beside --costs, but for memory and the step: {', '.join(named)}."] if named else []
        )
    return lines
