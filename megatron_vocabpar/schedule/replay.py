"""When the passes of a finished order run, if every rank starts its next pass as soon as it can.

Nothing is left to place, as it is for a generator, and a transfer takes its time and no queue, as it does in
``events.py``. Used where an order has to be read fast: for the order of collectives (``lower.py``) and for
deadlocks (``schedule_rules.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from .pass_graph import PassGraph


class Stopped(Exception):
    """No rank can go on.

    Attributes:
        items: for each rank that has not finished, the item at which it stands.
        waits_for: the item that the first of them waits for.
    """

    def __init__(self, items: dict[int, int], waits_for: int) -> None:
        super().__init__(f"ranks stop at items {items}; the first waits for item {waits_for}")
        self.items, self.waits_for = items, waits_for


def replay(graph: PassGraph, m: int, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Run every rank's items in order; item ``n * m + i`` is node ``n`` of microbatch ``i``.

    Args:
        graph: rules and times.
        m: microbatches.
        sequences: for each rank its items, arrivals included.

    Returns:
        for each item, collectives included, its end in ms; for a collective, when its last producer ends.
        Negative where it never ran.

    Raises:
        Stopped: if the order cannot be kept.
    """
    return _Replay(graph, m, sequences).run()


class _Replay:
    def __init__(self, graph: PassGraph, m: int, sequences: Sequence[Sequence[int]]) -> None:
        nodes = len(graph.producers)
        self.m, self.sequences = m, sequences
        self.duration, self.feeds = graph.duration, graph.feeds
        self.needs = [
            [((need.node - node) * m - need.back, need.back, need.latency) for need in row]
            for node, row in enumerate(graph.needs)
        ]
        self.ends = [-1.0] * (nodes * m)
        self.latest = [0.0] * (nodes * m)  # of collectives: the end of the last producer so far
        self.missing = [count for count in graph.producers for _ in range(m)]
        self.position, self.free = [0] * len(sequences), [0.0] * len(sequences)
        self.sleepers: dict[int, list[int]] = {}
        self.awake = list(range(len(sequences)))

    def run(self) -> list[float]:
        while self.awake:
            self._advance(self.awake.pop())
        places = enumerate(zip(self.sequences, self.position, strict=True))
        stopped = {rank: row[position] for rank, (row, position) in places if position < len(row)}
        if stopped:
            waits_for = next(item for item, ranks in self.sleepers.items() if min(stopped) in ranks)
            raise Stopped(stopped, waits_for)
        return self.ends

    def _advance(self, rank: int) -> None:
        """Run the items of ``rank`` up to the first that has to wait for an item that has not run."""
        sequence, now = self.sequences[rank], self.free[rank]
        for place in range(self.position[rank], len(sequence)):
            item = sequence[place]
            node, mb = divmod(item, self.m)
            start = now
            for offset, back, latency in self.needs[node]:
                if mb >= back:
                    done = self.ends[item + offset]
                    if done < 0.0:
                        self.sleepers.setdefault(item + offset, []).append(rank)
                        self.position[rank], self.free[rank] = place, now
                        return
                    if done + latency > start:
                        start = done + latency
            now = start + self.duration[node]
            self._finish(item, now)
            for group in self.feeds[node]:
                self._feed(group * self.m + mb, now)
        self.position[rank], self.free[rank] = len(sequence), now

    def _feed(self, collective: int, now: float) -> None:
        """One producer of a collective has ended."""
        self.latest[collective] = max(self.latest[collective], now)
        self.missing[collective] -= 1
        if not self.missing[collective]:
            self._finish(collective, self.latest[collective])

    def _finish(self, item: int, end: float) -> None:
        self.ends[item] = end
        sleepers = self.sleepers.pop(item, None)
        if sleepers:
            self.awake += sleepers
