"""Playing the repeated block: each rank runs, of the passes that are ready, the one planned first.

A building block repeated every interval gives each *core* pass (F, S, B, and what they wait for) a planned
start. Real times differ from the plan in warm-up and cool-down, so the plan is only a priority: a rank that
would idle runs a later pass that is ready, if that delays an earlier one by no more than a share of its
own length, and if it then holds no more activations than it may. Warm-up and cool-down need no rule
of their own: they are what is left of the steady state when microbatches before the first and after the last
are missing.

Other passes have no planned start. IF is *eager*: it runs as soon as the throttle allows. What nothing waits
for (T of vocab-2, W, IB) is *lazy*: it fills idle time, and is forced only where its buffers would become
too many. Every pass runs after all that it waits for, so the order that comes out keeps every rule.

For speed, node ``n`` of microbatch ``i`` is one number, the *item* ``n * m + i``.
Source: list scheduling, Graham (1966); the banker's rule, Dijkstra (1965); the in-flight limit is 1F1B's own
rule, for any building block.
Next: ``candidates.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from megatron_vocabpar.schedule.make.building_block import BuildingBlock
from megatron_vocabpar.schedule.make.pass_graph import PassGraph

_NEVER = float("inf")
_ROUNDING = 1e-9  # of sums of 1/chunks


class Stuck(Exception):
    """No rank can go on. ``waiting`` holds the (node, microbatch) at which each unfinished rank stopped."""

    def __init__(self, waiting: dict[int, tuple[int, int]]) -> None:
        super().__init__(f"no rank can go on; stopped at {waiting}")
        self.waiting = waiting


@dataclass(frozen=True)
class Timeline:
    """How a schedule plays.

    Attributes:
        order: for each rank the items of all its passes, in the order in which it runs them.
        ends: for each item its end in ms.
        peak: for each rank, the most microbatches whose activations it holds.
    """

    order: tuple[list[int], ...]
    ends: list[float]
    peak: tuple[float, ...]

    @property
    def end(self) -> float:
        """When the last pass ends, in ms."""
        return max((self.ends[row[-1]] for row in self.order if row), default=0.0)


@dataclass(frozen=True)
class Rules:
    """What the order may look like.

    Attributes:
        eager: the nodes that run as soon as they can.
        lazy: for each lazy node, the node that makes the buffer it frees: a pass, or a collective.
        pending: for each lazy node, how many of these buffers there may be when another is to be made.
        overlap: how far a pass may delay one that is planned before it, as a share of its own length.
        ahead: how many intervals ahead of the first one planned a pass may be.
        hold: for each node that starts or ends to hold activations, how it changes the number of
            microbatches held.
        max_activations: the most that a rank may hold.
        reserve: for each F node, the room that it must leave for later chunks of its rank, so that the
            oldest microbatch can always go on.
        chunks: for each F node, the F nodes of its rank, first chunk first. Where it is given, it stands for
            ``reserve``: a banker's rule that leaves room for the later chunks of the oldest microbatch alone.
        in_flight: for each F node, its B node and how many microbatches may be between the two.
    """

    eager: Sequence[int] = ()
    lazy: Mapping[int, int] = field(default_factory=dict)
    pending: Mapping[int, int] = field(default_factory=dict)
    overlap: float = 0.5
    ahead: float = _NEVER
    hold: Mapping[int, float] = field(default_factory=dict)
    max_activations: float = _NEVER
    reserve: Mapping[int, float] = field(default_factory=dict)
    chunks: Mapping[int, Sequence[int]] = field(default_factory=dict)
    in_flight: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def arrange(graph: PassGraph, m: int, block: BuildingBlock, rules: Rules) -> Timeline:
    """Play ``m`` microbatches of ``block``.

    Args:
        graph: rules and times.
        m: microbatches.
        block: the planned starts.
        rules: which orders are allowed.

    Raises:
        Stuck: if no rank can go on. Does not happen where ``ahead`` and ``in_flight`` leave all freedom and
            ``max_activations`` is at least 1.
    """
    return _Arranger(graph, m, block, rules).run()


class _Arranger:
    def __init__(self, graph: PassGraph, m: int, block: BuildingBlock, rules: Rules) -> None:
        ranks, nodes = max(graph.rank.values()) + 1, range(graph.size)
        self.m, self.rules, self.interval = m, rules, block.interval
        self.rank = [graph.rank.get(node, 0) for node in nodes]
        self.feeds = [graph.feeds.get(node, ()) for node in nodes]
        self.duration = [graph.duration.get(node, 0.0) for node in nodes]
        self.needs: list[list[tuple[int, int, float]]] = [[] for _ in nodes]
        self.followers: list[list[tuple[int, int]]] = [[] for _ in nodes]
        for node, row in graph.needs.items():
            for source, back, latency in row:
                self.needs[node].append((source * m - back, back, latency))
                self.followers[source].append((node, back))
        self.together = {arrival: node for node, arrival in graph.arrival.items()}
        self._sort_nodes(graph, block, ranks)

        self.ends = [_NEVER] * (graph.size * m)  # not known yet
        # Of collectives: how many producers have not ended, and the end of the last that has.
        self.missing = {node: [count] * m for node, count in graph.producers.items()}
        self.latest = {node: [0.0] * m for node in graph.producers}
        self.next = [0] * graph.size  # of each node: its next microbatch
        self.ready = [_NEVER] * graph.size  # when that has all that it waits for; infinite while not known
        self.hold = [rules.hold.get(node, 0.0) for node in nodes]
        self.need_room = [max(hold, 0.0) + rules.reserve.get(n, 0.0) for n, hold in enumerate(self.hold)]
        self.held, self.peak = [0.0] * ranks, [0.0] * ranks
        self.free, self.wake = [0.0] * ranks, [0.0] * ranks
        self.arrived = [-1] * ranks  # the pass that a rank has promised to run next
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        self.heap = [(0.0, rank) for rank in range(ranks)]
        for node in graph.rank:
            self._work_out(node)

    def _sort_nodes(self, graph: PassGraph, block: BuildingBlock, ranks: int) -> None:
        """The nodes of each rank, by how they are placed."""
        eager, lazy = set(self.rules.eager), self.rules.lazy
        self.core: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]  # planned start, node
        self.eager: list[list[int]] = [[] for _ in range(ranks)]
        self.lazy: list[list[int]] = [[] for _ in range(ranks)]
        self.received: list[list[int]] = [[] for _ in range(ranks)]  # lazy ones whose buffers come unasked
        self.freeing: list[list[int]] = [[] for _ in range(ranks)]  # lazy ones that free activations
        self.forces: list[list[int]] = [[] for _ in range(graph.size)]  # lazy ones by what makes their buffer
        for node, rank in graph.rank.items():
            if node in eager:
                self.eager[rank].append(node)
            elif node in lazy:
                self.lazy[rank].append(node)
                self.forces[lazy[node]].append(node)
                if lazy[node] in graph.producers:
                    self.received[rank].append(node)
                if self.rules.hold.get(node, 0.0) < 0.0:
                    self.freeing[rank].append(node)
            elif node not in graph.arrival:
                self.core[rank].append((block.offsets[self.together.get(node, node)], node))

    def run(self) -> Timeline:
        while self.heap:
            now, rank = heappop(self.heap)
            if now == self.wake[rank]:
                self.wake[rank] = _NEVER
                node = self._choose(rank, now)
                if node >= 0:
                    self._run(rank, node, now)
        waiting = {}
        for rank, core in enumerate(self.core):
            nodes = [*(node for _, node in core), *self.eager[rank], *self.lazy[rank]]
            left = [(self.next[node], node) for node in nodes if self.next[node] < self.m]
            if left:
                mb, node = min(left)
                waiting[rank] = node, mb
        if waiting:
            raise Stuck(waiting)
        return Timeline(tuple(self.order), self.ends, tuple(self.peak))

    def _choose(self, rank: int, now: float) -> int:
        """What a rank that is free runs now; -1 if nothing, and then it is woken when that may change."""
        if self.arrived[rank] >= 0:
            node = self.arrived[rank]
            ready = self.ready[node]
            if ready <= now:
                self.arrived[rank] = -1
                return node
            self._wake(rank, ready)
            return -1
        for node in self.eager[rank]:
            ready = self.ready[node]
            if ready <= now:
                return node
            self._wake(rank, ready)
        for node in self.received[rank]:
            made = self.next[self.rules.lazy[node]] - self.next[node]
            if made >= self.rules.pending[node] and self.ready[node] <= now:
                return node
        node, until = self._choose_core(rank, now)
        return node if node >= 0 else self._choose_lazy(rank, now, until)

    def _choose_core(self, rank: int, now: float) -> tuple[int, float]:
        """The core pass (or what has to run before it), else -1 and when the next core pass can start."""
        interval, overlap, starts = self.interval, 1.0 - self.rules.overlap, self.ready
        strict = (
            self.rules.ahead < _NEVER
        )  # passes that are not ready count too: they may be the first planned
        room = self.rules.max_activations + _ROUNDING - self.held[rank]
        until = last = _NEVER
        by_plan = [
            (at + self.next[n] * interval, n)
            for at, n in self.core[rank]
            if starts[n] < _NEVER or (strict and self.next[n] < self.m)
        ]
        by_plan.sort()
        for at, node in by_plan:
            if at > last:
                break
            ready = starts[node]
            if self.hold[node] > 0.0:
                if self.need_room[node] > room or self._would_starve(node):
                    if ready <= now:
                        for lazy in self.freeing[rank]:
                            if starts[lazy] <= now:
                                return lazy, until
                    continue
                if node in self.rules.in_flight:
                    backward, most = self.rules.in_flight[node]
                    if self.next[node] - self.next[backward] >= most:
                        continue
            if last == _NEVER:
                last = at + self.rules.ahead * interval
            if ready <= now:
                if now + self.duration[node] * overlap > until:
                    continue
                forced = self._forced_before(node)
                if forced < 0:
                    return node, until
                ready = starts[forced]
                if ready <= now:
                    return forced, until
            if ready < until:
                until = ready
        self._wake(rank, until)
        return -1, until

    def _would_starve(self, node: int) -> bool:
        """Whether after this F the oldest microbatch with chunks to come may have no room for them.

        Once all that is older has gone, that microbatch needs 1 for itself, beside what younger ones hold.
        """
        chunks = self.rules.chunks.get(node)
        if not chunks:
            return False
        oldest = self.next[chunks[-1]]
        if self.next[node] <= oldest:
            return False
        younger = 1 + sum(max(self.next[other] - oldest - 1, 0) for other in chunks)
        return 1.0 + younger * self.hold[node] > self.rules.max_activations + _ROUNDING

    def _choose_lazy(self, rank: int, now: float, until: float) -> int:
        """A lazy pass that delays a core pass, which starts at ``until``, by no more than it may; or -1."""
        overlap = 1.0 - self.rules.overlap
        for node in self.lazy[rank]:
            ready = self.ready[node]
            if ready > now:
                self._wake(rank, ready)
            elif now + self.duration[node] * overlap <= until:
                return node
        return -1

    def _forced_before(self, node: int) -> int:
        """A lazy pass that must run before ``node``, as too many of its buffers are pending; or -1."""
        for lazy in self.forces[node]:
            if self.next[node] - self.next[lazy] >= self.rules.pending[lazy]:
                return lazy
        return -1

    def _wake(self, rank: int, at: float) -> None:
        if at < self.wake[rank]:
            self.wake[rank] = at
            heappush(self.heap, (at, rank))

    def _work_out(self, node: int) -> None:
        """Note when the node's next microbatch has all that it waits for, if that is known."""
        mb, ready = self.next[node], 0.0
        if mb == self.m:
            ready = _NEVER
        else:
            for source, back, latency in self.needs[node]:
                if mb >= back:
                    at = self.ends[source + mb] + latency
                    if at > ready:
                        ready = at
        self.ready[node] = ready

    def _run(self, rank: int, node: int, now: float) -> None:
        mb = self.next[node]
        end = self.free[rank] = now + self.duration[node]
        self.order[rank].append(node * self.m + mb)
        if self.hold[node]:
            self.held[rank] += self.hold[node]
            self.peak[rank] = max(self.peak[rank], self.held[rank])
        if node in self.together:
            self.arrived[rank] = self.together[node]
        self.wake[rank] = end
        heappush(self.heap, (end, rank))
        self._finish(node, mb, end)
        self._work_out(node)
        for group in self.feeds[node]:
            missing, latest = self.missing[group], self.latest[group]
            latest[mb] = max(latest[mb], end)
            missing[mb] -= 1
            if not missing[mb]:
                self._finish(group, mb, latest[mb])

    def _finish(self, node: int, mb: int, end: float) -> None:
        """Make the end of a pass or a collective known, and wake the ranks that wait for it."""
        self.ends[node * self.m + mb] = end
        self.next[node] = mb + 1
        for follower, back in self.followers[node]:
            if self.next[follower] == mb + back:
                self._work_out(follower)
                ready, rank = self.ready[follower], self.rank[follower]
                if ready < _NEVER:
                    self._wake(rank, ready if ready > self.free[rank] else self.free[rank])
