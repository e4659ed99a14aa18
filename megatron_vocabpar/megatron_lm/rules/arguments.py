"""Megatron's arguments: those that have been read have a row in ``data/arguments.txt``.

An argument without a row comes from a Megatron that is newer than the table. At its default it passes; where
it is set, the warning names it, as it does those that were read and not run. What the training script itself
adds passes. Rows of a new version are added by hand, name by name.

Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

Verdict = Literal["works", "ruled", "not run", "cannot matter"]
WORKS: Verdict = "works"
RULED: Verdict = "ruled"
NOT_RUN: Verdict = "not run"
CANNOT_MATTER: Verdict = "cannot matter"
_VERDICTS: Mapping[str, Verdict] = {verdict: verdict for verdict in (WORKS, RULED, NOT_RUN, CANNOT_MATTER)}
UNREAD = "its effect on partitioned vocabulary layers is not known; leave it out"


@dataclass(frozen=True, slots=True)
class Review:
    """The verdict on some arguments.

    Attributes:
        verdict: ``works``, as a run beside stock has shown; ``ruled``, if a rule looks at it; ``cannot
            matter`` to embedding, output layer, loss, batch, gradients or checkpoint; ``not run``, if it may
            matter and has not been tried.
        reason: of what was not run, what it would touch; else empty.
        arguments: their names in Megatron's parsed arguments.
    """

    verdict: Verdict
    reason: str
    arguments: tuple[str, ...]


def _read(text: str) -> tuple[Review, ...]:
    """Rows of the file: a line ``verdict``, or ``not run: reason``, then indented ones with the arguments."""
    rows: list[Review] = []
    for line in text.splitlines():
        if line.startswith(" "):
            rows[-1] = replace(rows[-1], arguments=(*rows[-1].arguments, *line.split()))
        else:
            verdict, _, reason = line.partition(": ")
            rows.append(Review(_VERDICTS[verdict], reason, ()))
    return tuple(rows)


_FILE = resources.files("megatron_vocabpar.megatron_lm").joinpath("data/arguments.txt")

REVIEWS = _read(_FILE.read_text("utf-8"))

REVIEW_OF: Mapping[str, Review] = {name: row for row in REVIEWS for name in row.arguments}
"""The row of each argument."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An argument of a parser: its first spelling, and its default."""

    flag: str
    default: Any


def declared(parser: argparse.ArgumentParser) -> dict[str, Declared]:
    """The arguments of ``parser``, by their names in its result."""
    arguments: dict[str, Declared] = {}
    for action in parser._actions:  # argparse has no public list of them
        default = parser.get_default(action.dest)
        if isinstance(default, str) and callable(action.type):
            default = action.type(default)  # as parsing does
        if action.option_strings and action.dest != "help":
            arguments.setdefault(action.dest, Declared(action.option_strings[0], default))
    return arguments


def not_run(arguments: Mapping[str, Declared], args: Any) -> Iterator[str]:
    """A sentence for each argument of Megatron's that a user set and that has not been read or run."""
    for name, each in arguments.items():
        value = getattr(args, name, each.default)
        if value != each.default:
            row = REVIEW_OF.get(name)
            if row is None:
                yield f"{each.flag} {value}: {UNREAD}"
            elif row.verdict == NOT_RUN:
                yield f"{each.flag}: {row.reason}"
