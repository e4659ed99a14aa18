"""The idea: one microbatch's passes, placed once, repeat for all microbatches.

A *building block* gives every pass of one microbatch a start, its *offset*. The block of microbatch
``i`` is the same, ``i`` *intervals* later, the interval being the work of one microbatch on the busiest
rank. Repeating it is conflict-free if on each rank no two passes overlap modulo the interval, which
``place`` ensures with a ring of busy arcs per rank. The *lifespan* of a stage, from the start of its F to the
end of its B, divided by the interval, is the number of microbatches whose activations it holds. The
vocabulary passes are part of the block: S goes where its rank has room after C0, and so on, so that a
barrier lengthens the lifespan by at most about one interval.

Source: section 5.2 and Figure 9; Qi et al., Pipeline Parallelism with Controllable Memory (2024).
Next: ``timing.py`` (playing the repeated block), ``families/`` (the blocks themselves).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from .network import Network
from .passes import PassType
from .schedule import Schedule

Name = tuple[PassType, int]

_SLACK = 1e-9  # relative to the interval: what counts as touching
_ROOM_FOR = 4  # passes that a gap may be left for, when a start in mid-gap is considered


@dataclass(frozen=True)
class BuildingBlock:
    """Offsets (ms) of one microbatch's passes, repeated every ``interval`` ms."""

    interval: float
    offsets: Mapping[int, float]


@dataclass
class _Ring:
    """The busy time of one rank, modulo the interval, and what is still to be placed in it."""

    interval: float
    remaining: list[float]
    arcs: list[tuple[float, float]] = field(default_factory=list)

    def reserve(self, duration: float) -> None:
        """Keep the beginning of the interval for a pass that all ranks start together."""
        self.remaining.remove(duration)
        self.arcs = [(0.0, duration)]

    def place(self, ready: float, duration: float) -> float:
        """Reserve the earliest start, not before ``ready``, that leaves room for all that remains."""
        self.remaining.remove(duration)
        slack = self.interval * _SLACK
        if duration <= slack:
            return ready  # takes no room
        phase = ready % self.interval
        for wait in sorted({(start - phase) % self.interval for start in self._starts(phase, duration)}):
            start = (phase + wait) % self.interval
            arcs = _insert(self.arcs, start, duration, self.interval, slack)
            if arcs is not None and _fits(sorted(self.remaining, reverse=True), self._gaps(arcs), slack):
                self.arcs = arcs
                return ready + wait
        return ready  # rounding left no room; overlapping passes still give a valid order

    def _starts(self, phase: float, duration: float) -> Iterator[float]:
        """Where a start can be best: at once, or leaving a gap that other passes fill exactly."""
        yield phase
        fillers = sorted(self.remaining, reverse=True)[:_ROOM_FOR]
        sums = {sum(part) for size in range(len(fillers) + 1) for part in combinations(fillers, size)}
        for begin, end in self.arcs:
            for room in sums:
                yield (end + room) % self.interval
                yield (begin - room - duration) % self.interval

    def _gaps(self, arcs: Sequence[tuple[float, float]]) -> list[float]:
        if not arcs:
            return [self.interval]
        following = [*arcs[1:], (arcs[0][0] + self.interval, 0.0)]
        return [nxt[0] - arc[1] for arc, nxt in zip(arcs, following, strict=True)]


def _insert(
    arcs: Sequence[tuple[float, float]], start: float, duration: float, interval: float, slack: float
) -> list[tuple[float, float]] | None:
    """``arcs`` with one more, or None if it overlaps another. Arcs may run past the interval's end."""
    end = start + duration
    for a, b in arcs:
        for turn in (-interval, 0.0, interval):
            if start < b + turn - slack and a + turn < end - slack:
                return None
    return sorted([*arcs, (start, end)])


def _fits(sizes: Sequence[float], gaps: Sequence[float], slack: float) -> bool:
    """Whether passes of these sizes (descending) can be packed into these gaps."""
    if not sizes:
        return True
    if sum(sizes) > sum(gaps) + slack:
        return False
    size, rest = sizes[0], sizes[1:]
    for k, gap in enumerate(gaps):
        if size <= gap + slack and gap not in gaps[:k]:
            left = [*gaps[:k], max(gap - size, 0.0), *gaps[k + 1 :]]
            if _fits(rest, left, slack):
                return True
    return False


def place(
    frame: Schedule, network: Network, *, stretch: float = 1.0, waits: Mapping[Name, float] | None = None
) -> BuildingBlock:
    """Modulo scheduling: each pass at the earliest start that the rings allow, in the order of the chain.

    Args:
        frame: the schedule's shape.
        network: its rules and times.
        stretch: the interval, over the work of the busiest rank; at least 1.
        waits: for a pass of a family's pattern, the least time (ms) between being ready and its start.

    Returns:
        Offsets of the passes that others wait for. IF, and passes that nothing waits for (T of vocab-2,
        W, IB), are only given room; ``timing.play`` places them.
    """
    work = [0.0] * frame.p
    for node in range(len(network.names)):
        work[network.rank[node]] += network.duration[node]
    interval = max(work) * stretch or 1.0
    chain = list(_chain(network))
    planned = [n for n in range(len(network.names)) if network.names[n][0] not in (PassType.IF, PassType.IB)]
    rings = [
        _Ring(interval, [network.duration[n] for n in planned if network.rank[n] == rank])
        for rank in range(frame.p)
    ]
    for node in network.arrival:
        rings[network.rank[node]].reserve(network.duration[node])

    finish: dict[int, float] = {}
    offsets: dict[int, float] = {}
    for node in chain:
        ready = max(
            (
                _finished(need.node, network, finish) + need.latency
                for need in network.needs[node]
                if not need.back
            ),
            default=0.0,
        )
        if node in network.arrival:
            start = ready + (-ready) % interval  # the common slot begins every interval, at phase 0
        elif node < len(network.names):
            ready += (waits or {}).get(network.names[node], 0.0)
            start = rings[network.rank[node]].place(ready, network.duration[node])
        else:
            start = ready
        offsets[node] = start
        finish[node] = start + network.duration[node]
    return BuildingBlock(
        interval, {node: offset for node, offset in offsets.items() if node < len(network.names)}
    )


def _finished(node: int, network: Network, finish: Mapping[int, float]) -> float:
    """End of a pass or, for a collective, of its last producer; passes outside the chain do not count."""
    if network.producers[node]:
        return max(
            (finish.get(part, 0.0) for part, groups in enumerate(network.feeds) if node in groups),
            default=0.0,
        )
    return finish.get(node, 0.0)


def _chain(network: Network) -> Iterator[int]:
    """The nodes that a microbatch passes through, in order: F, the output layer's barriers, B."""
    sinks = network.sinks
    output = (PassType.S, PassType.S2, PassType.T)
    for wanted in (PassType.F, *output, PassType.B):
        nodes = [
            node for node, (type_, _) in enumerate(network.names) if type_ is wanted and node not in sinks
        ]
        yield from (network.arrival[node] for node in nodes if node in network.arrival)
        yield from reversed(nodes) if wanted is PassType.B else nodes


def repeat(block: BuildingBlock, network: Network, m: int) -> tuple[list[int], ...]:
    """The block of every microbatch, ``interval`` apart: on each rank the items (see ``timing``) by start.

    Ties go in the order of ``PassType``. Warm-up and cool-down need no rule of their own: they are what is
    left of the steady state when microbatches before the first and after the last are missing.
    """
    order = {type_: k for k, type_ in enumerate(PassType)}
    ranks = max(network.rank) + 1
    rows: list[list[tuple[float, int, int, int]]] = [[] for _ in range(ranks)]
    for node, offset in block.offsets.items():
        turn = int(offset // block.interval)
        phase = offset - turn * block.interval
        rows[network.rank[node]].append((phase, order[network.names[node][0]], turn, node))
    return tuple(list(_repeat_row(sorted(row), network, m)) for row in rows)


def _repeat_row(row: list[tuple[float, int, int, int]], network: Network, m: int) -> Iterator[int]:
    """One rank's passes, given as (phase, tie, turn, node): interval by interval, by phase."""
    for _, place_in_row, mb in sorted(
        (turn + mb, k, mb) for k, (_, _, turn, _) in enumerate(row) for mb in range(m)
    ):
        node = row[place_in_row][-1]
        if node in network.arrival:
            yield network.arrival[node] * m + mb
        yield node * m + mb
