"""``vocabpar train``: the options, generated from ``TrainConfig``, and the job's exit codes.

Exit code 0: done; 1: a worker failed; 2: bad input; 130: Ctrl-C.
Next: ``train/job.py``.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import click

from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.train.check import require_modules
from megatron_vocabpar.train.config import TrainConfig, flag

_PATHS = ("text", "tokenizer", "costs")
_TYPES = typing.get_type_hints(TrainConfig)


class _Failed(click.ClickException):
    """A worker failed: its message on the terminal, exit code 1."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        if self.message:
            click.echo(f"vocabpar train: error: {self.message}", err=True)


class _SectionedCommand(click.Command):
    """A command whose ``--help`` keeps the sections of ``TrainConfig``'s fields."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        section_of = {f.name: f.metadata["section"] for f in dataclasses.fields(TrainConfig)}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                sections.setdefault(section_of.get(parameter.name or "", "Other"), []).append(row)
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


def _option(field: dataclasses.Field[Any]) -> click.Option:
    """The option of one field; numbers and texts as themselves, a list as names between commas."""
    declared, meta = _TYPES[field.name], field.metadata
    names = [flag(field.name), field.name]
    text = meta["help"]
    if declared is bool:
        names[0] = f"{names[0]}/{meta['off']}"
        return click.Option(names, default=field.default, show_default=True, help=text)
    if declared == tuple[str, ...]:
        return click.Option(names, default="", help=text, metavar=meta["metavar"])
    if field.name == "method":
        metavar = f"[{'|'.join(METHODS)}]"
        return click.Option(names, default=field.default, show_default=True, help=text, metavar=metavar)
    kind = next(t for t in (*typing.get_args(declared), declared) if t in (int, float, str))
    metavar = f"[{'|'.join(meta['choices'])}]" if meta["choices"] else meta["metavar"]
    shown = field.default is not None
    return click.Option(
        names, type=kind, default=field.default, show_default=shown, help=text, metavar=metavar
    )


def config_from_options(options: dict[str, Any]) -> TrainConfig:
    """The configuration of the parsed options: names between commas split, paths made absolute."""
    compare = tuple(name.strip() for name in options["compare"].split(",") if name.strip())
    paths = {name: str(Path(options[name]).absolute()) for name in _PATHS if options[name] is not None}
    return TrainConfig(**{**options, "compare": compare, **paths})


def _train(**options: Any) -> None:
    """Train a GPT with its vocabulary layers spread over the pipeline, and report on it.

    Starts its own processes on this machine; under torchrun it is one of them.
    """
    require_modules()
    from megatron_vocabpar.train.failure import TrainingFailed
    from megatron_vocabpar.train.job import run_job
    from megatron_vocabpar.train.ranks import Interrupted, RefusedElsewhere

    try:
        run_job(config_from_options(options), click.echo)
    except TrainingFailed as failed:
        raise _Failed(str(failed)) from failed
    except RefusedElsewhere as refused:
        raise click.exceptions.Exit(2) from refused
    except Interrupted as stop:
        click.echo("vocabpar train: interrupted", err=True)
        raise click.exceptions.Exit(128 + stop.signal_number) from stop
    except KeyboardInterrupt as stop:
        click.echo("vocabpar train: interrupted", err=True)
        raise click.exceptions.Exit(130) from stop


train_command = _SectionedCommand(
    "train",
    callback=_train,
    params=[_option(field) for field in dataclasses.fields(TrainConfig)],
    help=_train.__doc__,
)
