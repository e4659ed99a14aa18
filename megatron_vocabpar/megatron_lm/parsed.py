"""Megatron's own options that a command line sets, looked up in the table of ``options.py``.

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


def check_read(options: Mapping[str, Declared], args: Any) -> None:
    """Refuse options that a user set and that have no row.

    Args:
        options: Megatron's own.
        args: parsed arguments.

    Raises:
        ValueError: naming them.
    """
    unread = [
        f"{each.flag} {getattr(args, name)}"
        for name, each in _set_by_user(options, args)
        if name not in ROW_OF
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
        for name, each in _set_by_user(options, args)
        if name in ROW_OF and ROW_OF[name].verdict == NOT_RUN
    ]


def _set_by_user(options: Mapping[str, Declared], args: Any) -> list[tuple[str, Declared]]:
    return [
        (name, each) for name, each in options.items() if getattr(args, name, each.default) != each.default
    ]
