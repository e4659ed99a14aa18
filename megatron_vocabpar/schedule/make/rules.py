"""The rules of list scheduling: caps on what a rank holds, each with the question that the loop asks of it.

All questions are about a node's next microbatch. ``counts`` holds, for each node, how many microbatches have
started it. So ``counts[node]`` is also the number of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

NEVER = float("inf")
NO_NODE = -1
_ROUNDING = 1e-9  # of sums of 1/chunks


@dataclass(frozen=True)
class Rules:
    """The rules that an order keeps.

    Attributes:
        eager: the nodes that run as soon as they can.
        lazy: for each lazy node, the node that makes the buffer it frees: a pass, or a collective.
        pending: for each lazy node, how many of these buffers may wait when another is made.
        overlap: how far a pass may delay one that is planned before it, as a share of its own length.
        ahead: how many intervals after the first planned pass the one that runs may be planned.
        hold: for each node that starts or ends to hold activations, how it changes the number of
            microbatches held.
        max_activations: the most that a rank may hold.
        reserve: for each F node, the room that it must leave for later chunks of its rank.
        chunks: for each F node, the F nodes of its rank, first chunk first; given in place of ``reserve``.
        in_flight: for each F node, its B node and how many microbatches may be between the two.
        hidden: for each F node and B node of one rank that may run together, the ms that they hide of each
            other; empty if no passes run together.
        patience: the most ms that a pass that could run waits for a partner.
        lone_room: microbatches of activations that an F alone leaves free, so that a pair finds room.
    """

    eager: Sequence[int] = ()
    lazy: Mapping[int, int] = field(default_factory=dict)
    pending: Mapping[int, int] = field(default_factory=dict)
    overlap: float = 0.5
    ahead: float = NEVER
    hold: Mapping[int, float] = field(default_factory=dict)
    max_activations: float = NEVER
    reserve: Mapping[int, float] = field(default_factory=dict)
    chunks: Mapping[int, Sequence[int]] = field(default_factory=dict)
    in_flight: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    hidden: Mapping[tuple[int, int], float] = field(default_factory=dict)
    patience: float = 0.0
    lone_room: float = 0.0

    @cached_property
    def freed_by(self) -> dict[int, list[int]]:
        """For each node that makes a buffer, the lazy nodes that free it."""
        nodes: dict[int, list[int]] = {}
        for node, maker in self.lazy.items():
            nodes.setdefault(maker, []).append(node)
        return nodes

    def room_for(self, node: int) -> float:
        """The room that a node needs on its rank: what it holds, and what it reserves for later chunks.

        Two chunks a rank, each F holds 0.5, and the first chunk's F reserves 0.5 for the second. Under a cap
        of 1, the first F of microbatch 0 may run on an empty rank (0.5 + 0.5 fit). That of microbatch 1 may
        not: 0.5 are held, and it asks for 1. So the second chunk of microbatch 0 always finds its 0.5.
        """
        return max(self.hold.get(node, 0.0), 0.0) + self.reserve.get(node, 0.0)

    def room(self, held: float) -> float:
        """The room on a rank that holds so many microbatches."""
        return self.max_activations + _ROUNDING - held

    def starves(self, node: int, counts: Sequence[int]) -> bool:
        """Whether this F could leave the oldest unfinished microbatch without room for its later chunks.

        The banker's rule: if the oldest microbatch under way can finish, its room goes to the next, and so
        on. So it needs 1 for itself beside what younger ones hold. Two chunks, each F holds 0.5, the cap is
        1.5, and microbatch 0 has run its first chunk. The first chunk of microbatch 1 may run (1 + 0.5). That
        of microbatch 2 may not (1 + 0.5 + 0.5): the rank would be full, and nothing could free any room, as
        the second chunk of microbatch 0 would not fit.
        """
        chunks = self.chunks.get(node)
        if not chunks:
            return False
        oldest = counts[chunks[-1]]
        if counts[node] <= oldest:
            return False
        younger = self.hold[node]
        for chunk in chunks:
            younger += max(counts[chunk] - oldest - 1, 0) * self.hold[chunk]
        return 1.0 + younger > self.max_activations + _ROUNDING

    def is_full(self, node: int, counts: Sequence[int], more: int = 0) -> bool:
        """Whether the most microbatches that may be between an F and its B have been reached.

        1F1B has this rule; here it holds for any building block. With p = 4, rank 0's F lives for 4
        intervals, so the F of microbatch 4 waits for the B of microbatch 0, however early its input comes.
        ``more`` may be in flight besides: an F in a pair starts while the pair's B is not done.
        """
        if node not in self.in_flight:
            return False
        backward, most = self.in_flight[node]
        return counts[node] - counts[backward] >= most + more

    def forced_before(self, node: int, counts: Sequence[int]) -> int:
        """A lazy pass that must run before ``node``, which would make one buffer too many; or ``NO_NODE``.

        vocab-2 with three softmax shards pending: before the S of microbatch 3 makes a fourth, the T of
        microbatch 0 has to free the first.
        """
        for lazy in self.freed_by.get(node, ()):
            if counts[node] - counts[lazy] >= self.pending[lazy]:
                return lazy
        return NO_NODE
