"""Playing a schedule's passes: when each runs, if every rank starts its next pass as soon as it can.

``play`` takes for each rank its *core* passes in a fixed order. Other passes *float*. IF is *eager*: it runs
as soon as the throttle allows, in idle time or just before the next core pass. Passes that nothing waits
for (T of vocab-2, W, IB) are *lazy*: they go wherever their rank would otherwise idle, and are forced only
when too many are pending, so that their buffers stay few. A lazy pass may delay the next core pass by
``overlap`` of its own length.

Ranks are played in the order of time, so that what a gap can be filled with is known when it is filled.
The order that comes out keeps every rule, as each pass ran after all that it waits for.

Next: ``generate.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from .network import Network

Sequences = Sequence[Sequence[tuple[int, int]]]


class Played(NamedTuple):
    """One pass in time: its node in the network, its microbatch, start and end in ms."""

    node: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """How a schedule plays.

    Attributes:
        rows: for each rank all its passes, in the order in which it runs them.
        peak: for each rank, the most that ``Floats.weight`` added up to.
    """

    rows: tuple[list[Played], ...]
    peak: tuple[float, ...]

    @property
    def end(self) -> float:
        """When the last pass ends, in ms."""
        return max((row[-1].end for row in self.rows if row), default=0.0)


class Stuck(Exception):
    """No rank can go on. ``waiting`` holds the (node, microbatch) at which each unfinished rank stopped."""

    def __init__(self, waiting: dict[int, tuple[int, int]]) -> None:
        super().__init__(f"no rank can go on; stopped at {waiting}")
        self.waiting = waiting


class Trigger(NamedTuple):
    """A float of a microbatch becomes pending once ``node`` of the microbatch ``back`` earlier is done."""

    node: int
    back: int = 0


@dataclass(frozen=True)
class Floats:
    """The passes whose place is left to ``play``.

    Attributes:
        eager: for each eager node, its trigger.
        lazy: for each lazy node, its trigger.
        cap: for each lazy node, how many microbatches of it may be pending when another is triggered.
        overlap: how far a pass that fills a gap may delay the next core pass, as a share of its own length.
        ahead: how many core passes behind the next one may be moved up into a gap before it.
        max_activations: a forward pass is moved up only if its rank then holds no more microbatches.
        weight: for each node, how its start (positive) or its end (negative) changes that number.
    """

    eager: Mapping[int, Trigger] = field(default_factory=dict)
    lazy: Mapping[int, Trigger] = field(default_factory=dict)
    cap: Mapping[int, int] = field(default_factory=dict)
    overlap: float = 0.0
    ahead: int = 0
    max_activations: float = float("inf")
    weight: Mapping[int, float] = field(default_factory=dict)


def play(network: Network, m: int, sequences: Sequences, floats: Floats | None = None) -> Timeline:
    """Play ``m`` microbatches.

    Args:
        network: rules and times.
        m: microbatches.
        sequences: for each rank its core passes as (node, microbatch), in order.
        floats: how all other passes are placed.

    Raises:
        Stuck: if the order of the core passes cannot be kept.
    """
    return _Player(network, m, sequences, floats or Floats()).play()


class _Player:
    def __init__(self, network: Network, m: int, sequences: Sequences, floats: Floats) -> None:
        ranks, nodes = len(sequences), len(network.producers)
        self.network, self.m, self.sequences, self.floats = network, m, sequences, floats
        self.finish = [[-1.0] * m for _ in range(nodes)]  # negative: not known yet
        self.latest = [[0.0] * m for _ in range(nodes)]  # of collectives: the last producer so far
        self.missing = [[count] * m for count in network.producers]
        self.position = [0] * ranks
        self.moved: set[tuple[int, int]] = set()  # core passes that ran before their turn
        self.alive = [0.0] * ranks
        self.peak = [0.0] * ranks
        self.free = [0.0] * ranks
        self.queued = [False] * ranks
        self.rows: list[list[Played]] = [[] for _ in range(ranks)]
        self.heap: list[tuple[float, int, int, int]] = []
        self.sleepers: dict[tuple[int, int], list[int]] = {}
        self.triggered: dict[int, list[tuple[int, int]]] = {}
        self.eager: list[dict[int, deque[int]]] = [{} for _ in range(ranks)]
        self.lazy: list[dict[int, deque[int]]] = [{} for _ in range(ranks)]
        self.pending: dict[int, deque[int]] = {}
        for table, triggers in ((self.eager, floats.eager), (self.lazy, floats.lazy)):
            for node, (trigger, back) in triggers.items():
                self.triggered.setdefault(trigger, []).append((node, back))
                self.pending[node] = deque(range(min(back, m)))
                table[network.rank[node]][node] = self.pending[node]

    def play(self) -> Timeline:
        for rank in range(len(self.sequences)):
            self._look_ahead(rank)
        while self.heap:
            start, rank, node, mb = heappop(self.heap)
            self._fill(rank, start, exact=node in self.network.arrival)
            if node not in self.pending or mb in self.pending[node]:
                self._run(rank, node, mb, max(start, self.free[rank]))
            self.queued[rank] = False
            self._look_ahead(rank)
        waiting = {
            rank: item for rank in range(len(self.sequences)) if (item := self._must_run(rank)) is not None
        }
        if waiting:
            raise Stuck(waiting)
        return Timeline(tuple(self.rows), tuple(self.peak))

    def _must_run(self, rank: int) -> tuple[int, int] | None:
        """What ``rank`` has to run next: a lazy pass that is forced, or the next core pass."""
        sequence, position = self.sequences[rank], self.position[rank]
        if position == len(sequence):
            left = [(node, queue[0]) for node, queue in self.lazy[rank].items() if queue]
            known = [item for item in left if self._ready(*item) >= 0.0]
            return min(known, key=lambda item: self._ready(*item)) if known else next(iter(left), None)
        core = sequence[position]
        forced = self._forced_before(rank, core[0])
        return core if forced is None else forced

    def _forced_before(self, rank: int, core: int) -> tuple[int, int] | None:
        """A lazy pass that must run before ``core`` because too many like it are pending."""
        for node, queue in self.lazy[rank].items():
            if len(queue) >= self.floats.cap[node] and self._raises(core, node):
                return node, queue[0]
        return None

    def _raises(self, core: int, node: int) -> bool:
        """Whether running ``core`` may add to the pending passes of ``node``."""
        trigger = self.floats.lazy[node].node
        return trigger == core or self.network.producers[trigger] > 0

    def _look_ahead(self, rank: int) -> None:
        """Queue the next pass of ``rank`` by its start, or let the rank sleep until that is known."""
        if self.queued[rank]:
            return
        chosen, ready = self._must_run(rank), -1.0
        if chosen is not None:
            ready = self._ready(*chosen)
            if ready < 0.0:
                self.sleepers.setdefault(self._unknown(*chosen), []).append(rank)
        if ready < 0.0:
            for node, queue in self.eager[rank].items():
                if queue and (ready := self._ready(node, queue[0])) >= 0.0:
                    chosen = node, queue[0]
                    break
        if ready >= 0.0 and chosen is not None:
            self.queued[rank] = True
            heappush(self.heap, (max(self.free[rank], ready), rank, *chosen))

    def _ready(self, node: int, mb: int) -> float:
        """When all that a pass waits for is there; negative while that is not known."""
        ready = 0.0
        for source, back, latency in self.network.needs[node]:
            if mb >= back:
                done = self.finish[source][mb - back]
                if done < 0.0:
                    return -1.0
                if done + latency > ready:
                    ready = done + latency
        return ready

    def _unknown(self, node: int, mb: int) -> tuple[int, int]:
        """The first thing that a pass waits for whose time is not known."""
        return next(
            (n, mb - b) for n, b, _ in self.network.needs[node] if mb >= b and self.finish[n][mb - b] < 0.0
        )

    def _fill(self, rank: int, until: float, exact: bool) -> None:
        """Run floats in the idle time of ``rank`` before its next pass, which is ready at ``until``.

        An eager pass may delay the next one by all of its length, other floats by ``Floats.overlap`` of
        theirs; nothing may if ``exact``, as other ranks start that pass at the same time.
        """
        eager_overlap, overlap = (0.0, 0.0) if exact else (1.0, self.floats.overlap)
        for node, queue in self.eager[rank].items():
            while queue and self._fits(rank, node, queue[0], until, eager_overlap):
                self._run(rank, node, queue[0], max(self._ready(node, queue[0]), self.free[rank]))
        if self.floats.ahead:
            self._move_up(rank, until, overlap)
        for node, queue in self.lazy[rank].items():
            while queue and self.free[rank] < until and self._fits(rank, node, queue[0], until, overlap):
                self._run(rank, node, queue[0], max(self._ready(node, queue[0]), self.free[rank]))

    def _fits(self, rank: int, node: int, mb: int, until: float, overlap: float) -> bool:
        """Whether a pass is ready in time to run before ``until``, or past it by a share of its length."""
        ready = self._ready(node, mb)
        start = max(ready, self.free[rank])
        return (
            ready >= 0.0 and start <= until and start + self.network.duration[node] * (1.0 - overlap) <= until
        )

    def _advance(self, rank: int) -> None:
        """Go to the next core pass that has not run yet."""
        sequence = self.sequences[rank]
        self.position[rank] += 1
        while self.position[rank] < len(sequence) and sequence[self.position[rank]] in self.moved:
            self.position[rank] += 1

    def _move_up(self, rank: int, until: float, overlap: float) -> None:
        """Run core passes before their turn, in the idle time before the next one, ready at ``until``.

        A forward pass is moved only if no pass that it overtakes then finds too many microbatches alive.
        """
        sequence, network, floats = self.sequences[rank], self.network, self.floats
        position, left = self.position[rank], floats.ahead + 1
        held = highest = self.alive[rank]
        while left and position < len(sequence) and self.free[rank] < until:
            node, mb = sequence[position]
            position += 1
            if (node, mb) in self.moved:
                continue
            weight = floats.weight.get(node, 0.0)
            if left <= floats.ahead:
                if node >= len(network.names) or node in network.arrival:
                    break
                allowed = weight <= 0.0 or highest + weight <= floats.max_activations
                if (
                    allowed
                    and self._fits(rank, node, mb, until, overlap)
                    and not self._forced_before(rank, node)
                ):
                    self._run(rank, node, mb, max(self._ready(node, mb), self.free[rank]), early=True)
                    position, left = self.position[rank], floats.ahead + 1
                    held = highest = self.alive[rank]
                    continue
            left -= 1
            held += weight
            highest = max(highest, held)

    def _run(self, rank: int, node: int, mb: int, start: float, *, early: bool = False) -> None:
        end = start + self.network.duration[node]
        self.free[rank] = end
        self.rows[rank].append(Played(node, mb, start, end))
        if node in self.pending:
            self.pending[node].popleft()
        elif early:
            self.moved.add((node, mb))
        else:
            self._advance(rank)
        weight = self.floats.weight.get(node, 0.0)
        if weight:
            self.alive[rank] += weight
            if self.alive[rank] > self.peak[rank]:
                self.peak[rank] = self.alive[rank]
        self._finish(node, mb, end)
        for group in self.network.feeds[node]:
            self.latest[group][mb] = max(self.latest[group][mb], end)
            self.missing[group][mb] -= 1
            if not self.missing[group][mb]:
                self._finish(group, mb, self.latest[group][mb])

    def _finish(self, node: int, mb: int, end: float) -> None:
        self.finish[node][mb] = end
        for follower, back in self.triggered.get(node, ()):
            if mb + back < self.m:
                self.pending[follower].append(mb + back)
                self._look_ahead(self.network.rank[follower])
        for rank in self.sleepers.pop((node, mb), ()):
            self._look_ahead(rank)
