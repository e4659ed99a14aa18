"""The event loop of the simulator: it plays each rank's instructions in order, with queues.

Every rank runs its instructions in order. A pass starts when its rank is free and everything that it waits
for has ended. Communication runs beside the passes and takes its turn in a queue:

- a *link* for each pair of ranks and direction. A transfer starts when it has been sent, its receive has been
  posted and the transfer before it on the link has ended; the order is that of the sends;
- one queue for the collectives of both vocabulary layers. The next starts when all ranks have launched it and
  the one before has ended; the order is that of rank 0's launches.

Sends, receives and launches take no time of their rank: they are issued when the pass before them ends, or
inside the pass behind them, after a share of its layers (``launches.py``).

A pair, F of one microbatch beside B of another, starts when both passes can start. Both end together, after
the sum of their times less what they hide of each other.

``run_passes`` plays passes alone, without queues: a transfer or a collective starts when everything that it
carries has been produced. ``lower.py`` makes a program from this.

For each pass and transfer the loop notes its *cause*: of everything that it waited for, the item that ended
last. It starts when its cause ends, so ``critical_path.py`` can follow causes without a gap.

Next: ``simulate.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_vocabpar.schedule.play.numbering import TYPES, Numbering, numbered_needs
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.dependencies import collectives
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    POINT_TO_POINT,
    RECEIVE_OF,
    Comm,
    CommType,
    Instruction,
    PassType,
)
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Deadlock, Late, Program, Schedule, split_late

NEVER = -1.0
NOTHING = -1


@dataclass(frozen=True)
class Events:
    """When each item ran, by number (see ``numbering.py``); times in ms.

    Attributes:
        numbering: what the numbers mean.
        starts: the start of each pass, receive (the transfer itself) and part in a collective; ``NEVER`` if
            it did not run.
        ends: the end of each.
        causes: the number of the item that each waited for last; ``NOTHING`` if it started at once.
        launches: when its rank issued each part in a collective, send and receive; ``NEVER`` for others.
    """

    numbering: Numbering
    starts: list[float]
    ends: list[float]
    causes: list[int]
    launches: list[float]


def run_events(schedule: Schedule, times: PassTimes, program: Program, late: Late = NONE_LATE) -> Events:
    """Play ``program``, of which ``late`` is launched inside passes.

    Raises:
        Deadlock: naming for the first stuck rank the instruction and what it waits for.
    """
    return _loop(schedule, times, program, late).run()


def run_passes(schedule: Schedule, times: PassTimes) -> Events:
    """Play the passes of ``schedule``, each as soon as it can run, with communication that never queues.

    Returns:
        events in which a transfer or a collective starts when its last producer ends.

    Raises:
        Deadlock: naming for the first stuck rank the pass and what it waits for.
    """
    return _loop(schedule, times, schedule.rows, NONE_LATE, alone=True).run()


@dataclass
class _Queue:
    """Work that is served in turn: the numbers that wait, when the queue is free, the last one served."""

    waiting: deque[int] = field(default_factory=deque)
    free: float = 0.0
    last: int = NOTHING


class _Loop:
    def __init__(
        self, schedule: Schedule, times: PassTimes, program: Program, late: Late, *, alone: bool = False
    ) -> None:
        # What is launched inside a pass is played behind it, when its times are known.
        program = tuple(tuple(_behind_passes(row, late)) for row in program) if late else program
        self.schedule, self.program, self.alone = schedule, program, alone
        self.numbering = numbering = Numbering(schedule)
        self.m, self.p = schedule.m, schedule.p
        self.left = {numbering.number(item): 1.0 - share for item, share in late.items()}
        self.rows = list(map(numbering.numbers, program))
        self.needs = [numbered_needs(needs, schedule.m) for needs in numbering.needs]
        self.carried = _carried(numbering) if alone else [[] for _ in numbering.needs]
        self.durations = _durations(numbering, times)
        self.starts, self.ends = [NEVER] * numbering.size, [NEVER] * numbering.size
        self.causes, self.launches = [NOTHING] * numbering.size, [NEVER] * numbering.size
        self.position, self.free = [0] * self.p, [0.0] * self.p
        self.last = [NOTHING] * self.p  # each rank's latest pass
        self.sleepers: dict[int, list[int]] = {}  # ranks, by the number that they wait for
        self.awake = list(range(self.p))
        # For each type, the function that runs an instruction; it returns the number that the rank waits for,
        # or NOTHING.
        acts: dict[PassType | CommType, Callable[[int, int], int]] = {
            **dict.fromkeys(PassType, self._pass),
            **dict.fromkeys(schedule.method.in_step, self._together),
            **dict.fromkeys(CommType, self._launch),
            **dict.fromkeys((CommType.RECV_F, CommType.RECV_B), self._receive),
            **dict.fromkeys(RECEIVE_OF, self._send),
        }
        self.acts = [acts[type_] for type_ in TYPES]
        # For what needs several parts: how many have come, when the latest came, and after which pass.
        self.gathered: dict[int, tuple[int, float, int]] = {}
        self.links = _links(numbering)
        self.queue = _queue(numbering, program)

    def run(self) -> Events:
        while self.awake:
            self._advance(self.awake.pop())
        stopped = {
            rank: row[position]
            for rank, (row, position) in enumerate(zip(self.program, self.position, strict=True))
            if position < len(row)
        }
        if stopped:
            blocker = next(number for number, ranks in self.sleepers.items() if min(stopped) in ranks)
            node, mb = divmod(blocker, self.m)
            if self.alone and self.numbering.type_of(node) in POINT_TO_POINT:
                # Without a program the transfer has no instruction to name: name the pass that sends.
                (node,) = self.numbering.producers(node)
            raise Deadlock(stopped, self.numbering.item_of(node, mb))
        return Events(self.numbering, self.starts, self.ends, self.causes, self.launches)

    def _advance(self, rank: int) -> None:
        """Run the instructions of ``rank`` up to the first that has to wait."""
        row, block = self.rows[rank], self.numbering.width * self.m
        position = self.position[rank]
        while position < len(row):
            number = row[position]
            blocker = self.acts[number // block](rank, number)
            if blocker != NOTHING:
                self.sleepers.setdefault(blocker, []).append(rank)
                break
            position += 1
        self.position[rank] = position

    def _ready(self, rank: int, number: int) -> tuple[float, int]:
        """When a pass can start, and its cause; or ``NEVER`` and the number that it waits for."""
        start, cause = self.free[rank], self.last[rank]
        node, mb = divmod(number, self.m)
        for first, back in self.needs[node]:
            if mb >= back:
                end = self.ends[first + mb]
                if end < 0.0:
                    return NEVER, first + mb
                if end > start:
                    start, cause = end, first + mb
        return start, cause

    def _pass(self, rank: int, number: int) -> int:
        start, cause = self._ready(rank, number)
        if start < 0.0:
            return cause
        self.free[rank] = self._finish(number, start, cause)
        self.last[rank] = number
        return NOTHING

    def _together(self, rank: int, number: int) -> int:
        if self.ends[number] < 0.0:
            start, cause = self._ready(rank, number)
            if start < 0.0:
                return cause
            first = number - rank * self.m
            if not self._gather(first, self.p, start, cause):
                return number
            _, start, cause = self.gathered.pop(first)
            for part in range(first, first + self.p * self.m, self.m):
                self._finish(part, start, cause)
        self.free[rank], self.last[rank] = self.ends[number], number
        return NOTHING

    def _send(self, rank: int, number: int) -> int:
        type_ = TYPES[number // self.m // self.numbering.width]
        assert isinstance(type_, CommType)
        receive, step = RECEIVE_OF[type_]
        first_node = self.numbering.first_node
        transfer = number + (first_node[receive] - first_node[type_] + step) * self.m
        self.links[transfer // self.m].waiting.append(transfer)
        self._issue(rank, number)
        return self._post(rank, transfer, number)

    def _receive(self, rank: int, number: int) -> int:
        self._issue(rank, number)
        return self._post(rank, number, number)

    def _issue(self, rank: int, number: int) -> float:
        """Note when a rank issues a communication: now, or inside the pass that it ran last."""
        now, last = self.free[rank], self.last[rank]
        if number in self.left:
            now -= self.left[number] * (self.ends[last] - self.starts[last])
        self.launches[number] = now
        return now

    def _post(self, rank: int, transfer: int, part: int) -> int:
        """Note that a transfer's send or receive has been issued; start the transfer if both have."""
        if self._gather(transfer, 2, self.launches[part], self.last[rank]):
            self._serve(self.links[transfer // self.m], 2, 1)
        return NOTHING

    def _launch(self, rank: int, number: int) -> int:
        """Note that one rank's part in a collective has been issued; rank 0's part names the collective."""
        now = self._issue(rank, number)
        if self._gather(number - rank * self.m, self.p, now, self.last[rank]):
            self._serve(self.queue, self.p, self.p)
        return NOTHING

    def _gather(self, key: int, parts: int, now: float, cause: int) -> bool:
        """Note that one part has come; true if it is the last of ``parts``."""
        count, latest, latest_cause = self.gathered.get(key, (0, NEVER, NOTHING))
        if now > latest:
            latest, latest_cause = now, cause
        self.gathered[key] = count + 1, latest, latest_cause
        return count + 1 == parts

    def _serve(self, queue: _Queue, gathered: int, parts: int) -> None:
        """Start what waits in a queue, up to the first item that lacks a part."""
        while queue.waiting:
            key = queue.waiting[0]
            count, start, cause = self.gathered.get(key, (0, NEVER, NOTHING))
            if count < gathered:
                return
            del self.gathered[key]
            queue.waiting.popleft()
            if queue.free > start:
                start, cause = queue.free, queue.last
            numbers = range(key, key + parts * self.m, self.m)
            queue.free = max(self._finish(number, start, cause) for number in numbers)
            queue.last = key

    def _finish(self, number: int, start: float, cause: int, took: float | None = None) -> float:
        """Note when an item runs, wake the ranks that wait for it, and return its end.

        The item takes its node's time, or ``took`` ms.
        """
        node = number // self.m
        end = start + (self.durations[node] if took is None else took)
        self.starts[number], self.ends[number], self.causes[number] = start, end, cause
        for offset, producers, parts in self.carried[node]:
            key, ready, last = number + offset, end, number
            if producers > 1:
                if not self._gather(key, producers, end, number):
                    continue
                _, ready, last = self.gathered.pop(key)
            for part in range(key, key + parts * self.m, self.m):
                self._finish(part, ready, last)
        sleepers = self.sleepers.pop(number, None)
        if sleepers:
            self.awake += sleepers
        return end


class _PairLoop(_Loop):
    """The event loop for a schedule with pairs."""

    def __init__(
        self, schedule: Schedule, times: PassTimes, program: Program, late: Late, *, alone: bool = False
    ) -> None:
        super().__init__(schedule, times, program, late, alone=alone)
        # For each F in a pair: the number of its B, and the ms that both take together.
        self.beside: dict[int, tuple[int, float]] = {}
        for pair in schedule.pairs:
            forward, backward = map(self.numbering.number, (pair.forward, pair.backward))
            in_turn = self.durations[forward // self.m] + self.durations[backward // self.m]
            self.beside[forward] = backward, in_turn - times.saved(pair)

    def _pass(self, rank: int, number: int) -> int:
        if number not in self.beside:
            return super()._pass(rank, number)
        beside, took = self.beside[number]
        start, cause = self._ready(rank, number)
        if start < 0.0:
            return cause
        other, cause_of_other = self._ready(rank, beside)
        if other < 0.0:
            return cause_of_other
        start, cause = max((start, cause), (other, cause_of_other))
        self._finish(number, start, cause, took)
        self.free[rank] = self._finish(beside, start, cause, took)
        self.last[rank] = beside
        return NOTHING


def _loop(
    schedule: Schedule, times: PassTimes, program: Program, late: Late, *, alone: bool = False
) -> _Loop:
    kind = _PairLoop if schedule.pairs else _Loop
    return kind(schedule, times, program, late, alone=alone)


def _behind_passes(row: Sequence[Instruction], late: Late) -> Iterator[Instruction]:
    for item, inside in split_late(row, late):
        yield item
        yield from inside


def _queue(numbering: Numbering, program: Program) -> _Queue:
    """The queue of all collectives, in the order of rank 0's launches."""
    launches = (item for item in program[0] if isinstance(item, Comm) and item.type in COLLECTIVES)
    return _Queue(deque(map(numbering.number, launches)))


def _carried(numbering: Numbering) -> list[list[tuple[int, int, int]]]:
    """For each pass node the communication of its result: (offset, number of producers, number of parts).

    The offset leads from the pass's number to that of the communication's first part.
    """
    carried: list[list[tuple[int, int, int]]] = [[] for _ in numbering.needs]
    wholes = [range(node, node + 1) for type_, _ in RECEIVE_OF.values() for node in numbering.nodes_of(type_)]
    wholes += [numbering.nodes_of(type_) for type_ in collectives(numbering.schedule)]
    for parts in wholes:
        producers = [node for part in parts for node in numbering.producers(part)]
        for node in producers:
            offset = (parts[0] - node) * numbering.schedule.m
            carried[node].append((offset, len(producers), len(parts)))
    return carried


def _durations(numbering: Numbering, times: PassTimes) -> list[float]:
    durations = [0.0] * numbering.nodes
    for type_, row in times.passes.items():
        first = numbering.first_node[type_]
        durations[first : first + len(row)] = row
    for comm, time in times.comms.items():
        first = numbering.first_node[comm]
        durations[first : first + numbering.width] = [time] * numbering.width
    return durations


def _links(numbering: Numbering) -> dict[int, _Queue]:
    """The link of each receive's node; all transfers from one rank to another share a link."""
    placement = numbering.schedule.placement
    by_ranks: dict[tuple[int, int], _Queue] = {}
    links: dict[int, _Queue] = {}
    for receive, step in RECEIVE_OF.values():
        for stage in range(placement.num_stages):
            source = stage - step
            if 0 <= source < placement.num_stages:
                ranks = placement.rank_of(source), placement.rank_of(stage)
                links[numbering.first_node[receive] + stage] = by_ranks.setdefault(ranks, _Queue())
    return links
