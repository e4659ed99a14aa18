"""List scheduling with pairs: a free rank runs F of one microbatch together with B of another.

The loop is that of ``list_scheduling.py``. When a rank turns to an F or a B that can run, it looks for a
partner among the nodes of the other kind: of those that can run now, it takes the one planned first. If none
can run, but one will soon, the pass waits for it: with ``patience`` 5, an F at 10 ms waits for a B that is
ready at 14 ms, and runs alone if the B is ready at 16 ms. A pair holds the activations of both its passes. So
that a pair finds room, an F alone leaves ``lone_room`` free.

Next: ``pair_candidates.py``, the ways to play.
"""

from __future__ import annotations

from heapq import heappush

from megatron_vocabpar.schedule.make.building_block import BuildingBlock
from megatron_vocabpar.schedule.make.list_scheduling import Arrangement, Arranger
from megatron_vocabpar.schedule.make.pass_graph import PassGraph
from megatron_vocabpar.schedule.make.rules import NEVER, NO_NODE, Rules


def arrange_in_pairs(
    graph: PassGraph, m: int, block: BuildingBlock, rules: Rules, below_ms: float = NEVER
) -> Arrangement:
    """``list_scheduling.arrange`` with the pairs that ``rules.hidden`` names.

    Raises:
        TooLate: as there, if all F that are left ran in the pairs that hide most.
        Stuck: if no rank can go on.
    """
    return _PairArranger(graph, m, block, rules, below_ms).run()


class _PairArranger(Arranger):
    def __init__(self, graph: PassGraph, m: int, block: BuildingBlock, rules: Rules, below_ms: float) -> None:
        super().__init__(graph, m, block, rules, below_ms)
        self.partners: dict[int, list[int]] = {}
        for forward, backward in rules.hidden:
            self.partners.setdefault(forward, []).append(backward)
            self.partners.setdefault(backward, []).append(forward)
        self.most_hidden: dict[int, float] = {}  # of each F, in a pair
        for (forward, _), hidden in rules.hidden.items():
            self.most_hidden[forward] = max(self.most_hidden.get(forward, 0.0), hidden)
        for forward, hidden in self.most_hidden.items():
            self.left_ms[self.rank[forward]] -= m * hidden
        self.beside = NO_NODE  # the partner of the node that ``_choose_core`` has chosen
        self.pairs: list[tuple[int, int]] = []

    def run(self) -> Arrangement:
        played = super().run()
        return Arrangement(played.order, played.ends, played.peak, tuple(self.pairs))

    def _run(self, rank: int, node: int, now: float) -> None:
        other, self.beside = self.beside, NO_NODE
        if other == NO_NODE:
            self.left_ms[rank] += self.most_hidden.get(node, 0.0)
            super()._run(rank, node, now)
            return
        pair = self._in_order(node, other)
        end = self.free[rank] = now + self._together_ms(node, other)
        self.left_ms[rank] += self.most_hidden[pair[0]] - self.duration[node] - self.duration[other]
        forward, backward = (part * self.m + self.counts[part] for part in pair)
        self.order[rank] += forward, backward
        self.pairs.append((forward, backward))
        for part in pair:
            self.held[rank] += self.hold[part]
            self.peak[rank] = max(self.peak[rank], self.held[rank])
            self._plan(rank, part, self.counts[part] + 1)
        self.wake[rank] = end
        heappush(self.heap, (end, rank))
        for part in pair:
            self._finish(part, self.counts[part], end)

    def _in_order(self, node: int, other: int) -> tuple[int, int]:
        """F, then B; F is the one that takes activations."""
        return (node, other) if self.hold[node] > 0.0 else (other, node)

    def _together_ms(self, node: int, other: int) -> float:
        hidden = self.rules.hidden[self._in_order(node, other)]
        return self.duration[node] + self.duration[other] - hidden

    def _has_room(self, rank: int, forward: int, beside: int) -> bool:
        """Whether an F may run now under the caps, together with ``beside`` or alone."""
        rules, alone = self.rules, beside == NO_NODE
        needed = self.room_for[forward] + (rules.lone_room if alone else 0.0)
        if needed > self.cap - self.held[rank] or (rules.chunks and rules.starves(forward, self.counts)):
            return False
        return not rules.is_full(forward, self.counts, more=0 if alone else 1)

    def _partner(self, rank: int, node: int, now: float) -> tuple[int, float]:
        """The partner that can run now and is planned first, or ``NO_NODE``; and when the next can run."""
        best, planned, comes = NO_NODE, NEVER, NEVER
        for other in self.partners[node]:
            ready = self.ready[other]
            if ready == NEVER or not self._has_room(rank, *self._in_order(node, other)):
                continue
            if ready > now:
                comes = min(comes, ready)
                continue
            if self.planned[other] < planned:
                best, planned = other, self.planned[other]
        return best, comes

    def _choose_core(self, rank: int, now: float) -> tuple[int, float]:
        rules, ready_at, until = self.rules, self.ready, NEVER
        for _, node in self.core[rank]:
            ready, beside, comes = ready_at[node], NO_NODE, NEVER
            if ready == NEVER:
                continue
            if ready <= now and node in self.partners:
                beside, comes = self._partner(rank, node, now)
            if self.hold[node] > 0.0 and not self._has_room(rank, node, beside):
                if ready <= now and self.room_for[node] > self.cap - self.held[rank]:
                    for lazy in self.freeing[rank]:  # a W that frees activations makes room for it
                        if ready_at[lazy] <= now:
                            return lazy, until
                continue
            if ready <= now:
                if beside == NO_NODE and comes <= now + rules.patience:
                    until = min(until, comes)
                    continue
                taken = self.duration[node] if beside == NO_NODE else self._together_ms(node, beside)
                if now + taken * self.kept_free > until:
                    continue
                forced = rules.forced_before(node, self.counts)
                if forced == NO_NODE and beside != NO_NODE:
                    forced = rules.forced_before(beside, self.counts)
                if forced == NO_NODE:
                    self.beside = beside
                    return node, until
                ready = ready_at[forced]
                if ready <= now:
                    return forced, until
            if ready < until:
                until = ready
        return NO_NODE, until
