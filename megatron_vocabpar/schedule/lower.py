"""From compute passes to programs: each step inserts one kind of communication.

Steps, each from rows to rows:

1. ``add_sends``: SEND_F and SEND_B right after the pass that produces what they carry.
2. ``add_receives``: RECV_F and RECV_B one compute pass ahead of their consumer, and in the order of the sends
   between the same two ranks.
3. ``add_collectives``: every rank launches every collective of a group, in one order for all ranks.

The order of collectives, and where a rank launches its part, follow a play of the passes: a collective is
*ready* when its last producer ends. Sorted by that, on every rank a launch before the first pass that ends
after it comes behind the rank's own producer, before its consumer, and before anything that could depend
on it: no deadlock, whatever the real times are. Ranks that produce nothing launch no earlier, so that
they do not hold receive buffers for long.

Next: ``validate.py``, then ``simulate.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .costs import PassCosts, PassTimes
from .network import Network, build_network
from .passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    RECEIVE_OF,
    Comm,
    CommType,
    Instruction,
    Pass,
    PassType,
)
from .replay import Stopped, replay
from .schedule import Deadlock, Program, Schedule

Rows = Sequence[Sequence[Instruction]]

_SEND = {PassType.F: CommType.SEND_F, PassType.B: CommType.SEND_B}
_LEAST_MS = 1e-5  # no pass or transfer is taken to be shorter, so that "after" is never "at the same time"


def lower(schedule: Schedule, costs: PassCosts | None = None) -> Program:
    """Each rank's instructions: the schedule's passes, in order, with communication between them.

    Args:
        schedule: a valid schedule, or a forward-only one.
        costs: decide the order of collectives; ``PassCosts.default`` where nothing is measured. Every rank
            must be given the same.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    rows = add_collectives(schedule.ranks, schedule, costs)
    rows = add_receives(rows, schedule)
    rows = add_sends(rows, schedule)
    return tuple(map(tuple, rows))


def add_sends(rows: Rows, schedule: Schedule) -> list[list[Instruction]]:
    """Insert SEND_F and SEND_B right after the passes whose results they carry."""
    away = _leaving(schedule)
    return [list(_with_sends(row, away)) for row in rows]


def _with_sends(row: Iterable[Instruction], away: Mapping[PassType, Sequence[bool]]) -> Iterator[Instruction]:
    for item in row:
        yield item
        if isinstance(item, Pass) and item.type in away and away[item.type][item.stage]:
            yield Comm(_SEND[item.type], item.stage, item.microbatch)


def _leaving(schedule: Schedule) -> dict[PassType, list[bool]]:
    """For F and B and each stage, whether the result goes to another rank."""
    stages = range(schedule.layout.num_stages)
    return {
        type_: [receive_of(Pass(type_, stage, 0), schedule) is not None for stage in stages]
        for type_ in _SEND
    }


def receive_of(item: Instruction, schedule: Schedule) -> Comm | None:
    """The receive, on another rank, of what ``item`` produces; None if there is none."""
    if not isinstance(item, Pass) or item.type not in _SEND:
        return None
    receive, step = RECEIVE_OF[_SEND[item.type]]
    neighbour, layout = item.stage + step, schedule.layout
    if not 0 <= neighbour <= layout.last_stage or layout.rank_of(neighbour) == layout.rank_of(item.stage):
        return None
    return Comm(receive, neighbour, item.microbatch)


def add_receives(rows: Rows, schedule: Schedule) -> list[list[Instruction]]:
    """Insert RECV_F and RECV_B one compute pass ahead of their consumers, earlier where FIFO asks for it."""
    away = _leaving(schedule)
    ranks = [schedule.layout.rank_of(stage) for stage in range(schedule.layout.num_stages)]
    earliest = _receive_positions(rows)
    inserts: list[list[tuple[int, Instruction]]] = [[] for _ in rows]
    for row in rows:
        sent: dict[int, list[tuple[int, Comm]]] = {}
        for item in row:
            if isinstance(item, Pass) and item.type in away and away[item.type][item.stage]:
                receive, step = RECEIVE_OF[_SEND[item.type]]
                stage = item.stage + step
                position = earliest[item.type].get((stage, item.microbatch))
                if position is not None:
                    comm = Comm(receive, stage, item.microbatch)
                    sent.setdefault(ranks[stage], []).append((position, comm))
        for target, receives in sent.items():
            position = len(rows[target])
            late_first = []
            for wanted, comm in reversed(receives):
                position = min(position, wanted)
                late_first.append((position, comm))
            inserts[target].extend(reversed(late_first))
    return [insert(row, where) for row, where in zip(rows, inserts, strict=True)]


def _receive_positions(rows: Rows) -> dict[PassType, dict[tuple[int, int], int]]:
    """For each F and B, by stage and microbatch, the position on its rank of the pass before it."""
    positions: dict[PassType, dict[tuple[int, int], int]] = {type_: {} for type_ in _SEND}
    for row in rows:
        previous = 0
        for position, item in enumerate(row):
            if isinstance(item, Pass):
                if item.type in _SEND:
                    positions[item.type][item.stage, item.microbatch] = previous
                previous = position
    return positions


def add_collectives(
    rows: Rows, schedule: Schedule, costs: PassCosts | None = None
) -> list[list[Instruction]]:
    """Insert the launches of the output and the input group's collectives, each group in one order."""
    played = play_passes(schedule, costs)
    out: list[list[Instruction]] = [list(row) for row in rows]
    for group in (OUTPUT_COLLECTIVES, INPUT_COLLECTIVES):
        order = collective_order(played, group)
        for rank, row in enumerate(out):
            slots = [position for position, item in enumerate(row) if isinstance(item, Pass)] + [len(row)]
            ends = played.ends[rank]
            launches = [(slots[bisect_right(ends, at)], Comm(type_, rank, mb)) for at, type_, mb in order]
            out[rank] = insert(row, launches)
    return out


@dataclass(frozen=True)
class Played:
    """When passes end, in ms, if all run as soon as they can.

    Attributes:
        ends: for each rank, the ends of its passes, in the schedule's order.
        ready: for each type of collective and each microbatch, the end of the last producer; negative where
            there is none, as in a forward-only schedule.
    """

    ends: tuple[list[float], ...]
    ready: Mapping[CommType, list[float]]


def play_passes(schedule: Schedule, costs: PassCosts | None = None) -> Played:
    """Play a schedule's passes with the times of ``costs``.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    times = PassTimes.of(costs or PassCosts.default(schedule.p), schedule)
    times = PassTimes(
        {type_: tuple(max(time, _LEAST_MS) for time in row) for type_, row in times.passes.items()},
        {type_: max(time, _LEAST_MS) for type_, time in times.comms.items()},
    )
    network, m = build_network(schedule, times, splits_w=schedule.splits_w), schedule.m
    nodes: dict[PassType, dict[int, int]] = {}
    for (type_, stage), node in network.index.items():
        nodes.setdefault(type_, {})[stage] = node
    items = [
        [nodes[pass_.type][pass_.stage] * m + pass_.microbatch for pass_ in row] for row in schedule.ranks
    ]
    sequences = [list(_with_arrivals(row, network, m)) for row in items] if network.arrival else items
    try:
        ends = replay(network, m, sequences)
    except Stopped as stopped:
        at = {rank: _named(item, network, m, rank) for rank, item in stopped.items.items()}
        raise Deadlock(at, _named(stopped.waits_for, network, m, min(at))) from stopped
    ready = {type_: ends[node * m : (node + 1) * m] for type_, node in network.groups.items()}
    return Played(tuple([ends[item] for item in row] for row in items), ready)


def _named(item: int, network: Network, m: int, rank: int) -> Instruction:
    """The instruction that an item of the network stands for; of a collective, the part of ``rank``."""
    node, mb = divmod(item, m)
    if node < len(network.names):
        return Pass(*network.names[node], mb)
    for pass_node, arrival in network.arrival.items():
        if node in (arrival, *network.feeds[arrival]):
            type_, stage = network.names[pass_node]
            return Pass(type_, stage if node == arrival else rank, mb)
    return Comm(next(type_ for type_, group in network.groups.items() if group == node), rank, mb)


def _with_arrivals(row: Iterable[int], network: Network, m: int) -> Iterator[int]:
    for item in row:
        node, mb = divmod(item, m)
        if node in network.arrival:
            yield network.arrival[node] * m + mb
        yield item


def collective_order(played: Played, group: frozenset[CommType]) -> list[tuple[float, CommType, int]]:
    """The group's collectives as (ready, type, microbatch), in the order that every rank keeps."""
    order = [
        (at, place, mb)
        for place, type_ in enumerate(CommType)
        if type_ in group
        for mb, at in enumerate(played.ready.get(type_, ()))
        if at >= 0.0
    ]
    names = list(CommType)
    return [(at, names[place], mb) for at, place, mb in sorted(order)]


def insert(row: Sequence[Instruction], inserts: Iterable[tuple[int, Instruction]]) -> list[Instruction]:
    """``row`` with instructions inserted before the given positions, in the given order at each."""
    before: dict[int, list[Instruction]] = {}
    for position, item in inserts:
        before.setdefault(position, []).append(item)
    out: list[Instruction] = []
    for position, item in enumerate(row):
        out += before.get(position, ())
        out.append(item)
    return out + before.get(len(row), [])
