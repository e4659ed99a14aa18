"""Plays the repeated block: of the passes that are ready, each rank runs the one planned first.

A building block repeated every interval gives each *core* pass (F, S, B, and what they wait for) a planned
start. In warm-up and cool-down, real times differ from the plan, so the plan is only a priority. A rank that
would idle may run a later pass that is ready, on two conditions: it delays an earlier pass by no more than a
share of its own length, and the rank then holds no more activations than the cap. Warm-up and cool-down need
no rule of their own: they are the steady state without the microbatches before the first and after the last.

Other passes have no planned start. IF is *eager*: it runs as soon as the throttle allows. Passes that nothing
waits for (T of vocab-2, W, IB) are *lazy*: they fill idle time, and one is forced only when its buffers would
become too many. Every pass runs after everything that it waits for, so the resulting order keeps every rule.

For speed, node ``n`` of microbatch ``i`` is one number, the *item* ``n * m + i``.
Source: list scheduling, Graham (1966); the banker's rule, Dijkstra (1965).
Next: ``rules.py``, the caps; ``candidates.py``, which blocks are tried with which rules;
``pair_scheduling.py``, where F of one microbatch may run together with B of another.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_vocabpar.schedule.make.building_block import BuildingBlock
from megatron_vocabpar.schedule.make.pass_graph import PassGraph
from megatron_vocabpar.schedule.make.rules import NEVER, NO_NODE, Rules

_ROUNDING = 1e-9  # relative, of sums of durations


class TooLate(Exception):
    """The last pass ends at the given limit or later."""


class Stuck(Exception):
    """No rank can go on. ``waiting`` holds the (node, microbatch) at which each unfinished rank stopped."""

    def __init__(self, waiting: dict[int, tuple[int, int]]) -> None:
        super().__init__(f"no rank can go on; stopped at {waiting}")
        self.waiting = waiting


@dataclass(frozen=True)
class Arrangement:
    """A played schedule.

    Attributes:
        order: for each rank the items of all its passes, in order.
        ends: for each item its end in ms.
        peak: for each rank, the most microbatches whose activations it holds.
        pairs: the items of F and B that run together; B comes right after F in its rank's order.
    """

    order: tuple[list[int], ...]
    ends: list[float]
    peak: tuple[float, ...]
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> float:
        """When the last pass ends, in ms."""
        return max((self.ends[row[-1]] for row in self.order if row), default=0.0)


def arrange(
    graph: PassGraph, m: int, block: BuildingBlock, rules: Rules, below_ms: float = NEVER
) -> Arrangement:
    """Play ``m`` microbatches of ``block``, which gives the planned starts.

    Raises:
        TooLate: as soon as the work that some rank has left shows that it cannot end before ``below_ms``.
        Stuck: if no rank can go on; never if neither ``ahead`` nor ``in_flight`` is bounded and
            ``max_activations`` is at least 1.
    """
    return Arranger(graph, m, block, rules, below_ms).run()


class Arranger:
    """The state of all ranks while they play; ``pair_scheduling.py`` extends it by pairs."""

    def __init__(self, graph: PassGraph, m: int, block: BuildingBlock, rules: Rules, below_ms: float) -> None:
        ranks = max(graph.rank.values()) + 1
        self.m, self.rules, self.interval = m, rules, block.interval
        self.rank, self.duration, self.feeds = graph.rank, graph.duration, graph.feeds
        self.followers = graph.followers
        self.needs = {
            node: [(source * m - back, back, latency) for source, back, latency in row]
            for node, row in graph.needs.items()
        }
        self.together = {arrival: node for node, arrival in graph.arrival.items()}
        # Of each core node: the planned start of its first microbatch, and of its next one.
        self.offset, self.planned = [NEVER] * graph.size, [NEVER] * graph.size
        self._sort_nodes(graph, block, ranks)

        self.ends = [NEVER] * (graph.size * m)  # not known yet
        # For each collective: how many producers have not ended, and the latest end of those that have.
        self.missing = {node: [count] * m for node, count in graph.producers.items()}
        self.latest = {node: [0.0] * m for node in graph.producers}
        self.counts = [0] * graph.size  # of each node: the microbatches that have started it
        self.ready = [NEVER] * graph.size  # of each node: when its next microbatch can run, once known
        self.cap, self.kept_free = rules.room(0.0), 1.0 - rules.overlap
        self.freed_by = rules.freed_by
        self.hold = dict.fromkeys(graph.rank, 0.0) | dict(rules.hold)
        self.room_for = {node: rules.room_for(node) for node, change in self.hold.items() if change}
        self.held, self.peak = [0.0] * ranks, [0.0] * ranks
        self.free, self.wake = [0.0] * ranks, [0.0] * ranks
        self.arrived = [NO_NODE] * ranks  # the pass that a rank has promised to run next
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        self.heap = [(0.0, rank) for rank in range(ranks)]
        self.left_ms = [0.0] * ranks  # of work
        for node, rank in graph.rank.items():
            self.left_ms[rank] += m * self.duration[node]
        self.too_late = below_ms * (1.0 + _ROUNDING)
        for node in graph.sources:
            self.ready[node] = 0.0

    def _sort_nodes(self, graph: PassGraph, block: BuildingBlock, ranks: int) -> None:
        """Sort each rank's nodes: core, eager or lazy, and the lazy ones by what they free."""
        eager, lazy = set(self.rules.eager), self.rules.lazy
        # Nodes with a microbatch left, by the planned start of the next.
        self.core: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
        self.eager: list[list[int]] = [[] for _ in range(ranks)]
        self.lazy: list[list[int]] = [[] for _ in range(ranks)]
        # Lazy nodes whose buffers a collective brings: the node, the collective, how many may wait.
        self.received: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        self.freeing: list[list[int]] = [[] for _ in range(ranks)]  # lazy: it frees activations
        for node, rank in graph.rank.items():
            if node in eager:
                self.eager[rank].append(node)
            elif node in lazy:
                self.lazy[rank].append(node)
                if lazy[node] in graph.producers:
                    self.received[rank].append((node, lazy[node], self.rules.pending[node]))
                if self.rules.hold.get(node, 0.0) < 0.0:
                    self.freeing[rank].append(node)
            elif node not in graph.arrival:
                start = block.offsets[self.together.get(node, node)]
                self.offset[node] = self.planned[node] = start
                insort(self.core[rank], (start, node))

    def run(self) -> Arrangement:
        heap, wake, free, left_ms = self.heap, self.wake, self.free, self.left_ms
        choose, run, too_late = self._choose, self._run, self.too_late
        while heap:
            now, rank = heappop(heap)
            if now == wake[rank]:
                wake[rank] = NEVER
                node = choose(rank, now)
                if node != NO_NODE:
                    run(rank, node, now)
                    if free[rank] + left_ms[rank] > too_late:
                        raise TooLate
        waiting = {}
        for rank, core in enumerate(self.core):
            nodes = [*(node for _, node in core), *self.eager[rank], *self.lazy[rank]]
            unfinished = [(self.counts[node], node) for node in nodes if self.counts[node] < self.m]
            if unfinished:
                mb, node = min(unfinished)
                waiting[rank] = node, mb
        if waiting:
            raise Stuck(waiting)
        return Arrangement(tuple(self.order), self.ends, tuple(self.peak))

    def _choose(self, rank: int, now: float) -> int:
        """The node that a free rank runs now; with ``NO_NODE`` the rank is woken when that may change."""
        ready_at, later = self.ready, NEVER  # ``later``: when the first of what is not ready can run
        arrived = self.arrived[rank]
        if arrived != NO_NODE:
            later = ready_at[arrived]
            if later <= now:
                self.arrived[rank] = NO_NODE
                return arrived
            self._wake(rank, later)
            return NO_NODE
        for node in self.eager[rank]:
            ready = ready_at[node]
            if ready <= now:
                return node
            if ready < later:
                later = ready
        for node, maker, most in self.received[rank]:
            if ready_at[node] <= now and self.counts[maker] - self.counts[node] >= most:
                return node
        node, until = self._choose_core(rank, now)
        if node != NO_NODE:
            return node
        kept_free = self.kept_free
        for node in self.lazy[rank]:  # which may delay the core pass at ``until`` a little
            ready = ready_at[node]
            if ready <= now:
                if now + self.duration[node] * kept_free <= until:
                    return node
            elif ready < later:
                later = ready
        self._wake(rank, later if later < until else until)
        return NO_NODE

    def _choose_core(self, rank: int, now: float) -> tuple[int, float]:
        """The core pass to run now, or a lazy pass that must run before it, or ``NO_NODE``.

        The second value is the earliest start of any pass that is planned before it.
        """
        rules, ready_at = self.rules, self.ready
        # If ``ahead`` is bounded, it counts from the first planned pass, whether that is ready or not.
        bounded = rules.ahead < NEVER
        room = self.cap - self.held[rank]
        until = last_start = NEVER
        for start, node in self.core[rank]:
            ready = ready_at[node]
            if ready == NEVER and not bounded:
                continue
            if start > last_start:
                break
            if self.hold[node] > 0.0:
                if self.room_for[node] > room or (rules.chunks and rules.starves(node, self.counts)):
                    if ready <= now:  # a W that frees activations makes room for it
                        for lazy in self.freeing[rank]:
                            if ready_at[lazy] <= now:
                                return lazy, until
                    continue
                if rules.in_flight and rules.is_full(node, self.counts):
                    continue
            if last_start == NEVER:
                last_start = start + rules.ahead * self.interval
            if ready <= now:
                # B1 takes 12 ms and could start at 10 ms; F3, which is planned first, gets its input at 20.
                # With overlap 0.5, B1 may delay F3 by half its own length, so that it runs now: 10 + 6 <= 20.
                # If B1 took 24 ms, the rank would idle until 20 ms: 10 + 12 > 20.
                if now + self.duration[node] * self.kept_free > until:
                    continue
                if node not in self.freed_by:
                    return node, until
                forced = rules.forced_before(node, self.counts)
                if forced == NO_NODE:
                    return node, until
                ready = ready_at[forced]
                if ready <= now:
                    return forced, until
            if ready < until:
                until = ready
        return NO_NODE, until

    def _wake(self, rank: int, at: float) -> None:
        if at < self.wake[rank]:
            self.wake[rank] = at
            heappush(self.heap, (at, rank))

    def _run(self, rank: int, node: int, now: float) -> None:
        mb = self.counts[node]
        end = self.free[rank] = now + self.duration[node]
        self.left_ms[rank] -= self.duration[node]
        self.order[rank].append(node * self.m + mb)
        if self.hold[node]:
            held = self.held[rank] = self.held[rank] + self.hold[node]
            if held > self.peak[rank]:
                self.peak[rank] = held
        if node in self.together:
            self.arrived[rank] = self.together[node]
        self._plan(rank, node, mb + 1)
        self.wake[rank] = end
        heappush(self.heap, (end, rank))
        self._finish(node, mb, end)

    def _plan(self, rank: int, node: int, mb: int) -> None:
        """Plan a node's next microbatch, if it is a core pass."""
        start = self.planned[node]
        if start < NEVER:
            core = self.core[rank]
            core.remove((start, node))
            if mb < self.m:
                start = self.planned[node] = self.offset[node] + mb * self.interval
                insort(core, (start, node))

    def _finish(self, node: int, mb: int, end: float) -> None:
        """Make the end of a pass or a collective known, and wake the ranks that wait for it.

        Collectives whose last producer the pass is end with it.
        """
        counts, ends, m = self.counts, self.ends, self.m
        ends[node * m + mb] = end
        counts[node] = mb + 1
        self.ready[node] = NEVER
        for follower, back in self.followers[node]:
            of = mb + back
            if counts[follower] == of < m:
                ready = 0.0  # a function for this would be called twice a pass, for 5 % of a play
                for source, before, latency in self.needs[follower]:
                    if of >= before:
                        at = ends[source + of] + latency
                        if at > ready:
                            ready = at
                self.ready[follower] = ready
                if ready < NEVER:
                    rank = self.rank[follower]
                    free = self.free[rank]
                    self._wake(rank, ready if ready > free else free)
        for group in self.feeds.get(node, ()):
            missing, latest = self.missing[group], self.latest[group]
            if end > latest[mb]:
                latest[mb] = end
            missing[mb] -= 1
            if not missing[mb]:
                self._finish(group, mb, latest[mb])
