"""How long communication is resident on a rank: from its launch to its end, most of it waiting for others.

A kernel of NCCL that waits holds a multiprocessor for each of its channels, so layers beside it have fewer.
It is resident once its rank has launched it and the one before it in its queue has ended. For example, rank
0 launches C1 at 10 ms and C2 at 12 ms, rank 1 both at 15 ms, and each takes 1 ms: on rank 0 C1 is resident
from 10 to 16 ms, and C2, queued behind it, from 16 to 17 ms. Layers from 8 to 17 ms have 7 / 9 kernels
beside them.

What counts are the collectives of the vocabulary layers, or the ``types`` of one other queue: receives wait
too.

Next: ``simulate.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from megatron_vocabpar.schedule.play.events import Events
from megatron_vocabpar.schedule.play.memory import Interval
from megatron_vocabpar.schedule.words.passes import COLLECTIVES, LAYERS, CommType


def resident_beside_layers(events: Events, types: Collection[CommType] = COLLECTIVES) -> tuple[float, ...]:
    """For each rank, how many communications are resident, on average over the time of its layers."""
    ranks = range(events.numbering.schedule.p)
    return tuple(shared(resident(events, rank, types), layers(events, rank)) for rank in ranks)


def busy_share(events: Events) -> tuple[float, ...]:
    """For each rank, the share of the iteration in which it runs passes."""
    schedule, numbers, whole = events.numbering.schedule, events.numbering.numbers, max(events.ends)
    rows = [joined((events.starts[k], events.ends[k]) for k in numbers(row)) for row in schedule.ranks]
    return tuple(sum(end - start for start, end in row) / whole for row in rows)


def resident(events: Events, rank: int, types: Collection[CommType] = COLLECTIVES) -> list[Interval]:
    """When a communication of a queue is resident on a rank: ms, in order, disjoint."""
    held: list[Interval] = []
    numbers = _numbers(events, rank, types)
    for end, launch in sorted((events.ends[k], events.launches[k]) for k in numbers):
        held.append((max(launch, held[-1][1] if held else 0.0), end))
    return held


def _numbers(events: Events, rank: int, types: Collection[CommType]) -> Iterator[int]:
    """The parts in collectives, and the receives, that a rank launched."""
    numbering, schedule = events.numbering, events.numbering.schedule
    own_stages = schedule.placement.stages_of(rank)
    for type_ in types:
        for stage in [rank] if type_ in COLLECTIVES else own_stages:
            first = (numbering.first_node[type_] + stage) * schedule.m
            yield from (k for k in range(first, first + schedule.m) if events.launches[k] >= 0.0)


def layers(events: Events, rank: int) -> list[Interval]:
    """When a rank's layers run: ms, in order, disjoint."""
    row = events.numbering.schedule.ranks[rank]
    numbers = events.numbering.numbers(item for item in row if item.type in LAYERS)
    return joined((events.starts[k], events.ends[k]) for k in numbers)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def shared(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """The share of ``other`` during which ``one`` is open; both are disjoint and in order."""
    length = sum(end - start for start, end in other)
    i = j = 0
    common = 0.0
    while i < len(one) and j < len(other):
        common += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        i, j = (i + 1, j) if one[i][1] < other[j][1] else (i, j + 1)
    return common / length if length else 0.0
