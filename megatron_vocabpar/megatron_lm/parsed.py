"""What a command line sets of Megatron's own options, and what the table of ``options.py`` says of it.

Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.megatron_lm.options import NOT_RUN, ROW_OF


@dataclass(frozen=True, slots=True)
class Declared:
    """An option as a parser has it: its first spelling, and its value where it is not given."""

    flag: str
    default: Any


def declared(parser: argparse.ArgumentParser) -> dict[str, Declared]:
    """The options of ``parser``, by their names in parsed arguments."""
    found: dict[str, Declared] = {}
    for action in parser._actions:  # argparse has no other list of them
        default = parser.get_default(action.dest)
        if isinstance(default, str) and callable(action.type):
            default = action.type(default)  # as parsing does
        if action.option_strings and action.dest != "help":
            found.setdefault(action.dest, Declared(action.option_strings[0], default))
    return found


def check_read(options: Mapping[str, Declared], args: Any) -> None:
    """Whether every option that a user set has a row.

    Args:
        options: Megatron's own.
        args: parsed arguments.

    Raises:
        ValueError: naming those that have none.
    """
    unread = [
        f"{each.flag} {getattr(args, name)}" for name, each in _given(options, args) if name not in ROW_OF
    ]
    if unread:
        raise ValueError(
            f"{', '.join(unread)}: nobody has read what it does to partitioned vocabulary layers; leave it "
            "out, or train without --enable-vocab-parallel"
        )


def not_run(options: Mapping[str, Declared], args: Any) -> list[str]:
    """A sentence for each option that a user set and that nobody has run beside stock."""
    return [
        f"{each.flag} has not been run with partitioned vocabulary layers: {ROW_OF[name].reason}"
        for name, each in _given(options, args)
        if name in ROW_OF and ROW_OF[name].verdict == NOT_RUN
    ]


def _given(options: Mapping[str, Declared], args: Any) -> list[tuple[str, Declared]]:
    return [
        (name, each) for name, each in options.items() if getattr(args, name, each.default) != each.default
    ]
