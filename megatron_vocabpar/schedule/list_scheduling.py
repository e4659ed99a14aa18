"""Playing the repeated block: each rank runs, of the passes that are ready, the one planned first.

A building block repeated every interval gives each *core* pass (F, S, B, and what they wait for) a planned
start, its *key*. The real times differ from the plan in warm-up and cool-down, so the order of the keys is
only a priority: a rank that would idle runs a later pass that is ready, if that delays an earlier one by
no more than a share of its own length, and if it holds no more microbatches than it may.

Other passes have no key. IF is *eager*: it runs as soon as the throttle allows. What nothing waits for (T of
vocab-2, W, IB) is *lazy*: it fills idle time, and is forced only where its buffers would become too many.

Time goes forward only: when a rank chooses, all that can be ready by then has been played. Next: ``candidates.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from .building_block import BuildingBlock
from .network import Network
from .timing import Stuck, Timeline

_NEVER = float("inf")


class Trigger(NamedTuple):
    """A float of a microbatch becomes pending once ``node`` of the microbatch ``back`` earlier is done."""

    node: int
    back: int = 0


@dataclass(frozen=True)
class Rules:
    """What the order may look like.

    Attributes:
        eager: the nodes that run as soon as they can.
        lazy: for each lazy node, the node that makes the buffer it frees.
        cap: for each lazy node, how many microbatches of it may be pending when another is triggered.
        overlap: how far a pass may delay one that is planned before it, as a share of its own length.
        ahead: how many intervals ahead of the first one planned a pass may be.
        max_activations: a forward pass runs only if its rank then holds no more microbatches.
        hold: for each node that starts or ends to hold activations, how it changes the microbatches held.
        reserve: for each forward node, the room it must leave for later chunks of the same rank.
    """

    eager: tuple[int, ...] = ()
    lazy: Mapping[int, int] = field(default_factory=dict)
    cap: Mapping[int, int] = field(default_factory=dict)
    overlap: float = 0.5
    ahead: float = _NEVER
    max_activations: float = _NEVER
    hold: Mapping[int, float] = field(default_factory=dict)
    reserve: Mapping[int, float] = field(default_factory=dict)
    limit: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def arrange(network: Network, m: int, block: BuildingBlock, rules: Rules) -> Timeline:
    """Play ``m`` microbatches of ``block``.

    Raises:
        Stuck: if no rank can go on, because ``ahead`` or ``max_activations`` is too small.
    """
    return _Arranger(network, m, block, rules).run()


class _Arranger:
    def __init__(self, network: Network, m: int, block: BuildingBlock, rules: Rules) -> None:
        ranks, nodes = max(network.rank) + 1, len(network.producers)
        self.m, self.rules, self.interval = m, rules, block.interval
        self.rank, self.duration = network.rank, network.duration
        self.passes = len(network.rank)
        self.feeds, self.gate = network.feeds, {a: n for n, a in network.arrival.items()}
        self.ends = [_NEVER] * (nodes * m)
        self.latest = [0.0] * (nodes * m)
        self.missing = [count for count in network.producers for _ in range(m)]
        self.needs = [[(n * m - back, back, late) for n, back, late in row] for row in network.needs]
        self.followers: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
        for node, row in enumerate(network.needs):
            for source, back, _ in row:
                self.followers[source].append((node, back))
        self.next = [0] * self.passes  # of each node: its next microbatch
        self.known = [-1.0] * self.passes  # when that is ready; negative while not worked out
        self.hold = [rules.hold.get(node, 0.0) for node in range(self.passes)]
        self.reserve = [rules.reserve.get(node, 0.0) for node in range(self.passes)]
        self.limit = [rules.limit.get(node) for node in range(self.passes)]
        self.held, self.peak = [0.0] * ranks, [0.0] * ranks
        self.free, self.wake = [0.0] * ranks, [0.0] * ranks
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        floating = {*rules.eager, *rules.lazy}
        self.eager = [[n for n in rules.eager if self.rank[n] == rank] for rank in range(ranks)]
        self.lazy = [[n for n in sorted(rules.lazy) if self.rank[n] == rank] for rank in range(ranks)]
        self.frees = [[n for n in row if self.hold[n] < 0.0] for row in self.lazy]
        self.key = [block.offsets.get(self.gate.get(node, node), 0.0) for node in range(self.passes)]
        self.core: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]  # (key, node), sorted
        for node in range(self.passes):
            if node not in floating and node not in network.arrival:
                self.core[self.rank[node]].append((self.key[node], node))
        for row in self.core:
            row.sort()
        self.forces: list[list[int]] = [[] for _ in range(nodes)]  # lazy nodes that a pass triggers
        self.counted: dict[int, int] = dict(rules.lazy)
        for node, trigger in rules.lazy.items():
            if trigger < self.passes:
                self.forces[trigger].append(node)
        self.barred = [[n for n in row if rules.lazy[n] >= self.passes] for row in self.lazy]
        self.done = [0] * nodes  # of each node: how many microbatches are done (their ends may lie ahead)
        self.heap: list[tuple[float, int]] = []
        self.held_for = [-1] * ranks  # a rank that has arrived waits for this pass

    def run(self) -> Timeline:
        ranks = range(len(self.free))
        self.heap = [(0.0, rank) for rank in ranks]
        while self.heap:
            now, rank = heappop(self.heap)
            if now == self.wake[rank]:
                self.wake[rank] = _NEVER
                self._choose(rank, now)
        waiting = {}
        for rank in ranks:
            left = [
                (self.key[n] + self.next[n] * self.interval, n)
                for n in (*(n for _, n in self.core[rank]), *self.eager[rank], *self.lazy[rank])
                if self.next[n] < self.m
            ]
            if left:
                node = min(left)[1]
                waiting[rank] = node, self.next[node]
        if waiting:
            raise Stuck(waiting)
        return Timeline(tuple(self.order), self.ends, tuple(self.peak))

    def _choose(self, rank: int, now: float) -> None:
        """Run a pass on a rank that is free, or set when to look again."""
        if self.held_for[rank] >= 0:
            node = self.held_for[rank]
            if (ready := self._ready(node)) <= now:
                self.held_for[rank] = -1
                self._run(rank, node, now)
            elif ready < _NEVER:
                self._sleep(rank, ready)
            return
        wake = until = _NEVER
        for node in self.eager[rank]:
            ready = self._ready(node)
            if ready <= now:
                return self._run(rank, node, now)
            wake = min(wake, ready)
        for node in self.barred[rank]:
            if self.done[self.rules.lazy[node]] - self.next[node] > self.rules.cap[node]:
                if self._ready(node) <= now:
                    return self._run(rank, node, now)
        overlap, interval, held, most = self.rules.overlap, self.interval, self.held[rank], self.rules.max_activations
        limit = -1.0
        # core passes by key
        m = self.m
        options = []
        for key, node in self.core[rank]:
            mb = self.next[node]
            if mb < m:
                options.append((key + mb * interval, node))
        options.sort()
        for key, node in options:
            ready = self.known[node]
            if ready < 0.0:
                ready = self._ready(node)
            if self.hold[node] > 0.0 and held + self.hold[node] + self.reserve[node] > most + 1e-9:
                if ready <= now:
                    for lazy in self.frees[rank]:
                        if self._ready(lazy) <= now:
                            return self._run(rank, lazy, now)
                continue
            lim = self.limit[node]
            if lim is not None and self.next[node] - self.next[lim[0]] >= lim[1]:
                continue
            if limit < 0.0:
                limit = key + self.rules.ahead * interval
            elif key > limit:
                break
            if ready <= now:
                if now + self.duration[node] * (1.0 - overlap) <= until:
                    forced = self._forced(node)
                    if forced < 0:
                        return self._run(rank, node, now)
                    ready = self._ready(forced)
                    if ready <= now:
                        return self._run(rank, forced, now)
                    until, wake = min(until, ready), min(wake, ready)
            else:
                until, wake = min(until, ready), min(wake, ready)
        for node in self.lazy[rank]:
            if self.next[node] < m:
                ready = self.known[node]
                if ready < 0.0:
                    ready = self._ready(node)
                if ready <= now:
                    if now + self.duration[node] * (1.0 - overlap) <= until:
                        return self._run(rank, node, now)
                else:
                    wake = min(wake, ready)
        if wake < _NEVER:
            self._sleep(rank, wake)
        return None

    def _forced(self, node: int) -> int:
        """A lazy pass that must run before ``node`` because too many are pending; -1 if none."""
        for lazy in self.forces[node]:
            if self.next[node] - self.next[lazy] >= self.rules.cap[lazy]:
                return lazy
        return -1

    def _sleep(self, rank: int, until: float) -> None:
        if until < self.wake[rank]:
            self.wake[rank] = until
            heappush(self.heap, (until, rank))

    def _ready(self, node: int) -> float:
        """When the node's next microbatch has all that it waits for; infinite while that is not known."""
        known = self.known[node]
        if known >= 0.0:
            return known
        mb, ready = self.next[node], 0.0
        if mb == self.m:
            return _NEVER
        for source, back, latency in self.needs[node]:
            if mb >= back:
                done = self.ends[source + mb] + latency
                if done > ready:
                    ready = done
        if ready < _NEVER:
            self.known[node] = ready
        return ready

    def _run(self, rank: int, node: int, now: float) -> None:
        mb = self.next[node]
        self.next[node], self.known[node] = mb + 1, -1.0
        end = self.free[rank] = now + self.duration[node]
        self.order[rank].append(node * self.m + mb)
        if self.hold[node]:
            self.held[rank] += self.hold[node]
            self.peak[rank] = max(self.peak[rank], self.held[rank])
        if node in self.gate:
            self.held_for[rank] = self.gate[node]
        self.wake[rank] = end
        heappush(self.heap, (end, rank))
        self._finish(node, mb, end)
        for group in self.feeds[node]:
            key = group * self.m + mb
            self.latest[key] = max(self.latest[key], end)
            self.missing[key] -= 1
            if not self.missing[key]:
                self._finish(group, mb, self.latest[key])

    def _finish(self, node: int, mb: int, end: float) -> None:
        """Make an end known, and wake idle ranks that can then go on."""
        self.ends[node * self.m + mb] = end
        self.done[node] += 1
        for follower, back in self.followers[node]:
            if self.next[follower] == mb + back:
                ready = self._ready(follower)
                if ready < _NEVER:
                    rank = self.rank[follower]
                    self._sleep(rank, ready if ready > self.free[rank] else self.free[rank])
