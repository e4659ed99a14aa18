"""``vocabpar``: one group of verbs, each loaded only when it is asked for.

``vocabpar schedule`` must work where torch is not installed, so this module imports click alone, and
names each verb's function by text. Bad input reaches the user as one line and exit code 2.
Next: the module of a verb, such as ``train.py``.
"""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass

import click

from megatron_vocabpar import __version__

USER_ERROR = 2


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of the command line.

    Attributes:
        target: ``module:attribute`` of its click command.
        summary: one line for ``vocabpar --help``.
        extra: the optional dependencies that it needs (``pip install "megatron-vocabpar[extra]"``).
    """

    target: str
    summary: str
    extra: str | None = None

    def load(self) -> click.Command:
        """Import the verb's module and take its command."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


VERBS = {
    "schedule": Verb("megatron_vocabpar.cli.schedule:schedule_command", "Print or draw a schedule."),
    "simulate": Verb("megatron_vocabpar.cli.simulate:simulate_command", "Predict time, bubble and memory."),
    "train": Verb("megatron_vocabpar.cli.train:train_command", "Train a GPT on this machine.", "train"),
    "drift": Verb(
        "megatron_vocabpar.cli.drift:drift_command", "Compare two runs' log-probabilities.", "train"
    ),
    "bench": Verb("megatron_vocabpar.cli.bench:bench_command", "Measure against stock Megatron.", "train"),
    "doctor": Verb(
        "megatron_vocabpar.cli.doctor:doctor_command", "Check GPUs, or look at a checkout.", "train"
    ),
    "patches": Verb("megatron_vocabpar.cli.patches:patches_command", "What is replaced in Megatron."),
}


class VerbGroup(click.Group):
    """A click group over ``VERBS`` that turns bad input into one line and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        try:
            return VERBS[cmd_name].load()
        except ModuleNotFoundError as error:
            raise _missing_extra(cmd_name, error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise _missing_extra(ctx.invoked_subcommand or "", error) from error
        except ValueError as error:
            if not _raised_by_us(error):
                raise
            raise UserError(ctx.invoked_subcommand or "", str(error)) from error


class UserError(click.ClickException):
    """Bad input: printed as one line, exit code 2."""

    exit_code = USER_ERROR

    def __init__(self, verb: str, message: str) -> None:
        super().__init__(message)
        self.verb = verb

    def show(self, file: object = None) -> None:
        click.echo(f"vocabpar {self.verb}: error: {self.message}", err=True)


def _missing_extra(verb: str, error: ModuleNotFoundError) -> Exception:
    """The one line for a module that an extra would have installed; a missing module of ours passes."""
    extra = VERBS[verb].extra if verb in VERBS else None
    if extra is None or (error.name or "").partition(".")[0] == "megatron_vocabpar":
        return error
    return UserError(
        verb, f"the module {error.name!r} is not installed; run: pip install 'megatron-vocabpar[{extra}]'"
    )


def _raised_by_us(error: ValueError) -> bool:
    """Whether the innermost frame of the error's traceback is code of this package."""
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(innermost.f_globals.get("__name__", "")).startswith("megatron_vocabpar")


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vocabpar")
def main() -> None:
    """Vocabulary parallelism for pipeline-parallel training with Megatron-LM."""
