"""Playing a schedule's passes: when each runs, if every rank starts its next pass as soon as it can.

``play`` takes for each rank its *core* passes in an order. Other passes *float*. IF is *eager*: it runs as
soon as the throttle allows, in idle time or just before the next core pass. Passes that nothing waits for
(T of vocab-2, W, IB) are *lazy*: they go wherever their rank would otherwise idle, and are forced only when
too many are pending, so that their buffers stay few. Core passes may be moved up into idle time too.

Ranks are played in the order of time, so that what a gap can be filled with is known when it is filled.
The order that comes out keeps every rule, as each pass ran after all that it waits for.

For speed, node ``n`` of microbatch ``i`` is one number, the *item* ``n * m + i``.
Next: ``candidates.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from .network import Network

Items = Sequence[int]


@dataclass(frozen=True)
class Timeline:
    """How a schedule plays.

    Attributes:
        order: for each rank the items of all its passes, in the order in which it runs them.
        ends: for each item its end in ms; negative if it did not run.
        peak: for each rank, the most that ``Floats.weight`` added up to.
    """

    order: tuple[list[int], ...]
    ends: list[float]
    peak: tuple[float, ...]

    @property
    def end(self) -> float:
        """When the last pass ends, in ms."""
        return max((self.ends[row[-1]] for row in self.order if row), default=0.0)


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
        weight: for each node that starts or ends to hold one, how it changes that number.
    """

    eager: Mapping[int, Trigger] = field(default_factory=dict)
    lazy: Mapping[int, Trigger] = field(default_factory=dict)
    cap: Mapping[int, int] = field(default_factory=dict)
    overlap: float = 0.0
    ahead: int = 0
    max_activations: float = float("inf")
    weight: Mapping[int, float] = field(default_factory=dict)


def play(network: Network, m: int, sequences: Sequence[Items], floats: Floats | None = None) -> Timeline:
    """Play ``m`` microbatches.

    Args:
        network: rules and times.
        m: microbatches.
        sequences: for each rank the items of its core passes, in order.
        floats: how all other passes are placed.

    Raises:
        Stuck: if the order of the core passes cannot be kept.
    """
    return _Player(network, m, sequences, floats or Floats()).play()


class _Player:
    def __init__(self, network: Network, m: int, sequences: Sequence[Items], floats: Floats) -> None:
        ranks, nodes = len(sequences), len(network.producers)
        self.network, self.m, self.sequences, self.floats = network, m, sequences, floats
        self.ends = [-1.0] * (nodes * m)  # negative: not known yet
        self.latest = [0.0] * (nodes * m)  # of collectives: the end of the last producer so far
        self.missing = [count for count in network.producers for _ in range(m)]
        self.needs = [
            [(source * m - back, back, late) for source, back, late in row] for row in network.needs
        ]
        self.duration = network.duration
        self.weight = [floats.weight.get(node, 0.0) for node in range(len(network.needs))]
        self.movable = [
            n < len(network.names) and n not in network.arrival for n in range(len(network.needs))
        ]
        self.position = [0] * ranks
        self.moved: set[int] = set()  # core passes that ran before their turn
        self.alive = [0.0] * ranks
        self.peak = [0.0] * ranks
        self.free = [0.0] * ranks
        self.queued = [False] * ranks
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        self.heap: list[tuple[float, int, int]] = []
        self.sleepers: dict[int, list[int]] = {}
        self.triggered: dict[int, list[tuple[int, int]]] = {}
        self.pending: dict[int, deque[int]] = {}  # microbatches, by floating node
        self.eager: list[list[tuple[int, deque[int]]]] = [[] for _ in range(ranks)]
        self.lazy: list[list[tuple[int, deque[int]]]] = [[] for _ in range(ranks)]
        for table, triggers in ((self.eager, floats.eager), (self.lazy, floats.lazy)):
            for node, (trigger, back) in triggers.items():
                self.triggered.setdefault(trigger, []).append((node, back))
                self.pending[node] = deque(range(min(back, m)))
                table[network.rank[node]].append((node, self.pending[node]))

    def play(self) -> Timeline:
        for rank in range(len(self.sequences)):
            self._look_ahead(rank)
        while self.heap:
            start, rank, item = heappop(self.heap)
            node, mb = divmod(item, self.m)
            self._fill(rank, start, exact=node in self.network.arrival)
            if node not in self.pending or mb in self.pending[node]:
                self._run(rank, node, mb, max(start, self.free[rank]))
            self.queued[rank] = False
            self._look_ahead(rank)
        waiting = {}
        for rank in range(len(self.sequences)):
            stopped = self._must_run(rank)
            if stopped >= 0:
                waiting[rank] = divmod(stopped, self.m)
        if waiting:
            raise Stuck(waiting)
        return Timeline(tuple(self.order), self.ends, tuple(self.peak))

    def _must_run(self, rank: int) -> int:
        """What ``rank`` has to run next: a lazy pass that is forced, or the next core pass; -1 if nothing."""
        sequence, position = self.sequences[rank], self.position[rank]
        if position == len(sequence):
            return self._last_lazy(rank)
        core = sequence[position]
        forced = self._forced_before(rank, core // self.m)
        return core if forced < 0 else forced

    def _last_lazy(self, rank: int) -> int:
        """When no core pass is left: the lazy pass that is ready first; those over their cap come first."""
        choices = []
        for node, queue in self.lazy[rank]:
            if queue:
                ready = self._ready(node, queue[0])
                choices.append(
                    (ready < 0.0, len(queue) < self.floats.cap[node], ready, node * self.m + queue[0])
                )
        return min(choices)[-1] if choices else -1

    def _forced_before(self, rank: int, core: int) -> int:
        """A lazy pass that must run before a core node because too many are pending; -1 if none."""
        for node, queue in self.lazy[rank]:
            if len(queue) >= self.floats.cap[node]:
                trigger = self.floats.lazy[node].node
                if trigger == core or self.network.producers[trigger]:
                    return node * self.m + queue[0]
        return -1

    def _look_ahead(self, rank: int) -> None:
        """Queue the next pass of ``rank`` by its start, or let the rank sleep until that is known."""
        if self.queued[rank]:
            return
        chosen, ready = self._must_run(rank), -1.0
        if chosen >= 0:
            node, mb = divmod(chosen, self.m)
            ready = self._ready(node, mb)
            if ready < 0.0:
                self.sleepers.setdefault(self._unknown(node, mb), []).append(rank)
        if ready < 0.0:
            for node, queue in self.eager[rank]:
                if queue and (ready := self._ready(node, queue[0])) >= 0.0:
                    chosen = node * self.m + queue[0]
                    break
        if ready >= 0.0:
            self.queued[rank] = True
            heappush(self.heap, (max(self.free[rank], ready), rank, chosen))

    def _ready(self, node: int, mb: int) -> float:
        """When all that a pass waits for is there; negative while that is not known."""
        ready = 0.0
        for source, back, latency in self.needs[node]:
            if mb >= back:
                done = self.ends[source + mb]
                if done < 0.0:
                    return -1.0
                if done + latency > ready:
                    ready = done + latency
        return ready

    def _unknown(self, node: int, mb: int) -> int:
        """The first item that a pass waits for whose time is not known."""
        return next(s + mb for s, back, _ in self.needs[node] if mb >= back and self.ends[s + mb] < 0.0)

    def _fill(self, rank: int, until: float, exact: bool) -> None:
        """Run floats in the idle time of ``rank`` before its next pass, which is ready at ``until``.

        An eager pass may delay the next one by all of its length, other floats by ``Floats.overlap`` of
        theirs; nothing may if ``exact``, as other ranks start that pass at the same time.
        """
        eager_overlap, overlap = (0.0, 0.0) if exact else (1.0, self.floats.overlap)
        for node, queue in self.eager[rank]:
            while queue and (start := self._fits(rank, node, queue[0], until, eager_overlap)) >= 0.0:
                self._run(rank, node, queue[0], start)
        if self.free[rank] >= until:
            return
        if self.floats.ahead:
            self._move_up(rank, until, overlap)
        for node, queue in self.lazy[rank]:
            while queue and self.free[rank] < until:
                start = self._fits(rank, node, queue[0], until, overlap)
                if start < 0.0:
                    break
                self._run(rank, node, queue[0], start)

    def _fits(self, rank: int, node: int, mb: int, until: float, overlap: float) -> float:
        """When a pass starts that is to run before ``until``, or past it by a share of its length; or -1."""
        ready = self._ready(node, mb)
        start = max(ready, self.free[rank])
        if ready < 0.0 or start > until or start + self.duration[node] * (1.0 - overlap) > until:
            return -1.0
        return start

    def _move_up(self, rank: int, until: float, overlap: float) -> None:
        """Run core passes before their turn, in the idle time before the next one, ready at ``until``.

        A forward pass is moved only if no pass that it overtakes then finds too many microbatches alive.
        """
        sequence, ahead = self.sequences[rank], self.floats.ahead
        position, left = self.position[rank], ahead + 1
        held = highest = self.alive[rank]
        while left and position < len(sequence) and self.free[rank] < until:
            item = sequence[position]
            position += 1
            if item in self.moved:
                continue
            node, mb = divmod(item, self.m)
            weight = self.weight[node]
            if left <= ahead:
                if not self.movable[node]:
                    break
                if weight <= 0.0 or highest + weight <= self.floats.max_activations:
                    start = self._fits(rank, node, mb, until, overlap)
                    if start >= 0.0 and self._forced_before(rank, node) < 0:
                        self._run(rank, node, mb, start, early=True)
                        position, left = self.position[rank], ahead + 1
                        held = highest = self.alive[rank]
                        continue
            left -= 1
            held += weight
            highest = max(highest, held)

    def _run(self, rank: int, node: int, mb: int, start: float, *, early: bool = False) -> None:
        item = node * self.m + mb
        end = self.free[rank] = start + self.duration[node]
        self.order[rank].append(item)
        if node in self.pending:
            self.pending[node].popleft()
        elif early:
            self.moved.add(item)
        else:
            self._advance(rank)
        if self.weight[node]:
            self.alive[rank] += self.weight[node]
            self.peak[rank] = max(self.peak[rank], self.alive[rank])
        self._finish(node, mb, end)
        for group in self.network.feeds[node]:
            key = group * self.m + mb
            self.latest[key] = max(self.latest[key], end)
            self.missing[key] -= 1
            if not self.missing[key]:
                self._finish(group, mb, self.latest[key])

    def _advance(self, rank: int) -> None:
        """Go to the next core pass that has not run yet."""
        sequence, position = self.sequences[rank], self.position[rank] + 1
        while position < len(sequence) and sequence[position] in self.moved:
            position += 1
        self.position[rank] = position

    def _finish(self, node: int, mb: int, end: float) -> None:
        """Make the end of a pass or a collective known, and wake the ranks that wait for it."""
        item = node * self.m + mb
        self.ends[item] = end
        for follower, back in self.triggered.get(node, ()):
            if mb + back < self.m:
                self.pending[follower].append(mb + back)
                self._look_ahead(self.network.rank[follower])
        for rank in self.sleepers.pop(item, ()):
            self._look_ahead(rank)
