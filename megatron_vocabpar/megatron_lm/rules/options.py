"""Megatron's options: each that somebody has read has a row in ``data/options.txt``.

An option without a row comes from a Megatron that is newer than the table. At its default it passes; where
it is set, the warning names it, as it does those that were read and not run. Options that the training script
itself adds pass. Rows of a new version are added by hand, name by name.

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
UNREAD = "nobody has read what it does to partitioned vocabulary layers; leave it out"


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on some options.

    Attributes:
        verdict: ``works``, as a run beside stock has shown; ``ruled``, if a rule looks at it; ``cannot
            matter`` to embedding, output layer, loss, batch, gradients or checkpoint; ``not run``, if it may
            matter and nobody has tried.
        reason: what it was run with, why it cannot matter, or what it would touch.
        options: their names in Megatron's parsed arguments.
    """

    verdict: Verdict
    reason: str
    options: tuple[str, ...]


def _read(text: str) -> tuple[Row, ...]:
    """Rows of the file: a line ``verdict: reason``, then indented ones with the options."""
    rows: list[Row] = []
    for line in text.splitlines():
        if line.startswith(" "):
            rows[-1] = replace(rows[-1], options=(*rows[-1].options, *line.split()))
        else:
            verdict, _, reason = line.partition(": ")
            rows.append(Row(_VERDICTS[verdict], reason, ()))
    return tuple(rows)


ROWS = _read(resources.files("megatron_vocabpar.megatron_lm").joinpath("data/options.txt").read_text("utf-8"))

ROW_OF: Mapping[str, Row] = {name: row for row in ROWS for name in row.options}
"""The row of each option."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An option of a parser: its first spelling, and its default."""

    flag: str
    default: Any


def declared(parser: argparse.ArgumentParser) -> dict[str, Declared]:
    """The options of ``parser``, by their names in parsed arguments."""
    options: dict[str, Declared] = {}
    for action in parser._actions:  # argparse has no public list of them
        default = parser.get_default(action.dest)
        if isinstance(default, str) and callable(action.type):
            default = action.type(default)  # as parsing does
        if action.option_strings and action.dest != "help":
            options.setdefault(action.dest, Declared(action.option_strings[0], default))
    return options


def not_run(options: Mapping[str, Declared], args: Any) -> Iterator[str]:
    """A sentence for each option of Megatron's that a user set and that nobody has read or run."""
    for name, each in options.items():
        value = getattr(args, name, each.default)
        if value != each.default:
            row = ROW_OF.get(name)
            if row is None:
                yield f"{each.flag} {value}: {UNREAD}"
            elif row.verdict == NOT_RUN:
                yield f"{each.flag}: {row.reason}"
