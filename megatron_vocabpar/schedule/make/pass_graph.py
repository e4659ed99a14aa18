"""The ordering rules and the times of one microbatch's passes, for fast generation.

The nodes are those of ``play/numbering.py``. Sends and receives are left out: 1F waits for 0F and for the
transfer's time. A collective is one node, that of rank 0's part. Passes that start together on all ranks
(interlaced's S) get an *arrival* node of no length each, and one *gate*, which waits for all arrivals.
Arrivals and gates have numbers above all others.

All rules come from ``words.dependencies.prerequisites``; none is stated again.
Next: ``building_block.py`` places the nodes of one microbatch, ``list_scheduling.py`` plays those of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_vocabpar.schedule.play.numbering import Numbering
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.dependencies import collectives, vocabulary_passes
from megatron_vocabpar.schedule.words.passes import POINT_TO_POINT, PassType


class TimedNeed(NamedTuple):
    """A node waits for ``node`` of the microbatch ``back`` earlier, and ``latency`` ms more."""

    node: int
    back: int
    latency: float


@dataclass(frozen=True)
class PassGraph:
    """Nodes, their times, and what each waits for.

    Attributes:
        numbering: what the nodes mean, except arrivals and gates.
        nodes: the pass nodes of each type, by stage.
        arrival: for a pass node that all ranks start together, its arrival node.
        size: all nodes are below this.
        rank: the rank of each pass node and arrival node.
        duration: in ms, of each pass node and arrival node.
        needs: what each pass node and arrival node waits for.
        feeds: for each node, the collectives and gates that wait for it as one of their producers.
        producers: the number of producers of each collective and gate.
    """

    numbering: Numbering
    nodes: dict[PassType, range]
    arrival: dict[int, int]
    size: int
    rank: dict[int, int]
    duration: dict[int, float]
    needs: dict[int, tuple[TimedNeed, ...]]
    feeds: dict[int, list[int]]
    producers: dict[int, int]

    def type_of(self, node: int) -> PassType:
        type_ = self.numbering.type_of(node)
        assert isinstance(type_, PassType)
        return type_

    def stage_of(self, node: int) -> int:
        """The stage of a pass node, or the rank of a vocabulary pass."""
        return node % self.numbering.width

    def of_type(self, type_: PassType) -> range:
        """The pass nodes of a type, by stage; empty if the schedule has no such pass."""
        return self.nodes.get(type_, range(0))

    @cached_property
    def passes(self) -> frozenset[int]:
        """All pass nodes."""
        return frozenset(node for nodes in self.nodes.values() for node in nodes)

    @cached_property
    def followers(self) -> dict[int, list[tuple[int, int]]]:
        """For each node those that wait for it, and how many microbatches later; a pass follows itself."""
        followers = {node: [(node, 1)] for node in self.rank} | {node: [] for node in self.producers}
        for node, needs in self.needs.items():
            for need in needs:
                followers[need.node].append((node, need.back))
        return followers

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The nodes that wait for nothing in microbatch 0."""
        return tuple(node for node, needs in self.needs.items() if all(need.back for need in needs))

    @cached_property
    def sinks(self) -> frozenset[int]:
        """Pass nodes that may be delayed, as nothing waits for them: T of vocab-2, TW, W, IB."""
        needed = {need.node for needs in self.needs.values() for need in needs}
        types = (PassType.T, PassType.TW, PassType.W, PassType.IB)
        delayed = (node for type_ in types for node in self.of_type(type_))
        return frozenset(node for node in delayed if node not in needed and not self.feeds[node])


def build_graph(numbering: Numbering, times: PassTimes, *, splits_w: bool) -> PassGraph:
    """The graph of a numbered schedule (a frame will do) with these times."""
    schedule = numbering.schedule
    types = (PassType.F, PassType.B, *((PassType.W,) if splits_w else ()), *vocabulary_passes(schedule))
    nodes = {type_: numbering.nodes_of(type_) for type_ in types}
    rank = {node: schedule.rank_of(numbering.item_of(node, 0)) for type_ in types for node in nodes[type_]}
    duration = {node: times.passes[type_][node % numbering.width] for type_ in types for node in nodes[type_]}
    needs = {node: tuple(_needs(node, numbering, times)) for node in rank}
    feeds: dict[int, list[int]] = {node: [] for node in rank}
    producers: dict[int, int] = {}

    arrival: dict[int, int] = {}
    size = numbering.nodes
    for type_ in schedule.method.in_step:
        together = numbering.nodes_of(type_)
        gate = size + len(together)
        for node, part in zip(together, range(size, gate), strict=True):
            arrival[node], rank[part], duration[part] = part, rank[node], 0.0
            needs[part], needs[node] = needs[node], (TimedNeed(gate, 0, 0.0),)
            feeds[part] = [gate]
        producers[gate] = len(together)
        size = gate + 1
    for comm in collectives(schedule):
        group, *_ = parts = numbering.nodes_of(comm)
        producing = [node for part in parts for node in numbering.producers(part)]
        for node in producing:
            feeds[node].append(group)
        producers[group] = len(producing)
    return PassGraph(numbering, nodes, arrival, size, rank, duration, needs, feeds, producers)


def _needs(node: int, numbering: Numbering, times: PassTimes) -> Iterator[TimedNeed]:
    for source, back in numbering.needs[node]:
        type_ = numbering.type_of(source)
        if isinstance(type_, PassType):
            yield TimedNeed(source, back, 0.0)
        elif type_ in POINT_TO_POINT:
            (producer,) = numbering.producers(source)
            yield TimedNeed(producer, back, times.comms[type_])
        else:
            yield TimedNeed(numbering.first_node[type_], back, times.comms[type_])
