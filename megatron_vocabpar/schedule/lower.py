"""From compute passes to programs: communication inserted in one order that all ranks share.

1. ``play_passes`` runs the passes as soon as they can.
2. ``communications`` lists every transfer and every collective of both vocabulary layers, by the moment at
   which it is *ready*: when its last producer ends.
3. ``insert`` puts a rank's part in each before the first of its passes that ends after that moment; sends,
   receives and collectives that are ready at once are in the order of type, stage and microbatch.

On every rank a communication so stands behind the rank's own producer and before its consumer, and the
programs of all ranks are parts of one list: that of all passes by their ends and all communications by their
moments. Running that list item by item runs them all, so no program can hang, whatever the real times are,
and whether a communication holds its stream, its host or its device until all ranks have joined (``hang.py``
tries each). A rank joins no earlier than that, so that it does not hold receive buffers for long.

Next: ``plan.py``, then ``simulate.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .costs import PassCosts, PassTimes
from .pass_graph import PassGraph, build_graph
from .passes import RECEIVE_OF, Comm, CommType, Instruction, Pass, PassType
from .replay import Stopped, replay
from .schedule import Deadlock, Program, Schedule

_SEND = {PassType.F: CommType.SEND_F, PassType.B: CommType.SEND_B}
_PLACE = {type_: place for place, type_ in enumerate(CommType)}
_TRANSFERS = frozenset(_PLACE[send] for send in RECEIVE_OF)
_LEAST_MS = 1e-5  # no pass or transfer is taken to be shorter, so that "after" is never "at the same time"


def lower(schedule: Schedule, costs: PassCosts | None = None) -> Program:
    """Each rank's instructions: the schedule's passes, in order, with communication between them.

    Args:
        schedule: a valid schedule, or a forward-only one.
        costs: decide the order of communication; ``PassCosts.default`` where nothing is measured. Every rank
            must be given the same.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    played = play_passes(schedule, PassTimes.of(costs or PassCosts.default(schedule.p), schedule))
    return insert(schedule, played, sorted(communications(schedule, played)))


class Communication(NamedTuple):
    """One communication of all ranks that take part; a tuple, so that sorting gives the global order.

    Attributes:
        ready_ms: when its last producer ends.
        place: its type's place among the types; of a transfer, that of its send.
        stage: of a transfer, where it is sent; 0 for collectives.
        microbatch: its microbatch.
        parts: each rank's instruction.
    """

    ready_ms: float
    place: int
    stage: int
    microbatch: int
    parts: tuple[Comm, ...]


def communications(schedule: Schedule, played: Played) -> Iterator[Communication]:
    """Every transfer and collective that the schedule's passes need, in no order."""
    stages = range(schedule.placement.num_stages)
    frames = (Pass(type_, stage, 0) for type_ in _SEND for stage in stages)
    leaving = {(pass_.type, pass_.stage) for pass_ in frames if receive_of(pass_, schedule) is not None}
    for row, ends in zip(schedule.ranks, played.ends, strict=True):
        for pass_, end in zip(row, ends, strict=True):
            if (pass_.type, pass_.stage) in leaving:
                send, mb = _SEND[pass_.type], pass_.microbatch
                receive, step = RECEIVE_OF[send]
                parts: tuple[Comm, ...] = Comm(send, pass_.stage, mb), Comm(receive, pass_.stage + step, mb)
                yield Communication(end, _PLACE[send], pass_.stage, mb, parts)
    for comm, moments in played.ready.items():
        for mb, ready in enumerate(moments):
            if ready >= 0.0:
                parts = tuple(Comm(comm, rank, mb) for rank in range(schedule.p))
                yield Communication(ready, _PLACE[comm], 0, mb, parts)


def receive_of(item: Instruction, schedule: Schedule) -> Comm | None:
    """The receive, on another rank, of what ``item`` produces; None if there is none."""
    if not isinstance(item, Pass) or item.type not in _SEND:
        return None
    receive, step = RECEIVE_OF[_SEND[item.type]]
    neighbour, placement = item.stage + step, schedule.placement
    if not 0 <= neighbour <= placement.last_stage or placement.rank_of(neighbour) == placement.rank_of(
        item.stage
    ):
        return None
    return Comm(receive, neighbour, item.microbatch)


def insert(schedule: Schedule, played: Played, order: Iterable[Communication]) -> Program:
    """Each rank's passes with its parts in the communications of ``order``, which are sorted."""
    ranks = [schedule.placement.rank_of(stage) for stage in range(schedule.placement.num_stages)]
    moments = _moments(schedule, played)
    out: list[list[Instruction]] = [[] for _ in schedule.ranks]
    position = [0] * schedule.p
    for communication in order:
        is_transfer = communication.place in _TRANSFERS
        for part in communication.parts:
            rank = ranks[part.stage] if is_transfer else part.stage
            passes, when, first = schedule.ranks[rank], moments[rank], position[rank]
            place = bisect_right(when, communication.ready_ms, lo=first)
            out[rank] += passes[first:place]
            out[rank].append(part)
            position[rank] = place
    return tuple((*row, *schedule.ranks[rank][position[rank] :]) for rank, row in enumerate(out))


def _moments(schedule: Schedule, played: Played) -> list[list[float]]:
    """When each pass stands in the global order: at its end; if all ranks run it together, at the first."""
    moments = [list(ends) for ends in played.ends]
    together: dict[tuple[PassType, int], list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.ranks):
        for place, pass_ in enumerate(row):
            if pass_.type in schedule.method.in_step:
                together.setdefault((pass_.type, pass_.microbatch), []).append((rank, place))
    for places in together.values():
        first = min(moments[rank][place] for rank, place in places)
        for rank, place in places:
            moments[rank][place] = first
    return moments


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


def play_passes(schedule: Schedule, times: PassTimes) -> Played:
    """Play a schedule's passes.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    times = PassTimes(
        {type_: tuple(max(time, _LEAST_MS) for time in row) for type_, row in times.passes.items()},
        {type_: max(time, _LEAST_MS) for type_, time in times.comms.items()},
    )
    graph, m = build_graph(schedule, times, splits_w=schedule.splits_w), schedule.m
    nodes: dict[PassType, dict[int, int]] = {}
    for (type_, stage), node in graph.index.items():
        nodes.setdefault(type_, {})[stage] = node
    items = [
        [nodes[pass_.type][pass_.stage] * m + pass_.microbatch for pass_ in row] for row in schedule.ranks
    ]
    sequences = [list(_with_arrivals(row, graph, m)) for row in items] if graph.arrival else items
    try:
        ends = replay(graph, m, sequences)
    except Stopped as stopped:
        at = {rank: _named(item, graph, m, rank) for rank, item in stopped.items.items()}
        raise Deadlock(at, _named(stopped.waits_for, graph, m, min(at))) from stopped
    ready = {type_: ends[node * m : (node + 1) * m] for type_, node in graph.groups.items()}
    return Played(tuple([ends[item] for item in row] for row in items), ready)


def _named(item: int, graph: PassGraph, m: int, rank: int) -> Instruction:
    """The instruction that an item of the graph stands for; of a collective, the part of ``rank``."""
    node, mb = divmod(item, m)
    if node < len(graph.names):
        return Pass(*graph.names[node], mb)
    for pass_node, arrival in graph.arrival.items():
        if node in (arrival, *graph.feeds[arrival]):
            type_, stage = graph.names[pass_node]
            return Pass(type_, stage if node == arrival else rank, mb)
    return Comm(next(type_ for type_, group in graph.groups.items() if group == node), rank, mb)


def _with_arrivals(row: Iterable[int], graph: PassGraph, m: int) -> Iterator[int]:
    for item in row:
        node, mb = divmod(item, m)
        if node in graph.arrival:
            yield graph.arrival[node] * m + mb
        yield item
