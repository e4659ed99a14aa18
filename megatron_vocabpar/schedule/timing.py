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
        overlap: how far a lazy pass may delay the next core pass, as a share of its own length.
    """

    eager: Mapping[int, Trigger] = field(default_factory=dict)
    lazy: Mapping[int, Trigger] = field(default_factory=dict)
    cap: Mapping[int, int] = field(default_factory=dict)
    overlap: float = 0.0


def play(
    network: Network, m: int, sequences: Sequences, floats: Floats | None = None
) -> tuple[list[Played], ...]:
    """Play ``m`` microbatches.

    Args:
        network: rules and times.
        m: microbatches.
        sequences: for each rank its core passes as (node, microbatch), in order.
        floats: how all other passes are placed.

    Returns:
        For each rank all its passes, in the order in which it runs them.

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

    def play(self) -> tuple[list[Played], ...]:
        for rank in range(len(self.sequences)):
            self._look_ahead(rank)
        while self.heap:
            start, rank, node, mb = heappop(self.heap)
            self._fill(rank, start)
            if node not in self.pending or mb in self.pending[node]:
                self._run(rank, node, mb, max(start, self.free[rank]))
            self.queued[rank] = False
            self._look_ahead(rank)
        waiting = {
            rank: item for rank in range(len(self.sequences)) if (item := self._must_run(rank)) is not None
        }
        if waiting:
            raise Stuck(waiting)
        return tuple(self.rows)

    def _must_run(self, rank: int) -> tuple[int, int] | None:
        """What ``rank`` has to run next: a lazy pass that is forced, or the next core pass."""
        sequence, position = self.sequences[rank], self.position[rank]
        if position == len(sequence):
            left = [(node, queue[0]) for node, queue in self.lazy[rank].items() if queue]
            known = [item for item in left if self._ready(*item) >= 0.0]
            return min(known, key=lambda item: self._ready(*item)) if known else next(iter(left), None)
        core = sequence[position]
        for node, queue in self.lazy[rank].items():
            if len(queue) >= self.floats.cap[node] and self._raises(core[0], node):
                return node, queue[0]
        return core

    def _raises(self, core: int, node: int) -> bool:
        """Whether running ``core`` may add to the pending passes of ``node``."""
        trigger = self.floats.lazy[node].node
        return trigger == core or self.network.producers[trigger] > 0

    def _look_ahead(self, rank: int) -> None:
        """Queue the next pass of ``rank`` by its start, or let the rank sleep until that is known."""
        if self.queued[rank]:
            return
        chosen = self._must_run(rank)
        if chosen is not None and self._ready(*chosen) < 0.0:
            self.sleepers.setdefault(self._unknown(*chosen), []).append(rank)
            chosen = None
        if chosen is None:
            for node, queue in self.eager[rank].items():
                if queue and self._ready(node, queue[0]) >= 0.0:
                    chosen = node, queue[0]
        if chosen is not None:
            self.queued[rank] = True
            heappush(self.heap, (max(self.free[rank], self._ready(*chosen)), rank, *chosen))

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

    def _fill(self, rank: int, until: float) -> None:
        """Run floats in the idle time of ``rank`` before its next pass, which is ready at ``until``."""
        for node, queue in self.eager[rank].items():
            while len(queue) > 0 and 0.0 <= (ready := self._ready(node, queue[0])) <= until:
                self._run(rank, node, queue[0], max(ready, self.free[rank]))
        for node, queue in self.lazy[rank].items():
            duration = self.network.duration[node]
            limit = until - duration * (1.0 - self.floats.overlap)
            while queue and (ready := self._ready(node, queue[0])) >= 0.0:
                start = max(ready, self.free[rank])
                if start > limit or start >= until:
                    break
                self._run(rank, node, queue[0], start)

    def _run(self, rank: int, node: int, mb: int, start: float) -> None:
        end = start + self.network.duration[node]
        self.free[rank] = end
        self.rows[rank].append(Played(node, mb, start, end))
        if node in self.pending:
            self.pending[node].popleft()
        else:
            self.position[rank] += 1
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
