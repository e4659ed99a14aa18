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

from .costs import PassCosts, PassTimes
from .dependencies import collectives, prerequisites
from .network import build_network
from .passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    POINT_TO_POINT,
    Comm,
    CommType,
    Instruction,
    Pass,
    PassType,
)
from .schedule import Deadlock, Program, Schedule
from .timing import Stuck, play

Rows = Sequence[Sequence[Instruction]]

_SEND = {
    PassType.F: (CommType.SEND_F, CommType.RECV_F, 1),
    PassType.B: (CommType.SEND_B, CommType.RECV_B, -1),
}
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
    return [list(_with_sends(row, schedule)) for row in rows]


def _with_sends(row: Iterable[Instruction], schedule: Schedule) -> Iterator[Instruction]:
    for item in row:
        yield item
        receive = receive_of(item, schedule)
        if receive is not None:
            assert isinstance(item, Pass)
            yield Comm(_SEND[item.type][0], item.stage, item.microbatch)


def receive_of(item: Instruction, schedule: Schedule) -> Comm | None:
    """The receive, on another rank, of what ``item`` produces; None if there is none."""
    if not isinstance(item, Pass) or item.type not in _SEND:
        return None
    _, receive, step = _SEND[item.type]
    neighbour, layout = item.stage + step, schedule.layout
    if not 0 <= neighbour <= layout.last_stage or layout.rank_of(neighbour) == layout.rank_of(item.stage):
        return None
    return Comm(receive, neighbour, item.microbatch)


def add_receives(rows: Rows, schedule: Schedule) -> list[list[Instruction]]:
    """Insert RECV_F and RECV_B one compute pass ahead of their consumers, earlier where FIFO asks for it."""
    inserts: list[list[tuple[int, Instruction]]] = [[] for _ in rows]
    consumers = [_receives_by_consumer(row, schedule) for row in rows]
    for source, row in enumerate(rows):
        sent: dict[int, list[Comm]] = {}
        for item in row:
            receive = receive_of(item, schedule)
            if receive is not None:
                sent.setdefault(schedule.rank_of(receive), []).append(receive)
        for target, receives in sent.items():
            assert target != source
            position = len(rows[target])
            late_first = []
            for receive in reversed(receives):
                position = min(position, consumers[target][receive])
                late_first.append((position, receive))
            inserts[target].extend(reversed(late_first))
    return [insert(row, where) for row, where in zip(rows, inserts, strict=True)]


def _receives_by_consumer(row: Sequence[Instruction], schedule: Schedule) -> dict[Comm, int]:
    """For each receive that a rank's passes need, the position of the pass before its consumer."""
    positions: dict[Comm, int] = {}
    previous = 0
    for position, item in enumerate(row):
        if isinstance(item, Pass):
            for need in prerequisites(item, schedule):
                if isinstance(need, Comm) and need.type in POINT_TO_POINT:
                    positions[need] = previous
            previous = position
    return positions


def add_collectives(
    rows: Rows, schedule: Schedule, costs: PassCosts | None = None
) -> list[list[Instruction]]:
    """Insert the launches of the output and the input group's collectives, each group in one order."""
    ends = pass_ends(schedule, costs)
    out: list[list[Instruction]] = [list(row) for row in rows]
    for group in (OUTPUT_COLLECTIVES, INPUT_COLLECTIVES):
        order = collective_order(schedule, group, ends)
        for rank, row in enumerate(out):
            finished = [ends[item] for item in row if isinstance(item, Pass)]
            slots = [position for position, item in enumerate(row) if isinstance(item, Pass)] + [len(row)]
            launches = [(slots[bisect_right(finished, at)], Comm(type_, rank, mb)) for at, type_, mb in order]
            out[rank] = insert(row, launches)
    return out


def pass_ends(schedule: Schedule, costs: PassCosts | None = None) -> dict[Pass, float]:
    """When each pass ends, in ms, if all passes run as soon as they can.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    times = PassTimes.of(costs or PassCosts.default(schedule.p), schedule)
    times = PassTimes(
        {type_: tuple(max(time, _LEAST_MS) for time in row) for type_, row in times.passes.items()},
        {type_: max(time, _LEAST_MS) for type_, time in times.comms.items()},
    )
    network = build_network(schedule, times, splits_w=schedule.splits_w)
    m = schedule.m
    sequences = []
    for passes in schedule.ranks:
        sequence = []
        for pass_ in passes:
            node = network.index[pass_.type, pass_.stage]
            if node in network.arrival:
                sequence.append(network.arrival[node] * m + pass_.microbatch)
            sequence.append(node * m + pass_.microbatch)
        sequences.append(sequence)
    try:
        ends = play(network, m, sequences).ends
    except Stuck as stuck:
        rank, (node, mb) = next(iter(stuck.waiting.items()))
        whole = {arrival: node for node, arrival in network.arrival.items()}
        item = Pass(*network.names[whole.get(node, node)], mb)
        raise Deadlock(rank, item, "what it waits for never runs") from stuck
    return {
        pass_: ends[network.index[pass_.type, pass_.stage] * m + pass_.microbatch]
        for passes in schedule.ranks
        for pass_ in passes
    }


def collective_order(
    schedule: Schedule, group: frozenset[CommType], ends: Mapping[Pass, float]
) -> list[tuple[float, CommType, int]]:
    """The group's collectives as (ready, type, microbatch), in the order that every rank keeps."""
    names = list(CommType)
    order = []
    for type_ in collectives(schedule):
        if type_ not in group:
            continue
        for mb in range(schedule.m):
            producers = [
                need for rank in range(schedule.p) for need in prerequisites(Comm(type_, rank, mb), schedule)
            ]
            produced = [ends.get(need) for need in producers if isinstance(need, Pass)]
            if all(end is not None for end in produced):
                order.append((max(end for end in produced if end is not None), type_, mb))
    return sorted(order, key=lambda item: (item[0], names.index(item[1]), item[2]))


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
