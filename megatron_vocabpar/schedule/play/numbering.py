"""Every instruction of a schedule as one number, for speed: no hashing, no objects made for a look-up.

Instruction ``type`` of ``stage`` and ``microbatch`` is ``(index of type * stages + stage) * m + microbatch``.
The part before the microbatch is its *node*. With two stages and m = 8, F is type 0 and B type 1, so that 1F5
is node 1 and number 13, and 0B5 is node 2 and number 21.

The rules are the same for every microbatch, so what a node waits for is worked out once, from
``dependencies.prerequisites``. Three modules play these numbers, each for a reason of its own:

- ``events.py`` plays a given order, with queues for transfers and collectives: the simulator;
- ``make/list_scheduling.py`` finds an order while it plays;
- ``waits.py`` asks what a GPU's streams wait for, whatever the times are; it numbers a program's items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron_vocabpar.schedule.words.dependencies import (
    EMBEDDED_INPUTS,
    collectives,
    prerequisites,
    ranks_of,
    vocabulary_passes,
)
from megatron_vocabpar.schedule.words.passes import (
    LAYERS,
    POINT_TO_POINT,
    Atom,
    Comm,
    CommType,
    Instruction,
    Pair,
    Pass,
    PassType,
)
from megatron_vocabpar.schedule.words.schedule import Schedule

_OUTPUT = (PassType.S, PassType.S2, PassType.T, PassType.L, PassType.TW, PassType.R)
_VOCABULARY = (*_OUTPUT, PassType.IF, PassType.IB)
TYPES: tuple[PassType | CommType, ...] = (*LAYERS, *_VOCABULARY, *CommType)


class LocalNeed(NamedTuple):
    """Microbatch i of a node waits for microbatch i - ``back`` of ``node``, if that is not below 0."""

    node: int
    back: int


@dataclass(frozen=True)
class Numbering:
    """The numbers of one schedule's instructions; a frame will do."""

    schedule: Schedule

    @cached_property
    def width(self) -> int:
        """Nodes of one type: as many as there are stages."""
        return self.schedule.placement.num_stages

    @cached_property
    def nodes(self) -> int:
        """All nodes are below this."""
        return len(TYPES) * self.width

    @cached_property
    def size(self) -> int:
        """All numbers are below this."""
        return self.nodes * self.schedule.m

    @cached_property
    def first_node(self) -> dict[PassType | CommType, int]:
        """The node of each type on stage 0."""
        return {type_: index * self.width for index, type_ in enumerate(TYPES)}

    def number(self, item: Atom) -> int:
        """The number of an instruction whose stage and microbatch the schedule has."""
        return (self.first_node[item.type] + item.stage) * self.schedule.m + item.microbatch

    def numbers(self, row: Iterable[Instruction]) -> list[int]:
        """The numbers of a rank's instructions; a pair has that of its F."""
        first, m = self.first_node, self.schedule.m
        items = (item.forward if isinstance(item, Pair) else item for item in row)
        return [(first[item.type] + item.stage) * m + item.microbatch for item in items]

    def item(self, number: int) -> Atom:
        return self.item_of(*divmod(number, self.schedule.m))

    def item_of(self, node: int, microbatch: int) -> Atom:
        """A node's instruction of one microbatch."""
        type_, stage = self.type_of(node), node % self.width
        return (
            Pass(type_, stage, microbatch) if isinstance(type_, PassType) else Comm(type_, stage, microbatch)
        )

    def type_of(self, node: int) -> PassType | CommType:
        """The type of a node's instructions."""
        return TYPES[node // self.width]

    def nodes_of(self, type_: PassType | CommType) -> range:
        """The nodes of a type: one for each stage, or, in vocabulary layers, for each rank that has it."""
        first = self.first_node[type_]
        if type_ in LAYERS or type_ in POINT_TO_POINT:
            return range(first, first + self.width)
        ranks = ranks_of(type_, self.schedule) if isinstance(type_, PassType) else range(self.schedule.p)
        return range(first + ranks.start, first + ranks.stop)

    @cached_property
    def needs(self) -> tuple[tuple[LocalNeed, ...], ...]:
        """What each node waits for; nothing where the schedule has no such instruction."""
        schedule = self.schedule
        frame = Schedule(schedule.method, schedule.placement, m=1, mtp_depths=schedule.mtp_depths)
        return _needs(Numbering(frame))  # the same for every microbatch

    def producers(self, node: int) -> tuple[int, ...]:
        """The pass nodes whose result a receive, or a rank's part in a collective, carries."""
        if isinstance(self.type_of(node), PassType):
            return (node,)
        return tuple(producer for need in self.needs[node] for producer in self.producers(need.node))


@lru_cache(maxsize=64)
def _needs(of: Numbering) -> tuple[tuple[LocalNeed, ...], ...]:
    """``Numbering.needs`` of a frame; kept, as a search plays many orders and layouts of one frame."""
    table: list[tuple[LocalNeed, ...]] = [()] * of.nodes
    for item in _templates(of.schedule):
        table[of.first_node[item.type] + item.stage] = tuple(
            LocalNeed(of.first_node[need.type] + need.stage, item.microbatch - need.microbatch)
            for need in prerequisites(item, of.schedule)
        )
    return tuple(table)


def _templates(schedule: Schedule) -> Iterator[Atom]:
    """One instruction of each node that the schedule can have, for a microbatch that has all needs."""
    mb = EMBEDDED_INPUTS
    for type_ in LAYERS:
        for stage in range(schedule.placement.num_stages):
            pass_ = Pass(type_, stage, mb)
            yield pass_
            for receive in prerequisites(pass_, schedule):
                if isinstance(receive, Comm) and receive.type in POINT_TO_POINT:
                    yield receive
                    yield from prerequisites(receive, schedule)
    for type_ in vocabulary_passes(schedule):
        yield from (Pass(type_, rank, mb) for rank in ranks_of(type_, schedule))
    for rank in range(schedule.p):
        yield from (Comm(comm, rank, mb) for comm in collectives(schedule))


def numbered_needs(needs: tuple[LocalNeed, ...], m: int) -> list[tuple[int, int]]:
    """Needs as (first, back): microbatch i waits for number ``first + i`` if i is at least ``back``.

    With m = 8, an IF that waits for node 40 of two microbatches before gives (318, 2): its microbatch 5
    waits for number 323, which is node 40 of microbatch 3.
    """
    return [(node * m - back, back) for node, back in needs]
