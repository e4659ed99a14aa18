"""Schedules and plans as JSON, both ways, and as CSV.

A schedule: ``{"method", "p", "m", "chunks", "algorithm", "placement", "input", "ranks": [[{"op", "mb",
"chunk"}, ...]]}``, the compute passes of each rank in order. ``chunk`` is the chunk of F, B and W on their
rank, and 0 for the vocabulary passes. ``method`` may be left out: it tells redis from baseline, whose passes
are the same. Multi-token prediction adds ``mtp_depths``. An F that runs together with the B right after it
adds ``"pair": true``.

A plan: ``"program": [["0IF0", "0CI0", ...]]`` in place of ``"ranks"``, each rank's instructions in order,
with communication, a pair as one (``"0F5+2B1"``); and ``"costs"``, as in a cost file. What is launched inside
the pass behind it is in ``"late": {"0C1.5": 0.25}``, by the share of the pass's layers that come before.

CSV: one line an instruction of a plan. A pair has the type ``FB``, and the stage and microbatch of its F.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, cast

from megatron_vocabpar.schedule.data.schema import check, read_object
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS, Method, placed
from megatron_vocabpar.schedule.words.passes import (
    VOCABULARY_PASSES,
    Comm,
    Instruction,
    Pair,
    Pass,
    PassType,
    parse,
    parts_of,
)
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Late, Program, Schedule, passes_of

_PASS_TYPES = {type_.value: type_ for type_ in PassType}
Methods = Mapping[str, Method]


def to_json(schedule: Schedule) -> str:
    """The JSON form, one line a rank."""
    paired = {pair.forward for pair in schedule.pairs}
    rows = [
        json.dumps([_to_dict(pass_, schedule.placement, pass_ in paired) for pass_ in passes])
        for passes in schedule.ranks
    ]
    return _json(schedule, {}, "ranks", rows)


def plan_to_json(plan: Plan) -> str:
    """The JSON form of a plan, one line a rank."""
    rows = [json.dumps([str(item) for item in row]) for row in plan.program]
    late = {"late": {str(item): share for item, share in plan.late.items()}} if plan.late else {}
    return _json(plan.schedule, {"costs": plan.costs.to_dict(), **late}, "program", rows)


def plan_to_csv(plan: Plan) -> str:
    """One line an instruction: rank, position on the rank, text, type, stage, microbatch."""
    lines = ["rank,position,instruction,type,stage,microbatch"]
    for rank, row in enumerate(plan.program):
        for position, item in enumerate(row):
            lines.append(f"{rank},{position},{item},{item.type.value},{item.stage},{item.microbatch}")
    return "\n".join(lines)


def _json(schedule: Schedule, more: Mapping[str, Any], name: str, rows: Sequence[str]) -> str:
    head = {
        "method": schedule.method.name,
        "p": schedule.p,
        "m": schedule.m,
        "chunks": schedule.chunks,
        "algorithm": _algorithm(schedule.method),
        "placement": schedule.placement.shape,
        "input": _input(schedule.method),
        **({"mtp_depths": schedule.mtp_depths} if schedule.mtp_depths else {}),
        **({} if schedule.placement.mtp is None else {"mtp_stage": schedule.placement.mtp}),
        **more,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += [f"  {json.dumps(name)}: [", ",\n".join(f"    {row}" for row in rows), "  ]"]
    return "\n".join(["{", *lines, "}"])


def _algorithm(method: Method) -> str:
    """The word for the output layer; baseline and redis share ``none``."""
    return method.name if method.vocabulary_parallel else "none"


def _input(method: Method) -> str:
    """The word for the input layer: partitioned over all ranks, or inside the first stage's F and B."""
    return "parallel" if method.vocabulary_parallel else "local"


def from_json(text: str, methods: Methods = METHODS) -> Schedule:
    """Read the JSON form of a schedule, or the schedule of a plan.

    Words and numbers are checked. Rules are not: see ``check.validate.validate``.

    Raises:
        ValueError: naming the entry that is missing or wrong.
    """
    return _read(_object(text), methods)[0]


def plan_from_json(text: str, costs: PassCosts | None = None, methods: Methods = METHODS) -> Plan:
    """Read the JSON form of a plan. A schedule's is lowered with ``costs``, or ``PassCosts.default``.

    Raises:
        ScheduleError: if the schedule or the program breaks a rule.
        ValueError: naming the entry that is missing or wrong.
    """
    data = _object(text)
    schedule, program = _read(data, methods)
    if program is None:
        return Plan.of(schedule, costs)
    planned = PassCosts.from_dict(data["costs"], methods) if "costs" in data else None
    return Plan.with_program(schedule, planned, program, _late(data.get("late", {}), schedule))


def _late(shares: Mapping[str, float], frame: Schedule) -> Late:
    late: dict[Comm, float] = {}
    for word, share in shares.items():
        item = _known(word, "late", frame)
        if not isinstance(item, Comm):
            raise ValueError(f"schedule, late: {word!r} is no communication; give one, such as 0C1.5")
        late[item] = float(share)
    return late


def _object(text: str) -> dict[str, Any]:
    data = read_object(text, "the schedule")
    check(data, "schedule")
    return data


def _read(data: Mapping[str, Any], methods: Methods) -> tuple[Schedule, Program | None]:
    """The schedule, and the program if the file holds a plan."""
    p, m, chunks = (data[key] for key in ("p", "m", "chunks"))
    shape = cast(Any, _word(data, "placement", ("standard", "vshape")))
    placement = Placement(p, chunks, shape, data.get("mtp_stage"))
    algorithm = _word(data, "algorithm", tuple(dict.fromkeys(map(_algorithm, methods.values()))))
    fitting = {name: method for name, method in methods.items() if _algorithm(method) == algorithm}
    method = (
        fitting[_word(data, "method", tuple(fitting))] if "method" in data else next(iter(fitting.values()))
    )
    _word(data, "input", (_input(method),))
    name = "program" if "program" in data else "ranks"
    rows = data.get(name, ())
    if len(rows) != p:
        raise ValueError(f"schedule: {name!r} must hold a list of passes for each of the {p} ranks")
    frame = Schedule(placed(method, placement), placement, m, mtp_depths=data.get("mtp_depths", 0))
    if name == "ranks":
        ranks = tuple(
            tuple(_from_dict(item, rank, placement) for item in row) for rank, row in enumerate(rows)
        )
        marked = (
            _marked_pairs(row, passes, rank)
            for rank, (row, passes) in enumerate(zip(rows, ranks, strict=True))
        )
        return replace(frame, ranks=ranks, pairs=frozenset(chain.from_iterable(marked))), None
    program = tuple(
        tuple(_known(word, f"rank {rank}", frame) for word in row) for rank, row in enumerate(rows)
    )
    pairs = frozenset(item for row in program for item in row if isinstance(item, Pair))
    return replace(frame, ranks=tuple(map(passes_of, program)), pairs=pairs), program


def _known(word: str, where: str, frame: Schedule) -> Instruction:
    """The instruction of a word, whose stage and microbatch the frame has."""
    item = parse(word)
    for part in parts_of(item):
        if part.stage >= frame.placement.num_stages or part.microbatch >= frame.m:
            raise ValueError(
                f"schedule, {where}: {word!r}, but stages end at {frame.placement.last_stage} and "
                f"microbatches at {frame.m - 1}"
            )
    return item


def _to_dict(pass_: Pass, placement: Placement, paired: bool) -> dict[str, str | int]:
    chunk = 0 if pass_.type in VOCABULARY_PASSES else placement.chunk_of(pass_.stage)
    marker = {"pair": True} if paired else {}
    return {"op": pass_.type.value, "mb": pass_.microbatch, "chunk": chunk, **marker}


def _marked_pairs(row: Sequence[Mapping[str, Any]], passes: Sequence[Pass], rank: int) -> Iterator[Pair]:
    """The pairs of a rank: each F that is marked, and the B after it."""
    for item, forward, backward in zip_longest(row, passes, passes[1:]):
        if item.get("pair"):
            if backward is None or (forward.type, backward.type) != (PassType.F, PassType.B):
                raise ValueError(
                    f"schedule, rank {rank}: {forward} is marked as a pair with {backward or 'nothing'} "
                    "after it; mark an F that runs together with the B right after it"
                )
            yield Pair(forward, backward)


def _from_dict(item: Mapping[str, Any], rank: int, placement: Placement) -> Pass:
    type_, mb, chunk = _PASS_TYPES.get(item["op"]), item["mb"], item["chunk"]
    if type_ is None:
        raise ValueError(
            f"schedule, rank {rank}: unknown op {item['op']!r}; give one of {', '.join(_PASS_TYPES)}"
        )
    if type_ in VOCABULARY_PASSES:
        if chunk != 0:
            raise ValueError(f"schedule, rank {rank}: {item['op']} of chunk {chunk}; it has chunk 0 alone")
        return Pass(type_, rank, mb)
    if chunk >= placement.chunks:
        raise ValueError(f"schedule, rank {rank}: chunk {chunk} of {placement.chunks}; chunks count from 0")
    return Pass(type_, placement.stage_of(rank, chunk), mb)


def _word(data: Mapping[str, Any], key: str, words: tuple[str, ...]) -> str:
    value = data[key]
    if value not in words:
        raise ValueError(f"schedule: {key!r} is {value!r}; give one of {', '.join(words)}")
    return cast(str, value)
