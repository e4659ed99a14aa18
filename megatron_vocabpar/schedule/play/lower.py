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
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_vocabpar.schedule.play.events import Events, run_passes
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.dependencies import collectives
from megatron_vocabpar.schedule.words.passes import RECEIVE_OF, Comm, CommType, Instruction, PassType
from megatron_vocabpar.schedule.words.schedule import Program, Schedule

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
    return insert(played, sorted(communications(played)))


def play_passes(schedule: Schedule, times: PassTimes) -> Events:
    """When passes run, and what they produce is ready, if all run as soon as they can.

    Raises:
        Deadlock: if the order of the passes cannot be kept.
    """
    passes = {type_: tuple(max(time, _LEAST_MS) for time in row) for type_, row in times.passes.items()}
    comms = {type_: max(time, _LEAST_MS) for type_, time in times.comms.items()}
    return run_passes(schedule, PassTimes(passes, comms))


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


def communications(played: Events) -> Iterator[Communication]:
    """Every transfer and collective that the schedule's passes need, in no order."""
    numbering, m = played.numbering, played.numbering.schedule.m
    for send, (receive, step) in RECEIVE_OF.items():
        for stage, node in enumerate(numbering.nodes_of(receive)):
            for mb, ready in enumerate(played.starts[node * m : (node + 1) * m]):
                if ready >= 0.0:
                    parts: tuple[Comm, ...] = Comm(send, stage - step, mb), Comm(receive, stage, mb)
                    yield Communication(ready, _PLACE[send], stage - step, mb, parts)
    for comm in collectives(numbering.schedule):
        node, *_ = ranks = numbering.nodes_of(comm)
        for mb, ready in enumerate(played.starts[node * m : (node + 1) * m]):
            if ready >= 0.0:
                parts = tuple(Comm(comm, rank, mb) for rank in range(len(ranks)))
                yield Communication(ready, _PLACE[comm], 0, mb, parts)


def insert(played: Events, order: Iterable[Communication]) -> Program:
    """Each rank's passes with its parts in the communications of ``order``, which are sorted."""
    schedule = played.numbering.schedule
    ranks = [schedule.placement.rank_of(stage) for stage in range(schedule.placement.num_stages)]
    moments = _moments(played)
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


def _moments(played: Events) -> list[list[float]]:
    """When each pass stands in the global order: at its end; if all ranks run it together, at the first."""
    schedule, number = played.numbering.schedule, played.numbering.number
    moments = [[played.ends[number(pass_)] for pass_ in row] for row in schedule.ranks]
    first: dict[tuple[PassType, int], float] = {}
    together = [
        (rank, place, (pass_.type, pass_.microbatch))
        for rank, row in enumerate(schedule.ranks)
        for place, pass_ in enumerate(row)
        if pass_.type in schedule.method.in_step
    ]
    for rank, place, pass_ in together:
        first[pass_] = min(first.get(pass_, moments[rank][place]), moments[rank][place])
    for rank, place, pass_ in together:
        moments[rank][place] = first[pass_]
    return moments
