"""The critical path of a simulation: the passes and transfers that the iteration's length is made of.

It is found from its end: first the pass that ends last, then what that waited for last (its cause in
``events.py``), and so on. Every step starts when the one before it ends. So shortening a pass that is not on
the path gains nothing. Of a pass inside which the next step was launched, the path has the part before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vocabpar.schedule.play.events import NOTHING, Events
from megatron_vocabpar.schedule.words.passes import Comm, Instruction, Pair, parts_of


@dataclass(frozen=True, slots=True)
class Step:
    """One item of the path: a pass, a pair, a transfer's receive, or one rank's part in a collective."""

    item: Instruction
    rank: int
    start_ms: float
    end_ms: float


def critical_path(events: Events) -> tuple[Step, ...]:
    """The path, from the first step to the last; empty if nothing ran."""
    numbering, ends = events.numbering, events.ends
    number = max(range(len(ends)), key=ends.__getitem__, default=NOTHING)
    if number != NOTHING and ends[number] < 0.0:
        number = NOTHING
    pairs: dict[Instruction, Pair] = {
        part: pair for pair in numbering.schedule.pairs for part in parts_of(pair)
    }
    steps = []
    until = float("inf")
    while number != NOTHING:
        item: Instruction = numbering.item(number)
        item = pairs.get(item, item)
        start, end = events.starts[number], min(ends[number], until)
        steps.append(Step(item, numbering.schedule.rank_of(item), start, end))
        number, until = events.causes[number], start
    return tuple(reversed(steps))


def time_by_type(path: Sequence[Step]) -> dict[str, float]:
    """Milliseconds of the path in each type of pass and of communication, the longest first."""
    total: dict[str, float] = {}
    for step in path:
        name = step.item.type.value
        total[name] = total.get(name, 0.0) + step.end_ms - step.start_ms
    return dict(sorted(total.items(), key=lambda entry: -entry[1]))


def time_by_rank(path: Sequence[Step], p: int) -> tuple[float, ...]:
    """Milliseconds of the path in the passes of each rank."""
    total = [0.0] * p
    for step in path:
        if not isinstance(step.item, Comm):
            total[step.rank] += step.end_ms - step.start_ms
    return tuple(total)
