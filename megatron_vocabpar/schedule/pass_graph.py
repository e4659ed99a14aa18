"""The ordering rules and the times of one microbatch, flattened to indices for fast simulation.

Every microbatch has the same passes, with the same times and the same dependencies, so they are worked
out once. A *node* is a pass of some type on some stage, or a collective as a whole (all ranks' parts). A
node of microbatch ``i`` needs nodes of the same microbatch, or of an earlier one. Passes that start
together on all ranks (interlaced's S) get a zero-length *arrival* node before them and wait for all
arrivals.

Everything here is derived from ``dependencies.prerequisites``; no rule is restated.
Next: ``building_block.py`` places the nodes of one microbatch, ``list_scheduling.py`` plays those of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .costs import PassTimes
from .dependencies import EMBEDDED_INPUTS, collectives, prerequisites, vocabulary_passes
from .passes import POINT_TO_POINT, Comm, CommType, Pass, PassType
from .schedule import Schedule


class Need(NamedTuple):
    """A node waits for ``node`` of the microbatch ``back`` earlier, and ``latency`` ms more."""

    node: int
    back: int
    latency: float


@dataclass(frozen=True)
class PassGraph:
    """Nodes by index: passes first, then arrivals, then collectives.

    Attributes:
        names: the type and stage of each pass node; arrivals and collectives have none.
        rank: the rank of each pass node and arrival node.
        duration: in ms, of each pass node and arrival node.
        needs: what each pass node and arrival node waits for.
        feeds: the collective nodes that each pass node and arrival node is a producer of.
        producers: for every node, how many producers it has (0 but for collectives).
        index: pass node by type and stage.
        arrival: the arrival node of a pass node that has one.
        groups: collective node by type.
    """

    names: tuple[tuple[PassType, int], ...]
    rank: tuple[int, ...]
    duration: tuple[float, ...]
    needs: tuple[tuple[Need, ...], ...]
    feeds: tuple[tuple[int, ...], ...]
    producers: tuple[int, ...]
    index: dict[tuple[PassType, int], int]
    arrival: dict[int, int]
    groups: dict[CommType, int] = field(default_factory=dict)

    @property
    def sinks(self) -> frozenset[int]:
        """Pass nodes that nothing waits for, so that they may be delayed: T of vocab-2, W, IB."""
        needed = {need.node for needs in self.needs for need in needs}
        delayed = (PassType.T, PassType.W, PassType.IB)
        return frozenset(
            node
            for node, (type_, _) in enumerate(self.names)
            if type_ in delayed and node not in needed and not self.feeds[node]
        )


def build_graph(schedule: Schedule, times: PassTimes, *, splits_w: bool) -> PassGraph:
    """Flatten ``schedule``'s rules (a frame will do) and ``times``."""
    names = tuple(_names(schedule, splits_w))
    index = {name: node for node, name in enumerate(names)}
    together = [node for node, (type_, _) in enumerate(names) if type_ in schedule.method.in_step]
    arrival = {node: len(names) + k for k, node in enumerate(together)}
    num_parts = len(names) + len(arrival)
    gates = {
        type_: num_parts + k for k, type_ in enumerate(dict.fromkeys(names[node][0] for node in together))
    }
    groups = {type_: num_parts + len(gates) + k for k, type_ in enumerate(collectives(schedule))}

    needs: list[tuple[Need, ...]] = [tuple(_needs(name, schedule, times, index, groups)) for name in names]
    feeds: list[list[int]] = [[] for _ in range(num_parts)]
    producers = [0] * (num_parts + len(gates) + len(groups))
    for node, part in arrival.items():
        gate = gates[names[node][0]]
        needs.append(needs[node])
        needs[node] = (Need(gate, 0, 0.0),)
        feeds[part].append(gate)
        producers[gate] += 1
    for type_, group in groups.items():
        for rank in range(schedule.p):
            for producer in prerequisites(Comm(type_, rank, EMBEDDED_INPUTS), schedule):
                assert isinstance(producer, Pass)
                feeds[index[producer.type, producer.stage]].append(group)
                producers[group] += 1
    ranks = [schedule.rank_of(Pass(type_, stage, 0)) for type_, stage in names]
    durations = [times.passes[type_][stage] for type_, stage in names]
    return PassGraph(
        names,
        (*ranks, *(ranks[node] for node in arrival)),
        (*durations, *(0.0 for _ in arrival)),
        tuple(needs),
        tuple(map(tuple, feeds)),
        tuple(producers),
        index,
        arrival,
        groups,
    )


def _names(schedule: Schedule, splits_w: bool) -> Iterator[tuple[PassType, int]]:
    for type_ in (PassType.F, PassType.B, *((PassType.W,) if splits_w else ())):
        for stage in range(schedule.placement.num_stages):
            yield type_, stage
    for type_ in vocabulary_passes(schedule):
        for rank in range(schedule.p):
            yield type_, rank


def _needs(
    name: tuple[PassType, int],
    schedule: Schedule,
    times: PassTimes,
    index: dict[tuple[PassType, int], int],
    groups: dict[CommType, int],
) -> Iterator[Need]:
    for item in prerequisites(Pass(*name, EMBEDDED_INPUTS), schedule):
        back = EMBEDDED_INPUTS - item.microbatch
        if isinstance(item, Pass):
            yield Need(index[item.type, item.stage], back, 0.0)
        elif item.type in POINT_TO_POINT:
            (send,) = prerequisites(item, schedule)
            (producer,) = prerequisites(send, schedule)
            assert isinstance(producer, Pass)
            yield Need(index[producer.type, producer.stage], back, times.comms[item.type])
        else:
            yield Need(groups[item.type], back, times.comms[item.type])
