"""Verbs that have left the package: they say what to run instead."""

from __future__ import annotations

import shlex

import click


def elsewhere(verb: str, module: str) -> click.Command:
    """A command that only names the module of the repository which does its work now."""

    @click.command(
        verb, short_help=f"Moved: python -m {module}.", context_settings={"ignore_unknown_options": True}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        line = shlex.join(["python", "-m", module, *arguments])
        raise ValueError(f"{verb} has left the package; run in the root of a clone: {line}")

    command.help = f"This has left the package: run python -m {module} in the root of a clone."
    return command
