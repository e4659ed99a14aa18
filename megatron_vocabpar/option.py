"""``Option``: how a field of a record is an option of a command line.

Megatron's flags and their page, ``docs/flags.md``, are made from ``VocabOptions`` and
``FlagConfig``, the options of ``vocabpar train`` from ``TrainConfig``, those of ``plan`` and ``layout`` from
``JobOptions``. Standard library only.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from megatron_vocabpar.names import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field is an option.

    Attributes:
        help: a sentence for ``--help``.
        page: further sentences for ``docs/flags.md``, as Markdown.
        example: a value for the example of that page.
        by_default: what that page says of the default, if it is not the field's own.
        section: the section of ``--help`` that begins with it.
        flag: its name, if it is not the field's. None: no flag.
        choices: its values, if it takes only some; those of a field that is a tuple, if it takes several.
        metavar: the name of its value in ``--help``.
        unset: its value in parsed arguments if the flag is not given.
        alone: its value if the flag is given without a value, where that is allowed.
        least: its smallest value.
        above: what its value must be larger than.
        most: its largest value.
    """

    help: str
    page: str = ""
    example: str = ""
    by_default: str = ""
    section: str = ""
    flag: str | None = ""
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    unset: str | None = None
    alone: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None


class Conflict(NamedTuple):
    """An option as it is spelled, and what stands against it."""

    asked: str
    against: str


def option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option, with its default; ``more`` are attributes of ``Option``."""
    return field(default=default, metadata={"option": Option(help=help, **more)})


def options_of(record: Any) -> dict[str, Option]:
    """The options of a record or of its class, by the name of their field."""
    return {each.name: each.metadata["option"] for each in fields(record) if "option" in each.metadata}


def value_types(record: type) -> dict[str, type]:
    """The type of a value on the command line by field: bool, int, float or str; of a tuple, its items'."""
    return {name: _value_type(declared) for name, declared in typing.get_type_hints(record).items()}


def _value_type(declared: Any) -> type:
    named = (*typing.get_args(declared), declared)
    return next((kind for kind in named if kind in (bool, int, float, str)), object)


def asked_for(record: Any, names: Iterable[str]) -> list[str]:
    """The ``names`` whose field differs from its default, or whose property is not empty."""
    defaults = {each.name: each.default for each in fields(record)}
    return [name for name in names if getattr(record, name) != defaults.get(name, ())]


def wrong_values(record: Any, spell: Callable[[str, Any], str]) -> Iterator[Conflict]:
    """Each option of a record that has a value it cannot take, and what to give.

    Args:
        spell: from a field's name and value to how they are written where the user gave them.
    """
    for name, each in options_of(record).items():
        value = getattr(record, name)
        remedy = "" if value is None else _remedy(value, each)
        if remedy:
            yield Conflict(spell(name, value), remedy)


def _remedy(value: Any, each: Option) -> str:
    """What to give in place of a value that an option cannot take; empty if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    if each.least is not None and value < each.least:
        return f"give {each.least} or more"
    if each.above is not None and value <= each.above:
        return f"give more than {each.above}"
    if each.most is not None and value > each.most:
        return f"give {each.most:,} or less"
    values = value if isinstance(value, tuple) else (value,)
    unknown = [word for word in values if each.choices and word not in each.choices]
    if unknown:
        return f"choose one of {', '.join(each.choices)}{nearest(unknown[0], each.choices)}"
    return ""
