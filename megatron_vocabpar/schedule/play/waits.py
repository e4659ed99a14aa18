"""What waits for what when a program runs on GPUs, under one of the models of ``hang.py``.

A graph of numbers: item k of the program, counted over all ranks, has four *nodes*: the host has issued it,
it has started, it has ended, and, for one rank's part of each communication, all ranks have joined it. A
pair is one item, which waits for what both its passes wait for. A pass inside which communication is launched
is several items: the layers before, between and behind the launches.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, product
from typing import Literal, NamedTuple

from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.dependencies import prerequisites
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    POINT_TO_POINT,
    RECEIVE_OF,
    Comm,
    Instruction,
    Pair,
    Pass,
    parts_of,
)
from megatron_vocabpar.schedule.words.schedule import Late, Program, Schedule, split_late

Blocking = Literal["nothing", "collectives", "communication", "everything"]


@dataclass(frozen=True)
class QueueModel:
    """One way in which operations wait for more than they must.

    Attributes:
        name: short, for tables.
        summary: which setting leads to it.
        pairs: each pair of ranks has a stream for each direction; otherwise all of a rank's transfers in
            one direction share a stream.
        one_queue: nothing starts before what the rank issued earlier has started.
        first_use: the first use of a communicator blocks the host until all its ranks have used it.
        blocking: the operations whose end the host waits for before it issues more.
        one_rank: the host of only one rank waits, whichever that is, and the others run freely.
    """

    name: str
    summary: str
    pairs: bool = True
    one_queue: bool = False
    first_use: bool = False
    blocking: Blocking = "nothing"
    one_rank: bool = False


_COLLECTIVES = "collectives"  # the communicator of both vocabulary layers, and its stream
_STEP_TO_PEER = {
    **{send: step for send, (_, step) in RECEIVE_OF.items()},
    **{receive: -step for receive, step in RECEIVE_OF.values()},
}
_ISSUED, _STARTED, _ENDED, _JOINED = range(4)
_PHASES = 4

Edge = tuple[int, int]  # a node, and one that it waits for


class _Pair(NamedTuple):
    """The communicator of two ranks for transfers in one direction, to higher or to lower ranks."""

    upward: bool
    low: int
    high: int


class Waiting(NamedTuple):
    """A node in words.

    Attributes:
        rank: whose item it is.
        item: the instruction that is issued, starts or ends.
        waits_in: the instruction that holds the rank: the item, or, before it is issued, the one before it.
    """

    rank: int
    item: Instruction
    waits_in: Instruction


class Waits:
    """What each event waits for.

    Args:
        schedule: what ``program`` was lowered from.
        program: of all ranks, valid but for hangs.
        late: what is launched inside passes.

    Attributes:
        common: for each node the nodes that it waits for in every model.
    """

    def __init__(self, schedule: Schedule, program: Program, late: Late) -> None:
        self.schedule = schedule
        rows = [list(_cut(row, late)) for row in program]
        self.items = [(rank, item) for rank, row in enumerate(rows) for item, _ in row]
        self.shares = [share for row in rows for _, share in row]
        self.index = {(rank, part): k for k, (rank, item) in enumerate(self.items) for part in parts_of(item)}
        self.first_part: dict[Hashable, int] = {}  # of each communication, by what its parts have in common
        self.communicators = [
            self._communicator(rank, item) if isinstance(item, Comm) else None for rank, item in self.items
        ]
        starts = list(accumulate(map(len, rows), initial=0))
        self.rows = [range(start, stop) for start, stop in pairwise(starts)]
        self.common: list[list[int]] = [[] for _ in range(_PHASES * len(self.items))]
        for node, need in chain.from_iterable(map(self._in_every_model, self.rows)):
            self.common[node].append(need)

    def under(self, model: QueueModel, held: Collection[int]) -> list[list[int]]:
        """For each node the nodes that it waits for in ``model``, which blocks the hosts of ``held``."""
        before = [list(needs) for needs in self.common]
        for rank, row in enumerate(self.rows):
            for node, need in chain(self._on_streams(row, model), self._on_rank(row, model, rank in held)):
                before[node].append(need)
        if model.first_use:
            for node, need in self._creations():
                before[node].append(need)
        return before

    def lengths(self, times: PassTimes) -> list[float]:
        """For each node, the ms that it takes after the last event that it waits for; only ends take time."""
        lengths = [0.0] * len(self.common)
        for k, (_, item) in enumerate(self.items):
            lengths[_node(_ENDED, k)] = self.shares[k] * times.of_instruction(item)
        return lengths

    def is_joined(self, node: int) -> bool:
        """Whether a node is the event that all ranks have joined a communication."""
        return node % _PHASES == _JOINED

    def step(self, node: int) -> Waiting:
        """A rank's node in words."""
        k, phase = divmod(node, _PHASES)
        rank, item = self.items[k]
        return Waiting(rank, item, self.items[k - 1][1] if phase == _ISSUED else item)

    def _in_every_model(self, row: range) -> Iterator[Edge]:
        last_pass: int | None = None
        for k in row:
            rank, item = self.items[k]
            yield _node(_STARTED, k), _node(_ISSUED, k)
            yield _node(_ENDED, k), _node(_STARTED, k)
            if k > row[0]:
                yield _node(_ISSUED, k), _node(_ISSUED, k - 1)
            if last_pass is not None:
                yield _node(_STARTED, k), _node(_ENDED, last_pass)
            if not isinstance(item, Comm):
                last_pass = k
                for need in chain.from_iterable(
                    prerequisites(part, self.schedule) for part in parts_of(item)
                ):
                    yield _node(_STARTED, k), _node(_ENDED, self.index[rank, need])
            if isinstance(item, Comm) or item.type in self.schedule.method.in_step:
                joined = self._joined(k)
                yield joined, _node(_STARTED, k)
                yield _node(_ENDED, k), joined

    def _on_streams(self, row: range, model: QueueModel) -> Iterator[Edge]:
        """An operation waits for the one before it on its side stream.

        A pass that ranks run in step launches its collectives behind its first product: it starts beside the
        collective before it, and waits for no more than that all ranks have come to that one.
        """
        last: dict[Hashable, int] = {}
        for k in row:
            stream = self._stream(k, model)
            if stream is not None:
                if stream in last and isinstance(self.items[k][1], Comm):
                    yield _node(_STARTED, k), _node(_ENDED, last[stream])
                elif stream in last:
                    yield self._joined(k), self._joined(last[stream])
                last[stream] = k

    def _on_rank(self, row: range, model: QueueModel, held: bool) -> Iterator[Edge]:
        """A host, and a single queue, wait for what was issued before."""
        for k in row[1:]:
            if held and _blocks(model, self.items[k - 1][1]):
                yield _node(_ISSUED, k), _node(_ENDED, k - 1)
            if model.one_queue:
                yield _node(_STARTED, k), _node(_STARTED, k - 1)

    def _creations(self) -> Iterator[Edge]:
        """A rank goes on after its first use of a communicator when all ranks have come to theirs."""
        firsts: dict[Hashable, list[tuple[int, bool]]] = {}
        for row in self.rows:
            seen: set[Hashable] = {None}
            for k in row:
                if self.communicators[k] not in seen:
                    seen.add(self.communicators[k])
                    firsts.setdefault(self.communicators[k], []).append((k, k != row[-1]))
        for uses in firsts.values():
            for (k, goes_on), (other, _) in product(uses, uses):
                if goes_on:
                    yield _node(_ISSUED, k + 1), _node(_ISSUED, other)

    def _joined(self, k: int) -> int:
        """The event that all ranks have come to a communication, or to a pass that they run in step."""
        return _node(_JOINED, self.first_part.setdefault(shared_name(self.items[k][1]), k))

    def _stream(self, k: int, model: QueueModel) -> Hashable:
        communicator, item = self.communicators[k], self.items[k][1]
        if not isinstance(item, Comm):
            return _COLLECTIVES if item.type in self.schedule.method.in_step else None
        if isinstance(communicator, _Pair) and not model.pairs:
            return communicator.upward
        return communicator

    def _communicator(self, rank: int, item: Comm) -> Hashable:
        if item.type in COLLECTIVES:
            return _COLLECTIVES
        peer = self.schedule.placement.rank_of(item.stage + _STEP_TO_PEER[item.type])
        source, target = (rank, peer) if item.type in RECEIVE_OF else (peer, rank)
        return _Pair(target > source, min(rank, peer), max(rank, peer))


def shared_name(item: Instruction) -> Hashable:
    """A name that all ranks' parts of one communication share, or of one pass that they run in step."""
    if isinstance(item, Pair):
        return item
    if isinstance(item, Pass) or item.type not in POINT_TO_POINT:
        return item.type, item.microbatch
    if item.type in RECEIVE_OF:
        receive, step = RECEIVE_OF[item.type]
        return receive, item.stage + step, item.microbatch
    return item.type, item.stage, item.microbatch


def _cut(row: Sequence[Instruction], late: Late) -> Iterator[tuple[Instruction, float]]:
    """A rank's items, each with its share of the instruction: 0F7 with a launch after a quarter is two."""
    for item, inside in split_late(row, late):
        done = 0.0
        for launched in inside:
            yield item, late[launched] - done
            yield launched, 1.0
            done = late[launched]
        yield item, 1.0 - done


def _node(phase: int, k: int) -> int:
    return _PHASES * k + phase


def _blocks(model: QueueModel, item: Instruction) -> bool:
    match model.blocking:
        case "everything":
            return True
        case "communication":
            return isinstance(item, Comm)
        case "collectives":
            return isinstance(item, Comm) and item.type not in POINT_TO_POINT
        case _:
            return False
