"""A local search on the order of a small schedule: passes on the critical path change places.

The iteration is as long as its critical path, which consists of *blocks*: runs of passes that follow each
other at once on one rank, such as ``1B0 1S2 1B1``. Only a move within a block, or to its ends, can shorten
the iteration, so most moves are such: ``1S2 1B0 1B1``. A few move passes anywhere, to leave local minima. A
move that makes the iteration longer is kept if it adds less than a threshold, which falls to zero. Each rank
keeps its caps: on activations, and on softmax shards and input gradients that wait.

The same arguments give the same order everywhere: the seed is fixed, the budget counts visited items instead
of seconds, and the arithmetic is sums, products and comparisons.

Source: the blocks are those of Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop Problem
(1996); the threshold is Dueck and Scheuer's, Threshold Accepting (1990).
Next: ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from megatron_vocabpar.schedule.make.pass_graph import PassGraph
from megatron_vocabpar.schedule.words.passes import PassType

Order = list[list[int]]

_SEED = 1
_VISITS = 130_000  # items played in all: a fraction of a second
_FEWEST_PLAYS = 86  # with fewer moves, a large schedule does not improve
_ANYWHERE = 0.2  # share of moves that are not on the critical path
_THRESHOLD = 0.04  # at first, as a share of the length, if there are at least _PATIENCE plays a pass
_PATIENCE = 10  # plays a pass; with fewer, the threshold is lower in proportion
_ROUNDING = 1e-9


class Caps(NamedTuple):
    """The most that a rank may hold: activations by their weight, softmax shards, input gradients.

    ``activations`` has a number for each rank, ``weights`` for each stage, as in ``peaks.Cap``.
    """

    activations: tuple[int, ...]
    weights: tuple[int, ...]
    shards: int
    gradients: int


class _Played(NamedTuple):
    """A played order: its length in ms, each item's end, the item that it waited for last (``cause``), and
    each pass's next one on its rank (``following``); -1 for none."""

    length: float
    ends: list[float]
    cause: list[int]
    following: list[int]


class _Net:
    """Every pass and collective of every microbatch, and what follows each; items as in ``PassGraph``."""

    def __init__(self, graph: PassGraph, m: int, caps: Caps) -> None:
        self.m, self.caps = m, caps
        nodes = sorted({*graph.passes, *graph.producers})
        self.nodes, self.index = nodes, {node: index for index, node in enumerate(nodes)}
        size = len(nodes) * m
        self.duration = [graph.duration.get(node, 0.0) for node in nodes for _ in range(m)]
        self.rank = [graph.rank.get(node, -1) for node in nodes]
        self.follow: list[list[tuple[int, float]]] = [[] for _ in range(size)]
        self.waits = [0] * size
        # The node that waits for an item's needs: the item, or the gate if all ranks start it together.
        self.entry = list(range(size))
        gates = {part: graph.feeds[part][0] for part in graph.arrival.values()}
        for node, part in graph.arrival.items():
            for mb in range(m):
                self.entry[self.index[node] * m + mb] = self.index[gates[part]] * m + mb
        for node, needs in graph.needs.items():
            for need in needs:
                self._link(need.node, gates.get(node, node), need.back, need.latency)
        for node in graph.passes:
            for group in graph.feeds[node]:
                self._link(node, group, 0, 0.0)
        release = set(graph.of_type(PassType.W) or graph.of_type(PassType.B))
        weight_pass = graph.numbering.schedule.method.weight_pass
        shards = (graph.of_type(PassType.S), graph.of_type(weight_pass))
        hold = [
            ((node in graph.of_type(PassType.F)) - (node in release)) * self._weight(graph, node)
            for node in nodes
        ]
        waiting = [(node in shards[0]) - (node in shards[1]) if shards[1] else 0 for node in nodes]
        self.hold, self.shards = ([change for change in each for _ in range(m)] for each in (hold, waiting))
        self.waiting = [
            (self.index[n], self.index[graph.needs[n][0].node]) for n in graph.of_type(PassType.IB)
        ]
        self.later = self._needing()

    def _weight(self, graph: PassGraph, node: int) -> int:
        return self.caps.weights[graph.stage_of(node)] if node in graph.passes else 0

    def _needing(self) -> list[int]:
        """For each item those that need it, directly or not: a set of bits, ``1 << item`` for each."""
        waits, needing = self.waits[:], [0] * len(self.follow)
        ready = [item for item, count in enumerate(waits) if not count]
        for item in ready:
            for after, _ in self.follow[item]:
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
        for item in reversed(ready):
            for after, _ in self.follow[item]:
                needing[item] |= needing[after] | 1 << after
        return needing

    def _link(self, before: int, after: int, back: int, latency: float) -> None:
        first, then = self.index[before] * self.m, self.index[after] * self.m
        for mb in range(back, self.m):
            self.follow[first + mb - back].append((then + mb, latency))
            self.waits[then + mb] += 1

    def play(self, order: Order) -> _Played | None:
        """Play each pass as early as this order allows; None if passes wait for each other in a circle."""
        duration, follow, entry, size = self.duration, self.follow, self.entry, len(self.follow)
        waits, ends, cause, following = self.waits[:], [0.0] * size, [-1] * size, [-1] * size
        for row in order:
            before = -1
            for item in row:
                if before >= 0:
                    following[before] = item
                    waits[entry[item]] += 1
                before = item
        ready = [item for item, count in enumerate(waits) if not count]
        played = 0
        while ready:
            item = ready.pop()
            played += 1
            end = ends[item] = ends[item] + duration[item]
            for after, latency in follow[item]:
                if end + latency > ends[after]:
                    ends[after], cause[after] = end + latency, item
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
            after = following[item]
            if after >= 0:
                after = entry[after]
                if end >= ends[after]:
                    ends[after], cause[after] = end, item
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
        return _Played(max(ends), ends, cause, following) if played == size else None

    def blocks(self, played: _Played) -> list[list[int]]:
        """The runs of at least two passes that follow each other at once on the critical path."""
        item = max(range(len(played.ends)), key=played.ends.__getitem__)
        blocks, block = [], [item]
        while played.cause[item] >= 0:
            before = played.cause[item]
            after = played.following[before]
            if after >= 0 and self.entry[after] == item:
                if block[0] != after:
                    blocks.append(block)
                    block = [after]
                block.insert(0, before)
            else:
                blocks.append(block)
                block = [before]
            item = before
        blocks.append(block)
        return [block for block in blocks if len(block) > 1]

    def keeps(self, before: Sequence[int], moved: Sequence[int]) -> bool:
        """Whether ``moved`` after ``before`` on a rank keeps microbatches in order, all needs, and its caps.

        What comes later in its row holds as much as in the old order.
        """
        m, last, passed = self.m, dict[int, int](), 0
        most = self.caps.activations[self.rank[moved[0] // m]]
        held = sum(map(self.hold.__getitem__, before))
        shards = sum(map(self.shards.__getitem__, before))
        for item in moved:
            if last.get(item // m, -1) > item or self.later[item] & passed:
                return False
            last[item // m] = item
            passed |= 1 << item
            held += self.hold[item]
            shards += self.shards[item]
            if held > most or shards > self.caps.shards:
                return False
        return True

    def timely(self, played: _Played) -> bool:
        """Whether every IB runs before its rank holds too many input gradients."""
        m, late = self.m, self.caps.gradients
        return all(
            played.ends[node * m + mb] <= played.ends[arrives * m + mb + late] + _ROUNDING
            for node, arrives in self.waiting
            for mb in range(m - late)
        )


def is_small(graph: PassGraph, m: int) -> bool:
    """Whether the schedule is small enough for the budget to allow enough moves."""
    return (len(graph.passes) + len(graph.producers)) * m * _FEWEST_PLAYS <= _VISITS


def polish(
    starts: Sequence[tuple[PassGraph, Sequence[Sequence[int]]]], m: int, caps: Caps, bound: float
) -> list[Order]:
    """For each of a few orders (of ``Timeline``) under the caps, the fastest order that the search reaches.

    Each comes with the graph whose times the search goes by; all have the same passes. The caps hold for the
    results, too. A search ends when it reaches the bound, in ms.
    """
    polished = []
    for graph, order in starts:
        net = _Net(graph, m, caps)
        rows = [[net.index[i // m] * m + i % m for i in row if i // m in graph.passes] for row in order]
        best = _search(net, rows, _VISITS // len(net.follow) // len(starts), bound)
        polished.append([[net.nodes[i // m] * m + i % m for i in row] for row in best])
    return polished


def _search(net: _Net, order: Order, plays: int, bound: float) -> Order:
    random = Random(_SEED)
    played = net.play(order)
    assert played is not None
    now = best = played.length
    best_order, blocks = list(order), net.blocks(played)
    first = _THRESHOLD * now * min(1.0, plays / (_PATIENCE * sum(map(len, order))))
    done = 0
    for _ in range(10 * plays):
        if done == plays or not blocks or best <= bound + _ROUNDING:
            break
        rank, at, block = _choose(net, order, blocks, random)
        old, moved = order[rank], _move(block, random)
        if not net.keeps(old[:at], moved):
            continue
        done += 1
        order[rank] = [*old[:at], *moved, *old[at + len(block) :]]
        limit = now + first * (1.0 - done / plays) * random.random() ** 3 + _ROUNDING
        trial = net.play(order)
        if trial is None or trial.length > limit or not net.timely(trial):
            order[rank] = old
            continue
        now, blocks = trial.length, net.blocks(trial)
        if now < best - _ROUNDING:
            best, best_order = now, list(order)
    return best_order


def _choose(net: _Net, order: Order, blocks: list[list[int]], random: Random) -> tuple[int, int, list[int]]:
    if random.random() < _ANYWHERE:
        rank = int(random.random() * len(order))
        at = int(random.random() * (len(order[rank]) - 1))
        return rank, at, order[rank][at : at + (2, 2, 3, 4)[int(random.random() * 4)]]
    block = blocks[int(random.random() * len(blocks))]
    rank = net.rank[block[0] // net.m]
    return rank, order[rank].index(block[0]), block


def _move(block: list[int], random: Random) -> list[int]:
    """The block with one pass moved: past its neighbour, to the front, or to the end."""
    kind, at = random.random(), int(random.random() * (len(block) - 1))
    if kind < 0.4:
        return [*block[:at], block[at + 1], block[at], *block[at + 2 :]]
    if kind < 0.7:
        return [block[at + 1], *block[: at + 1], *block[at + 2 :]]
    return [*block[:at], *block[at + 1 :], block[at]]
