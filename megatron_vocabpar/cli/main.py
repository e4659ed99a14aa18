"""``vocabpar``: one group of verbs, each loaded only when it is asked for.

``vocabpar schedule`` must work without torch, so this module imports click alone. The user sees bad input as
one line and exit code 2. Next: the module of a verb, such as ``train.py``.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from megatron_vocabpar import __version__
from megatron_vocabpar.names import nearest

VERBS = {
    "schedule": "Print or draw a schedule.",
    "simulate": "Predict time, bubble and memory.",
    "plan": "Which schedule, and does it fit?",
    "layout": "Where Megatron's own schedule has its layers best.",
    "train": "Train a GPT on this machine.",
    "doctor": "Check GPUs, or look at a checkout.",
}
"""The line of ``vocabpar --help`` for each verb."""

_EXAMPLES = {
    "schedule": "vocabpar schedule --method vocab-1 --family v-half --pp 4 --format svg --output v-half.svg",
    "simulate": "vocabpar simulate schedule.json --costs costs.json",
    "plan": "vocabpar plan --preset llama-3.1-70b --gpus 64",
    "layout": "vocabpar layout --preset llama-3.2-3b --pp 4",
    "train": "vocabpar train --method vocab-2 --compare baseline --steps 40",
    "doctor": "vocabpar doctor --megatron ~/Megatron-LM",
}

_BARE = ("schedule", "simulate", "plan", "layout")  # without the extra [train]


def load(package: str, verb: str) -> click.Command:
    """Import the module of a verb's name and take its command, ``<verb>_command``."""
    return getattr(importlib.import_module(f"{package}.{verb}"), f"{verb}_command")


class VerbError(click.ClickException):
    """Bad input: one line (none if the message is empty), exit code 2."""

    exit_code = 2

    def __init__(self, verb: str, message: str, program: str = "vocabpar") -> None:
        super().__init__(message)
        self.verb, self.program = verb, program

    def show(self, file: object = None) -> None:
        if self.message:
            click.echo(f"{f'{self.program} {self.verb}'.strip()}: error: {self.message}", err=True)


class RunFailed(VerbError):
    """A process that the verb started failed: exit code 1."""

    exit_code = 1


class VerbGroup(click.Group):
    """A click group that turns bad input into one line and exit code 2.

    Args:
        verbs: their lines in ``--help``, by name.
        package: whose modules they are, one each.
        examples: a command of some of them, for their ``--help``.
    """

    def __init__(
        self,
        *args: Any,
        verbs: Mapping[str, str],
        package: str,
        examples: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.verbs, self.package, self.examples = verbs, package, examples

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        try:
            command = load(self.package, cmd_name) if cmd_name in self.verbs else None
        except ModuleNotFoundError as error:
            raise self._missing_extra(cmd_name, error) from error
        if command is not None and cmd_name in self.examples:
            command.epilog = f"Example: {self.examples[cmd_name]}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.verbs:
            ctx.fail(
                f"no verb {args[0]!r}; give one of {', '.join(self.verbs)}{nearest(args[0], self.verbs)}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(self.verbs.items()))

    def invoke(self, ctx: click.Context) -> object:
        if sys.stdout is None or sys.stderr is None:  # closed, as by ``>&-``
            raise self._bad(None, "an output is closed; leave it open, or send it to /dev/null")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal that has no dashes and arrows shows ?
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand is None:  # a bare verb's own module: what every installation has
                raise
            raise self._missing_extra(ctx.invoked_subcommand, error) from error
        except KeyboardInterrupt as stop:
            verb = f" {ctx.invoked_subcommand}" if ctx.invoked_subcommand else ""
            click.echo(f"{self.name}{verb}: interrupted", err=True)
            number = getattr(stop, "number", signal.SIGINT)  # that of runtime/processes.py has one
            raise click.exceptions.Exit(128 + number) from stop
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends quietly
                raise
            where = f" {error.filename}" if error.filename else " a file"
            text = f"cannot use{where}: {error.strerror or error}; free it, or give another"
            raise self._bad(ctx.invoked_subcommand, text) from error
        except RecursionError as error:
            raise self._bad(ctx.invoked_subcommand, "a file is nested too deeply") from error
        except ValueError as error:
            if not _raised_by_us(error):
                raise
            raise self._bad(ctx.invoked_subcommand, str(error)) from error

    def _missing_extra(self, verb: str, error: ModuleNotFoundError) -> Exception:
        """One line for a module that an extra would have installed; one of ours stays an error."""
        missing = (error.name or "").partition(".")[0]
        if verb in _BARE or missing in _OURS:
            return error
        # Beside an installed Megatron, '.[train]' would install a second one: it is for machines without.
        extra = "train" if missing in ("torch", "megatron") else "tools"
        remedy = f"run in the clone: pip install '.[{extra}]'"
        return self._bad(verb, f"the module {error.name!r} is not installed; {remedy}")

    def _bad(self, verb: str | None, message: str) -> VerbError:
        return VerbError(verb or "", message, str(self.name))


_OURS = ("megatron_vocabpar", "lab")


def _raised_by_us(error: ValueError) -> bool:
    """Whether the innermost frame of the error's traceback is our code, here or in a worker of a pool."""
    if type(error.__cause__).__name__ == "_RemoteTraceback":  # the worker's traceback, as text
        files = [line for line in str(error.__cause__).splitlines() if line.startswith('  File "')]
        return any(f"{os.sep}{package}{os.sep}" in files[-1] for package in _OURS)
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(innermost.f_globals.get("__name__", "")).partition(".")[0] in _OURS


_COMPLETION = """To complete verbs, flags and names in your shell, add a line to ~/.bashrc:
eval "$(_VOCABPAR_COMPLETE=bash_source vocabpar)"; zsh_source in ~/.zshrc, fish_source for fish."""


@click.group(
    "vocabpar",
    cls=VerbGroup,
    verbs=VERBS,
    package="megatron_vocabpar.cli",
    examples=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=_COMPLETION,
)
@click.version_option(__version__, prog_name="vocabpar")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing of progress.")
def main(quiet: bool) -> None:
    """Vocabulary parallelism for pipeline-parallel training with Megatron-LM."""
