"""Every instruction of a schedule as one number, for speed: no hashing, no objects made for a look-up.

Instruction ``type`` of ``stage`` and ``microbatch`` is ``(index of type * stages + stage) * m + microbatch``;
what stands before the microbatch is its *node*. The rules are the same for every microbatch, so that what a
node waits for is worked out once, from ``dependencies.prerequisites``, as a distance between numbers.

Next: ``events.py`` and ``validate.py``, which use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .dependencies import EMBEDDED_INPUTS, collectives, prerequisites, vocabulary_passes
from .passes import POINT_TO_POINT, Comm, CommType, Instruction, Pass, PassType
from .schedule import Schedule

TYPES: tuple[PassType | CommType, ...] = (*PassType, *CommType)


class Distance(NamedTuple):
    """An instruction waits for the one ``offset`` numbers on; not in its first ``back`` microbatches."""

    offset: int
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
    def size(self) -> int:
        """All numbers are below this."""
        return len(TYPES) * self.width * self.schedule.m

    @cached_property
    def first_node(self) -> dict[PassType | CommType, int]:
        """The node of each type on stage 0."""
        return {type_: place * self.width for place, type_ in enumerate(TYPES)}

    @cached_property
    def first(self) -> dict[PassType | CommType, int]:
        """The number of each type's first instruction."""
        return {type_: node * self.schedule.m for type_, node in self.first_node.items()}

    def number(self, item: Instruction) -> int:
        """The number of an instruction whose stage and microbatch the schedule has."""
        return self.first[item.type] + item.stage * self.schedule.m + item.microbatch

    def item(self, number: int) -> Instruction:
        """The instruction with this number."""
        node, microbatch = divmod(number, self.schedule.m)
        place, stage = divmod(node, self.width)
        type_ = TYPES[place]
        if isinstance(type_, PassType):
            return Pass(type_, stage, microbatch)
        return Comm(type_, stage, microbatch)

    def node(self, item: Instruction) -> int:
        """The number of an instruction, its microbatch left out."""
        return self.first_node[item.type] + item.stage

    @cached_property
    def needs(self) -> tuple[tuple[Distance, ...], ...]:
        """What each node waits for; nothing where the schedule has no such instruction."""
        table: list[tuple[Distance, ...]] = [()] * (len(TYPES) * self.width)
        for item in self._templates():
            table[self.node(item)] = tuple(self._distances(item))
        return tuple(table)

    def _distances(self, item: Instruction) -> Iterator[Distance]:
        for need in prerequisites(item, self.schedule):
            back = item.microbatch - need.microbatch
            yield Distance((self.node(need) - self.node(item)) * self.schedule.m - back, back)

    def _templates(self) -> Iterator[Instruction]:
        """One instruction of each node that the schedule can have, of a microbatch with all its needs."""
        mb = EMBEDDED_INPUTS
        for type_ in (PassType.F, PassType.B, PassType.W):
            for stage in range(self.width):
                pass_ = Pass(type_, stage, mb)
                yield pass_
                for receive in prerequisites(pass_, self.schedule):
                    if isinstance(receive, Comm) and receive.type in POINT_TO_POINT:
                        yield receive
                        yield from prerequisites(receive, self.schedule)
        for rank in range(self.schedule.p):
            yield from (Pass(type_, rank, mb) for type_ in vocabulary_passes(self.schedule))
            yield from (Comm(comm, rank, mb) for comm in collectives(self.schedule))
