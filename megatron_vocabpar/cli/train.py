"""``vocabpar train``: the options, generated from ``TrainConfig``, and the job's exit codes.

Exit code 0: done; 1: a rank failed; 2: bad input; 130: Ctrl-C; 143: SIGTERM.
Next: ``train/run_job.py`` (the job), ``train/report.py`` (its results page).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from megatron_vocabpar.cli.files import click_option, is_quiet
from megatron_vocabpar.cli.main import RunFailed
from megatron_vocabpar.option import options_of, value_types
from megatron_vocabpar.train.config import TrainConfig, off_flag
from megatron_vocabpar.train.config_checks import require_modules
from megatron_vocabpar.train.output import resumed

_PATHS = ("text", "tokenizer", "costs")


class _SectionedCommand(click.Command):
    """A command whose ``--help`` keeps the sections of ``TrainConfig``'s fields."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = options_of(TrainConfig)
        sections: dict[str, list[tuple[str, str]]] = {}
        section = ""
        for parameter in self.get_params(ctx):
            section = options[parameter.name].section or section if parameter.name in options else "Other"
            sections.setdefault(section, []).extend(filter(None, [parameter.get_help_record(ctx)]))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


def config_from_options(options: dict[str, Any], named: Collection[str]) -> TrainConfig:
    """The configuration of the parsed options, with absolute paths.

    A job that resumes takes every option that the user has not ``named`` from its folder.
    """
    compare = tuple(name.strip() for name in (options["compare"] or "").split(",") if name.strip())
    paths = {name: str(Path(options[name]).absolute()) for name in _PATHS if options[name] is not None}
    config = TrainConfig(**{**options, "compare": compare, **paths})
    config = resumed(config, named) if config.resume else config
    return dataclasses.replace(config, log_interval=config.steps) if is_quiet() else config


@click.pass_context
def _train(context: click.Context, **options: Any) -> None:
    """Train a GPT with its vocabulary layers spread over the pipeline, and report on it.

    Starts its own processes on this machine; under torchrun it is one of them.
    """
    require_modules()
    from megatron_vocabpar.runtime.processes import ProcessFailed
    from megatron_vocabpar.train.report import reported
    from megatron_vocabpar.train.run_job import run_job, torchrun_rank

    ours = (click.core.ParameterSource.DEFAULT, None)
    named = {name for name in options if context.get_parameter_source(name) not in ours}
    config = config_from_options(options, named)
    reports = torchrun_rank() in (None, 0)
    try:
        with reported(Path(config.output), click.echo) if reports else nullcontext():
            run_job(config, click.echo)
    except ProcessFailed as failed:
        raise RunFailed("train", str(failed)) from failed


train_command = _SectionedCommand(
    "train",
    callback=_train,
    params=[
        click_option(TrainConfig, name, off_flag(name) if kind is bool else "")
        for name, kind in value_types(TrainConfig).items()
        if name in options_of(TrainConfig)
    ],
    help=_train.__doc__,
)
