"""Reads files that people write: as strict JSON, and against a schema of this folder.

An error is one line: where it is, the value there and, from the schema's description, what to give instead.
The schemas are JSON Schema, so an editor can check a file, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from reprlib import Repr
from typing import Any, Literal

_MOST_BYTES = 256 << 20

_short = Repr()
_short.maxstring = _short.maxother = 60


def text_of(path: str | Path, what: str) -> str:
    """A file's text; ``what`` names the file in messages, such as "the schedule x.json".

    Raises:
        ValueError: if it cannot be read, is not text, or has more than 256 MiB, as ``/dev/zero`` has.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"cannot read {what}: it has more than 256 MiB; give a file of text")
        return data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read {what}: {reason}; give a file of text") from error


def read_object(text: str, what: str) -> dict[str, Any]:
    """The object that ``text`` holds as JSON; ``what`` names it in messages, such as "the schedule".

    Raises:
        ValueError: if it is not JSON (NaN and Infinity are not), names a key twice, is nested too deep, or is
            not an object.
    """
    try:
        data = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep; give one JSON object") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{what} must hold one JSON object")
    return data


def check(data: Mapping[str, Any], schema: Literal["costs", "schedule", "timeline"]) -> None:
    """Check a file's object against a schema.

    Raises:
        ValueError: naming the first entry that is missing, unknown or wrong.
    """
    from fastjsonschema import JsonSchemaValueException

    try:
        _validator(schema)(data)
    except JsonSchemaValueException as error:
        raise ValueError(f"{schema}: {_in_words(error)}") from None


def read_costs(path: str | Path) -> dict[str, Any]:
    """The JSON object of a cost file, checked against ``costs.schema.json``.

    Raises:
        ValueError: if it is missing, not JSON or malformed; the message names the file.
    """
    data = read_object(text_of(path, f"costs from {path}"), f"costs file {path}")
    try:
        check(data, "costs")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return data


@cache
def _validator(schema: str) -> Callable[[Any], Any]:
    from fastjsonschema import compile as compiled

    file = resources.files(__package__) / f"{schema}.schema.json"
    return compiled(json.loads(file.read_text(encoding="utf-8")))


def _in_words(error: Any) -> str:
    """One of the library's errors as one line."""
    path, value, rule = ".".join(error.path[1:]), error.value, error.definition
    if error.rule == "required":
        name = next(name for name in rule["required"] if name not in value)
        return f"{path + '.' if path else ''}{name} is missing; {rule['description']}"
    if error.rule == "additionalProperties":
        unknown = _short.repr(next(name for name in value if name not in rule["properties"]))
        inside = f" in {path}" if path else ""
        return f"unknown entry {unknown}{inside}; there are {', '.join(rule['properties'])}"
    return f"{path} is {_short.repr(value)}; {rule['description']}"


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return entries
