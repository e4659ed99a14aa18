"""The idea: place one microbatch's passes once, and repeat them for all microbatches.

A *building block* gives every pass of one microbatch a start, its *offset*. The block of microbatch ``i`` is
the same, ``i`` *intervals* later; the interval is the work of one microbatch on the busiest rank. Blocks do
not collide if on each rank no two passes overlap modulo the interval. ``place`` ensures that with a ring of
busy arcs for each rank. If stages start far apart it need not, as the slack absorbs collisions.

The *lifespan* of a stage is the time from the start of its F to the end of its B. Divided by the interval, it
is the number of microbatches whose activations the stage holds. The vocabulary passes are part of the block:
S goes where its rank has room after C0, and so on. So a barrier lengthens the lifespan by at most about one
interval.

Source: section 5.2 and Figure 9; Qi et al., Pipeline Parallelism with Controllable Memory (2024).
Next: ``list_scheduling.py`` (playing the repeated block), ``families.py`` (the blocks themselves).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import fsum

from megatron_vocabpar.schedule.make.pass_graph import PassGraph
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule

Name = tuple[PassType, int]

_SLACK = 1e-9  # of the interval: arcs this close touch
_PACKINGS = 200  # ways tried to fit many passes into many gaps
_ROOM_FOR = 4  # passes that a start in the middle of a gap may leave room for


@dataclass(frozen=True)
class BuildingBlock:
    """Offsets (ms) of one microbatch's passes, repeated every ``interval`` ms."""

    interval: float
    offsets: Mapping[int, float]


@dataclass(frozen=True)
class Hops:
    """The least distance, in intervals, between the starts of neighbouring stages' passes; 0: none.

    Attributes:
        forward: for each chunk, from F on the stage before to F on a stage of the chunk.
        backward: for each chunk, from B on the stage after to B on a stage of the chunk.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def of(self, frame: Schedule, interval: float) -> dict[Name, float]:
        """The hop of each F and B, in ms."""
        chunk_of, stages = frame.placement.chunk_of, range(frame.placement.num_stages)
        forward = {(PassType.F, stage): self.forward[chunk_of(stage)] * interval for stage in stages}
        return forward | {(PassType.B, stage): self.backward[chunk_of(stage)] * interval for stage in stages}


@dataclass
class _Ring:
    """The busy time of one rank, modulo the interval, and the lengths still to be placed in it."""

    interval: float
    remaining: list[float]
    arcs: list[tuple[float, float]] = field(default_factory=list)

    def reserve(self, duration: float) -> None:
        """Keep the beginning of the interval for a pass that all ranks start together."""
        self.remaining.remove(duration)
        self.arcs = [(0.0, duration)]

    def place(self, ready: float, duration: float) -> float:
        """Reserve the earliest start, not before ``ready``, that leaves room for all that remains."""
        # The interval is 10, F has the arc 0 to 3, and S of length 2 is ready at 14, which is phase 4; B of
        # length 5 remains. At once, S would leave gaps of 1 (3 to 4) and 4 (6 to 10): B fits into neither.
        # So it tries starts that leave a gap for B: phase 3, right after F, leaves 5 to 10; phase 8, right
        # before the next F, leaves 3 to 8. Phase 8 comes first after 4: S starts at 18, not at 23.
        self.remaining.remove(duration)
        slack = self.interval * _SLACK
        if duration <= slack:
            return ready  # takes no room
        phase = ready % self.interval
        for wait in sorted({(start - phase) % self.interval for start in self._starts(phase, duration)}):
            start = (phase + wait) % self.interval
            arcs = _insert(self.arcs, start, duration, self.interval, slack)
            if arcs is not None and _fits(
                sorted(self.remaining, reverse=True), self._gaps(arcs), slack, iter(range(_PACKINGS))
            ):
                self.arcs = arcs
                return ready + wait
        return ready  # rounding left no room: passes overlap, and still give a valid order

    def _starts(self, phase: float, duration: float) -> Iterator[float]:
        """The starts that can be best: at once, or with a gap that remaining passes fill exactly."""
        yield phase
        fillers = sorted(self.remaining, reverse=True)[:_ROOM_FOR]
        sums = {fsum(part) for size in range(len(fillers) + 1) for part in combinations(fillers, size)}
        for begin, end in self.arcs:
            for room in sums:
                yield (end + room) % self.interval
                yield (begin - room - duration) % self.interval

    def _gaps(self, arcs: Sequence[tuple[float, float]]) -> list[float]:
        if not arcs:
            return [self.interval]
        starts = [*(start for start, _ in arcs[1:]), arcs[0][0] + self.interval]
        return [start - end for (_, end), start in zip(arcs, starts, strict=True)]


def _insert(
    arcs: Sequence[tuple[float, float]], start: float, duration: float, interval: float, slack: float
) -> list[tuple[float, float]] | None:
    """``arcs`` and a further one, or None if it overlaps another. Arcs may run past the interval's end."""
    end = start + duration
    for a, b in arcs:
        for turn in (-interval, 0.0, interval):
            if start < b + turn - slack and a + turn < end - slack:
                return None
    return sorted([*arcs, (start, end)])


def _fits(sizes: Sequence[float], gaps: Sequence[float], slack: float, tries: Iterator[int]) -> bool:
    """Whether passes of these sizes (descending) fit into these gaps; false if ``tries`` run out first."""
    if not sizes:
        return True
    if next(tries, None) is None or fsum(sizes) > fsum(gaps) + slack:
        return False
    size, rest = sizes[0], sizes[1:]
    for k, gap in enumerate(gaps):
        if size <= gap + slack and gap not in gaps[:k]:
            left = [*gaps[:k], max(gap - size, 0.0), *gaps[k + 1 :]]
            if _fits(rest, left, slack, tries):
                return True
    return False


def place(
    frame: Schedule, graph: PassGraph, *, hops: Hops | None = None, stretch: float = 1.0, packed: bool = True
) -> BuildingBlock:
    """Place one microbatch's passes, in the order of the chain: F, the output layer's barriers, B.

    IF, and passes that nothing waits for (T of vocab-2, W, IB), only get room here.
    ``list_scheduling.arrange`` gives them their starts.

    Args:
        frame: the schedule's shape.
        graph: its rules and times.
        hops: the least distances between the starts of neighbouring stages' passes.
        stretch: the interval, over the work of the busiest rank; at least 1.
        packed: true: the passes of a rank must not overlap modulo the interval (modulo scheduling), and each
            starts as early as the rings allow. False: each starts as soon as it is ready, and offsets are
            only priorities, for hops that are long enough to absorb collisions.
    """
    work = [0.0] * frame.p
    for node, duration in graph.duration.items():
        work[graph.rank[node]] += duration
    interval = max(work) * stretch or 1.0
    placed = [
        node
        for type_, nodes in graph.nodes.items()
        for node in nodes
        if type_ not in (PassType.IF, PassType.IB)
    ]
    lengths: list[list[float]] = [[] for _ in range(frame.p)]
    for node in placed:
        lengths[graph.rank[node]].append(graph.duration[node])
    rings = [_Ring(interval, row) for row in lengths]
    for node in graph.arrival:
        rings[graph.rank[node]].reserve(graph.duration[node])

    hop = hops.of(frame, interval) if hops else {}
    finish: dict[int, float] = {}  # of a collective: of its producers in the chain
    offsets: dict[int, float] = {}
    for node in _chain(graph):
        ready = max(
            (finish.get(need.node, 0.0) + need.latency for need in graph.needs[node] if not need.back),
            default=0.0,
        )
        if node in graph.arrival:
            start = ready + (-ready) % interval  # the common slot begins every interval, at phase 0
        elif node in graph.passes:
            ready = max(ready, _hopped(graph, node, offsets, hop))
            start = rings[graph.rank[node]].place(ready, graph.duration[node]) if packed else ready
        else:
            start = ready
        offsets[node] = start
        finish[node] = start + graph.duration[node]
        for group in graph.feeds.get(node, ()):
            finish[group] = max(finish.get(group, 0.0), finish[node])
    return BuildingBlock(interval, {node: offset for node, offset in offsets.items() if node in graph.passes})


def _hopped(graph: PassGraph, node: int, offsets: Mapping[int, float], hop: Mapping[Name, float]) -> float:
    """The start of the neighbouring stage's pass plus the hop; 0 for other passes."""
    type_, stage = graph.type_of(node), graph.stage_of(node)
    neighbour = node + (-1 if type_ is PassType.F else 1)
    if (type_, stage) not in hop or neighbour not in graph.of_type(type_):
        return 0.0
    return offsets[neighbour] + hop[type_, stage]


def _chain(graph: PassGraph) -> Iterator[int]:
    """The nodes that a microbatch passes through, in order: F, the output layer's barriers, B."""
    sinks = graph.sinks
    for type_ in (PassType.F, *graph.numbering.schedule.method.passes, PassType.B):
        nodes = [node for node in graph.of_type(type_) if node not in sinks]
        yield from (graph.arrival[node] for node in nodes if node in graph.arrival)
        yield from reversed(nodes) if type_ is PassType.B else nodes


def lifespans(block: BuildingBlock, graph: PassGraph) -> dict[int, float]:
    """For each F node, the intervals from its start to the end of its stage's B."""
    spans = {}
    for forward, backward in zip(graph.of_type(PassType.F), graph.of_type(PassType.B), strict=True):
        end = block.offsets[backward] + graph.duration[backward]
        spans[forward] = (end - block.offsets[forward]) / block.interval
    return spans
