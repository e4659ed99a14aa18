"""From compute passes to programs: communication inserted in one order that all ranks share.

1. ``play_passes`` runs the passes as soon as they can.
2. ``communications`` lists every transfer and every collective of both vocabulary layers, by the moment at
   which it is *ready*: when its last producer ends.
3. ``insert`` puts a rank's part in each before the first of its passes that ends after that moment; sends,
   receives and collectives that are ready at once are in the order of type, stage and microbatch.

On every rank a communication stands after its producer and before its consumer. The programs of all ranks are
parts of one list: all passes by their ends, and all communications by their moments. Running that list item
by item runs every program. So no program can hang, whatever the real times are, and whether a communication
holds its stream, its host or its device until all ranks have joined (``hang.py`` tries each). A rank joins a
communication as late as this list allows, so it does not hold receive buffers for long.

An example: 2 ranks, 2 microbatches, F takes 10 ms, B takes 20 ms. 0F0 ends at 10 and 0F1 at 20, so these are
the moments of the two forward transfers. On rank 1, 1F0 is the first pass that ends after 10, and also the
first that ends after 20. So both receives stand before it, in the order of the sends:

    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1

The F and B of a pair end at one moment, so no communication comes between them: they are one instruction of
the program, and one item of that list.

Next: ``launches.py``, then ``plan.py`` and ``simulate.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_vocabpar.schedule.play.events import Events, run_passes
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.dependencies import collectives
from megatron_vocabpar.schedule.words.passes import (
    LAYERS,
    RECEIVE_OF,
    Atom,
    Comm,
    CommType,
    Pass,
    PassType,
    join_pairs,
)
from megatron_vocabpar.schedule.words.schedule import Late, Program, Schedule

_RANKING = {type_: number for number, type_ in enumerate(CommType)}
_TRANSFERS = frozenset(_RANKING[send] for send in RECEIVE_OF)
_LEAST_MS = 1e-5  # of a pass or a transfer


def lower(schedule: Schedule, costs: PassCosts | None = None) -> Program:
    """Each rank's instructions: the schedule's passes, in order, with communication between them.

    The costs, by default ``PassCosts.default``, decide the order of communication: every rank must be given
    the same.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    played = play_passes(schedule, PassTimes.of(costs or PassCosts.default(schedule.p), schedule))
    return insert(played, sorted(communications(played)))[0]


def play_passes(schedule: Schedule, times: PassTimes) -> Events:
    """Play the passes, each as soon as it can run: when they run, and when their results are ready.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    return run_passes(schedule, padded(times))


def padded(times: PassTimes) -> PassTimes:
    """The times, none of them 0, so that "after" never means "at the same time"."""
    passes = {type_: tuple(max(time, _LEAST_MS) for time in row) for type_, row in times.passes.items()}
    comms = {type_: max(time, _LEAST_MS) for type_, time in times.comms.items()}
    return PassTimes(passes, comms, times.hidden)


class Communication(NamedTuple):
    """One communication of all ranks that take part; a tuple, so that sorting gives the global order.

    Attributes:
        ready_ms: the moment at which its last producer ends.
        kind: the number of its type; a transfer has its send's.
        stage: the stage that sends a transfer; 0 for collectives.
        microbatch: its microbatch.
        parts: each rank's instruction.
    """

    ready_ms: float
    kind: int
    stage: int
    microbatch: int
    parts: tuple[Comm, ...]


def communications(played: Events) -> Iterator[Communication]:
    """Every transfer and collective that the schedule's passes need, unsorted."""
    numbering, m = played.numbering, played.numbering.schedule.m
    for send, (receive, step) in RECEIVE_OF.items():
        for stage, node in enumerate(numbering.nodes_of(receive)):
            for mb, ready in enumerate(played.starts[node * m : (node + 1) * m]):
                if ready >= 0.0:
                    parts: tuple[Comm, ...] = Comm(send, stage - step, mb), Comm(receive, stage, mb)
                    yield Communication(ready, _RANKING[send], stage - step, mb, parts)
    for comm in collectives(numbering.schedule):
        node, *_ = ranks = numbering.nodes_of(comm)
        for mb, ready in enumerate(played.starts[node * m : (node + 1) * m]):
            if ready >= 0.0:
                parts = tuple(Comm(comm, rank, mb) for rank in range(len(ranks)))
                yield Communication(ready, _RANKING[comm], 0, mb, parts)


def insert(
    played: Events, order: Iterable[Communication], layers: Sequence[int] = ()
) -> tuple[Program, Late]:
    """Each rank's passes, with its parts in the sorted communications between them.

    A part whose moment falls inside a pass stands before it. ``layers``, the number of each stage, lets it
    be launched inside, after the last layer that has ended by then: in a list in which every layer is an
    item, it has the same place, so nothing can hang for it.
    """
    schedule = played.numbering.schedule
    ranks = schedule.placement.ranks
    moments = _moments(played)
    out: list[list[Atom]] = [[] for _ in schedule.ranks]
    late: dict[Comm, float] = {}
    position = [0] * schedule.p
    for communication in order:
        is_transfer = communication.kind in _TRANSFERS
        for part in communication.parts:
            rank = ranks[part.stage] if is_transfer else part.stage
            first = position[rank]
            behind = bisect_right(moments[rank], communication.ready_ms, lo=first)
            out[rank] += schedule.ranks[rank][first:behind]
            out[rank].append(part)
            position[rank] = behind
            if layers and behind < len(schedule.ranks[rank]):
                share = _layers_done(played, schedule.ranks[rank][behind], communication.ready_ms, layers)
                if share > 0.0:
                    late[part] = share
    rows = ((*row, *schedule.ranks[rank][position[rank] :]) for rank, row in enumerate(out))
    return tuple(join_pairs(row, schedule.pairs) for row in rows), late


def layer_ends(played: Events, pass_: Pass, layers: Sequence[int]) -> list[float]:
    """When each layer of a pass ends but for the last, in ms; none of passes that have no layers."""
    count = layers[pass_.stage] if pass_.type in LAYERS else 1
    number = played.numbering.number(pass_)
    start, end = played.starts[number], played.ends[number]
    return [start + (end - start) * k / count for k in range(1, count)]


def _layers_done(played: Events, pass_: Pass, moment: float, layers: Sequence[int]) -> float:
    """The share of a pass's layers that have ended at a moment."""
    ends = layer_ends(played, pass_, layers)
    return bisect_right(ends, moment) / (len(ends) + 1)


def _moments(played: Events) -> list[list[float]]:
    """Each pass's moment in the global order: its end.

    A pass that all ranks run together has one moment for all: the end of the rank that ends it first.
    """
    schedule, number = played.numbering.schedule, played.numbering.number
    moments = [[played.ends[number(pass_)] for pass_ in row] for row in schedule.ranks]
    first: dict[tuple[PassType, int], float] = {}
    together = [
        (rank, position, (pass_.type, pass_.microbatch))
        for rank, row in enumerate(schedule.ranks)
        for position, pass_ in enumerate(row)
        if pass_.type in schedule.method.in_step
    ]
    for rank, position, pass_ in together:
        first[pass_] = min(first.get(pass_, moments[rank][position]), moments[rank][position])
    for rank, position, pass_ in together:
        moments[rank][position] = first[pass_]
    return moments
