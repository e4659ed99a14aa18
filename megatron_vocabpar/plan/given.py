"""Megatron's arguments as the user gives them, and which of them the planner has read.

An argument that nothing reads has no effect on the plan, and the plan says so: ``Given.unread``.
Next: ``read_script.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_DIGITS = 18
OPEN = "$"
"""What stands in the value of a flag that a script's text leaves open."""


class Given:
    """Megatron's flags without their dashes, each with its value ("" for a switch), and their source.

    Reading a flag, or asking whether it is there, marks it as read.
    """

    def __init__(self, values: Mapping[str, str], source: str) -> None:
        self.values, self.source = dict(values), source
        self._read: set[str] = set()

    @staticmethod
    def of(args: Any) -> Given:
        """Megatron's parsed arguments as the planner reads those of a command line."""
        values = {
            name.replace("_", "-"): _typed(value)
            for name, value in vars(args).items()
            if value is not None and value is not False
        }
        return Given(values, "Megatron's arguments")

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        """A flag's value; the default if it is not given.

        Raises:
            ValueError: if a script's text leaves the value open.
        """
        if name not in self:
            return default
        value = self.values[name]
        if OPEN in value or "`" in value:
            raise ValueError(
                f"{self.source}: --{name} is {value}, which the text does not say; add --run, which runs the "
                "script up to its training, or give the flag after --"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A flag's whole number; the default if it is not given."""
        if name not in self and default is not None:
            return default
        text = self.text(name)
        if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ValueError(f"{self.source}: --{name} is {text[:40]!r}; give a whole number of at least 1")
        return int(text)

    def unread(self) -> list[str]:
        """A note on the flags that nothing has read, as a user writes them; none if there are none."""
        unread = {name: value for name, value in self.values.items() if name not in self._read}
        flags = ", ".join(f"--{name} {value}".rstrip() for name, value in unread.items())
        return [f"Not used by the plan: {flags}."] if flags else []


def _typed(value: Any) -> str:
    """A parsed value as it is typed: a list of numbers as ``[0,0,0,1]``, a window as ``127,0``."""
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, list | tuple):
        return (" " if isinstance(value, list) else ",").join(map(str, value))
    return "" if value is True else str(value)


def read_words(words: Sequence[str]) -> dict[str, str]:
    """The flags among ``words``; if a name occurs twice, the last counts, as in Megatron's parser."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name:
            flags[name.replace("_", "-")] = (
                value if equals else "" if following.startswith("--") else following
            )
    return flags
