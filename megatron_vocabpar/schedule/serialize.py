"""A schedule as JSON and as text, both ways.

JSON: ``{"p", "m", "chunks", "algorithm", "placement", "input", "ranks": [[{"op", "mb", "chunk"}, ...]]}``,
the compute passes of each rank in order. ``chunk`` is the chunk of F, B and W on their rank, 0 for the
vocabulary passes. Text: one line a rank, passes as ``<stage><type><microbatch>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard, cast

from .passes import VOCABULARY_PASSES, Pass, PassType, parse
from .placement import Placement
from .schedule import Schedule

_METHODS = {"none": "baseline"}  # baseline and redis have the same passes; the others are named alike
_PASS_TYPES = {type_.value: type_ for type_ in PassType}
_ALGORITHMS = ("none", "naive", "vocab-1", "vocab-2", "interlaced")


def to_json(schedule: Schedule) -> str:
    """The JSON form, one line a rank."""
    head = {
        "p": schedule.p,
        "m": schedule.m,
        "chunks": schedule.chunks,
        "algorithm": schedule.algorithm,
        "placement": schedule.placement,
        "input": schedule.input,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = [json.dumps([_to_dict(pass_, schedule.layout) for pass_ in passes]) for passes in schedule.ranks]
    return "\n".join(["{", *lines, '  "ranks": [', ",\n".join(f"    {row}" for row in rows), "  ]", "}"])


def from_json(text: str) -> Schedule:
    """Read the JSON form. Rules are not checked (see ``validate.validate``), words and numbers are.

    Raises:
        ValueError: naming the entry that is missing or wrong.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schedule is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("the schedule must be one JSON object")
    p, m, chunks = (_count(data, key) for key in ("p", "m", "chunks"))
    algorithm = _word(data, "algorithm", _ALGORITHMS)
    placement = _word(data, "placement", ("standard", "vshape"))
    input_ = _word(data, "input", ("parallel", "local"))
    rows = data.get("ranks")
    if not isinstance(rows, list) or len(rows) != p or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"schedule: 'ranks' must hold a list of passes for each of the {p} ranks")
    layout = Placement(p, chunks, cast(Any, placement))
    ranks = tuple(tuple(_from_dict(item, rank, layout) for item in row) for rank, row in enumerate(rows))
    method = _METHODS.get(algorithm, algorithm)
    return Schedule(method, p, m, chunks, algorithm, cast(Any, placement), cast(Any, input_), ranks)


def ranks_from_text(text: str) -> tuple[tuple[Pass, ...], ...]:
    """Read the text form (``Schedule.to_text``): one line a rank.

    Raises:
        ValueError: if a word is not a pass.
    """
    rows = []
    for line in text.strip().splitlines():
        row = []
        for word in line.split():
            item = parse(word)
            if not isinstance(item, Pass):
                raise ValueError(f"{word!r} is communication; a schedule holds compute passes only")
            row.append(item)
        rows.append(tuple(row))
    return tuple(rows)


def _to_dict(pass_: Pass, layout: Placement) -> dict[str, str | int]:
    chunk = 0 if pass_.type in VOCABULARY_PASSES else layout.chunk_of(pass_.stage)
    return {"op": pass_.type.value, "mb": pass_.microbatch, "chunk": chunk}


def _from_dict(item: object, rank: int, layout: Placement) -> Pass:
    if not isinstance(item, dict):
        raise ValueError(f"schedule, rank {rank}: {item!r} is not a pass; give op, mb and chunk")
    op, mb, chunk = item.get("op"), item.get("mb"), item.get("chunk")
    type_ = _PASS_TYPES.get(op) if isinstance(op, str) else None
    if type_ is None:
        raise ValueError(f"schedule, rank {rank}: unknown op {op!r}; give one of {', '.join(_PASS_TYPES)}")
    if not _is_index(mb) or not _is_index(chunk):
        raise ValueError(f"schedule, rank {rank}: {item!r} needs whole numbers mb and chunk from 0")
    if type_ in VOCABULARY_PASSES:
        return Pass(type_, rank, mb)
    if chunk >= layout.chunks:
        raise ValueError(f"schedule, rank {rank}: chunk {chunk} of {layout.chunks}; chunks count from 0")
    return Pass(type_, layout.stage_of(rank, chunk), mb)


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"schedule: {key!r} is {value!r}; give a whole number of at least 1")
    return value


def _word(data: Mapping[str, Any], key: str, words: tuple[str, ...]) -> str:
    value = data.get(key)
    if value not in words:
        raise ValueError(f"schedule: {key!r} is {value!r}; give one of {', '.join(words)}")
    return cast(str, value)
