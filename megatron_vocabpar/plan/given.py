"""Arguments of Megatron as they were given, and which of them were read.

What nobody reads is not planned with, and the plan says so: ``Given.unread``.
Next: ``read_arguments.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_MOST_DIGITS = 18
_SETS = re.compile(r"^\s*(?:export\s+|local\s+)?(\w+)=[\"']?([^\s\"'()]+)[\"']?\s*(?:#.*)?$", re.MULTILINE)
_DEFAULT = re.compile(r"\$\{\w+:-([^${}]*)\}")  # ``${GPUS:-8}``
_MOST_NESTED = 8  # variables inside the value of a variable


class Given:
    """Megatron's flags without their dashes, each with its value ("" for a switch), and who gave them.

    Reading one marks it as read, also where it is not there.
    """

    def __init__(self, values: Mapping[str, str], source: str) -> None:
        self.values, self.source = dict(values), source
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        """A flag's value."""
        return self.values[name] if name in self else default

    def number(self, name: str, default: int | None = None) -> int:
        """A flag's whole number; the default where it is not given."""
        if name not in self and default is not None:
            return default
        text = self.values.get(name, "")
        if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ValueError(f"{self.source}: --{name} is {text[:40]!r}; give a whole number of at least 1")
        return int(text)

    def unread(self) -> list[str]:
        """The flags that nothing asked for, as they are written."""
        return [f"--{name} {value}".rstrip() for name, value in self.values.items() if name not in self._read]


def read_words(words: Sequence[str]) -> dict[str, str]:
    """The flags among ``words``; the last of the same name counts, as in Megatron's own parser."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name:
            flags[name.replace("_", "-")] = (
                value if equals else "" if following.startswith("--") else following
            )
    return flags


def read_script(path: str) -> dict[str, str]:
    """The flags in a launch script's text, those of ``#SBATCH`` lines among them; nothing is run.

    Variables that it sets are filled in, and the default in ``${GPUS:-8}`` where it sets none.
    """
    lines = [re.sub(r"^\s*#SBATCH\s", " ", line) for line in text_of(path).splitlines()]
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    text = _DEFAULT.sub(r"\1", text)
    values = dict(_SETS.findall(text))
    for _ in range(_MOST_NESTED):
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], match[0]), text)
    return read_words(re.sub(r"[()\"']", " ", text).split())


def text_of(path: str) -> str:
    """A file's text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read {path}: {reason}; give a file of text") from error
