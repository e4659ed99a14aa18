"""Megatron's arguments as the user gives them, and which of them the planner has read.

An argument that nothing reads has no effect on the plan, and the plan says so: ``Given.unread``.
Next: ``read_arguments.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vocabpar.schedule.data.schema import text_of

_MOST_DIGITS = 18
_SETS = re.compile(r"^\s*(?:export\s+|local\s+)?(\w+)=[\"']?([^\s\"'()]+)[\"']?\s*(?:#.*)?$", re.MULTILINE)
_DEFAULT = re.compile(r"\$\{\w+:-([^${}]*)\}")  # ``${GPUS:-8}``
_QUOTED = re.compile(r"\((?!\(*\[)|\)(?!\)*\*)|[\"']")  # quotes, and brackets but those of ``([1]*3+[0])*2``
_MOST_NESTED = 8  # variables inside the value of a variable


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
        """A flag's value; the default if it is not given."""
        return self.values[name] if name in self else default

    def number(self, name: str, default: int | None = None) -> int:
        """A flag's whole number; the default if it is not given."""
        if name not in self and default is not None:
            return default
        text = self.values.get(name, "")
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


def read_script(path: str) -> dict[str, str]:
    """The flags in a launch script's text, with those of ``#SBATCH`` lines; nothing is run.

    The values of variables that the script sets are filled in, and the default of ``${GPUS:-8}``.
    """
    lines = [re.sub(r"^\s*#SBATCH\s", " ", line) for line in text_of(path, path).splitlines()]
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    text = _DEFAULT.sub(r"\1", text)
    values = dict(_SETS.findall(text))
    for _ in range(_MOST_NESTED):
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], match[0]), text)
    return read_words(_QUOTED.sub(" ", text).split())
