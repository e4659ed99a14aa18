"""Event simulation of a program: when every pass and transfer runs, and what is alive meanwhile.

Each rank runs its instructions in order. A pass starts when the rank is free and all its prerequisites have
completed. A transfer starts when it has been sent and its receive posted. The collectives of a group go
through one queue: the next starts when all ranks have launched it and the one before has completed.

Next: ``draw_text.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .costs import PassCosts, PassTimes
from .dependencies import prerequisites, starts_together
from .lower import lower
from .passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    POINT_TO_POINT,
    Comm,
    CommType,
    Instruction,
    Pass,
    PassType,
)
from .schedule import Deadlock, Program, Schedule

Interval = tuple[float, float]


@dataclass(frozen=True)
class Simulation:
    """What happened, in milliseconds.

    Attributes:
        passes: start and end of every pass.
        comms: start and end of every receive and of every rank's part in a collective.
        iteration_ms: from the first start to the last end.
        busy_ms: for each rank, the time its passes take.
        peak_activations: for each rank, the most microbatches whose activations it holds (F to B, or W
            where W is split); a chunk counts as 1/chunks.
        peak_softmax_shards: for each rank, the most softmax shards alive (S to T).
        peak_embedded_inputs: for each rank, the most embedded inputs alive: from IF until CI has completed,
            on the first rank until F of stage 0 has run.
        peak_input_gradients: for each rank, the most input gradients alive that wait for IB.
    """

    passes: dict[Pass, Interval]
    comms: dict[Comm, Interval]
    iteration_ms: float
    busy_ms: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_softmax_shards: tuple[int, ...]
    peak_embedded_inputs: tuple[int, ...]
    peak_input_gradients: tuple[int, ...]

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank, the share of the iteration that it idles."""
        return tuple(1.0 - busy / self.iteration_ms if self.iteration_ms else 0.0 for busy in self.busy_ms)


def simulate(
    schedule: Schedule, costs: PassCosts | None = None, program: Program | None = None
) -> Simulation:
    """Run ``program``, by default ``lower(schedule, costs)``, with the times of ``costs``.

    Raises:
        Deadlock: naming for the first stuck rank the instruction and what it waits for.
    """
    costs = costs or PassCosts.default(schedule.p)
    simulator = _Simulator(schedule, PassTimes.of(costs, schedule), program or lower(schedule, costs))
    simulator.run()
    passes, comms = simulator.passes, simulator.comms
    ranks = range(schedule.p)
    return Simulation(
        passes=passes,
        comms=comms,
        iteration_ms=max((end for _, end in passes.values()), default=0.0),
        busy_ms=tuple(sum(passes[item][1] - passes[item][0] for item in row) for row in schedule.ranks),
        peak_activations=tuple(_peak_activations(schedule, passes, rank) for rank in ranks),
        peak_softmax_shards=tuple(_peak_softmax_shards(schedule, passes, rank) for rank in ranks),
        peak_embedded_inputs=tuple(_peak_embedded_inputs(schedule, passes, comms, rank) for rank in ranks),
        peak_input_gradients=tuple(_peak_input_gradients(schedule, passes, comms, rank) for rank in ranks),
    )


class _Simulator:
    def __init__(self, schedule: Schedule, times: PassTimes, program: Program) -> None:
        self.schedule, self.times, self.program = schedule, times, program
        self.passes: dict[Pass, Interval] = {}
        self.comms: dict[Comm, Interval] = {}
        self.position = [0] * len(program)
        self.free = [0.0] * len(program)
        self.offered: dict[Comm, list[float]] = {}  # receives: when sent and when posted, as they come
        self.launched: dict[tuple[CommType, int], list[float]] = {}
        self.arrived: dict[tuple[PassType, int], list[float]] = {}
        self.queues = [_Queue(group, program) for group in (OUTPUT_COLLECTIVES, INPUT_COLLECTIVES)]
        self.sleepers: dict[Instruction, list[int]] = {}
        self.awake: list[int] = []

    def run(self) -> None:
        self.awake = list(range(len(self.program)))
        while self.awake:
            rank = self.awake.pop()
            row = self.program[rank]
            while self.position[rank] < len(row):
                blocker = self._step(rank, row[self.position[rank]])
                if blocker is not None:
                    self.sleepers.setdefault(blocker, []).append(rank)
                    break
                self.position[rank] += 1
        for rank, row in enumerate(self.program):
            if self.position[rank] < len(row):
                item = row[self.position[rank]]
                blockers = ", ".join(
                    str(blocker) for blocker, ranks in self.sleepers.items() if rank in ranks
                )
                raise Deadlock(rank, item, f"waits for {blockers}, which never completes")

    def _step(self, rank: int, item: Instruction) -> Instruction | None:
        """Run one instruction; return what it has to wait for if it cannot run yet."""
        if isinstance(item, Pass):
            return self._run_pass(rank, item)
        if item.type in POINT_TO_POINT:
            self._offer(item, self.free[rank])
        else:
            self._launch(item, self.free[rank])
        return None

    def _run_pass(self, rank: int, item: Pass) -> Instruction | None:
        if item in self.passes:  # it started together with the others, while this rank waited for them
            self.free[rank] = self.passes[item][1]
            return None
        start = self.free[rank]
        for need in prerequisites(item, self.schedule):
            done = self.passes.get(need) if isinstance(need, Pass) else self.comms.get(need)
            if done is None:
                return need
            start = max(start, done[1])
        if not starts_together(item.type, self.schedule):
            self._finish_pass(item, start)
            self.free[rank] = self.passes[item][1]
            return None
        arrived = self.arrived.setdefault((item.type, item.microbatch), [])
        arrived.append(start)
        if len(arrived) < self.schedule.p:
            return item
        for peer in range(self.schedule.p):
            self._finish_pass(Pass(item.type, peer, item.microbatch), max(arrived))
        self.free[rank] = self.passes[item][1]
        return None

    def _finish_pass(self, item: Pass, start: float) -> None:
        self.passes[item] = start, start + self.times.passes[item.type][item.stage]
        self.awake += self.sleepers.pop(item, ())

    def _finish_comm(self, item: Comm, start: float) -> float:
        end = start + self.times.comms[item.type]
        self.comms[item] = start, end
        self.awake += self.sleepers.pop(item, ())
        return end

    def _offer(self, item: Comm, now: float) -> None:
        """A send or the posting of its receive: the transfer starts once there are both."""
        receive = {CommType.SEND_F: CommType.RECV_F, CommType.SEND_B: CommType.RECV_B}.get(item.type)
        step = 1 if item.type is CommType.SEND_F else -1
        key = item if receive is None else Comm(receive, item.stage + step, item.microbatch)
        times = self.offered.setdefault(key, [])
        times.append(now)
        if len(times) == 2:
            self._finish_comm(key, max(times))

    def _launch(self, item: Comm, now: float) -> None:
        """One rank's part in a collective: the queue moves on as far as all ranks have launched."""
        self.launched.setdefault((item.type, item.microbatch), []).append(now)
        for queue in self.queues:
            while queue.waiting and len(self.launched.get(queue.waiting[0], ())) == self.schedule.p:
                type_, mb = queue.waiting.popleft()
                start = max(queue.free, *self.launched[type_, mb])
                ends = [self._finish_comm(Comm(type_, rank, mb), start) for rank in range(self.schedule.p)]
                queue.free = max(ends)


class _Queue:
    """The collectives of one group, in the order of the first rank's launches."""

    def __init__(self, group: frozenset[CommType], program: Program) -> None:
        self.free = 0.0
        row = program[0] if program else ()
        self.waiting = deque((i.type, i.microbatch) for i in row if isinstance(i, Comm) and i.type in group)


def _peak(intervals: Sequence[Interval]) -> int:
    """The most intervals that are open at once; at the same time an end comes before a start."""
    events = sorted([*((end, -1) for _, end in intervals), *((start, 1) for start, _ in intervals)])
    return max(accumulate(step for _, step in events), default=0)


def _alive(
    schedule: Schedule, rank: int, first: PassType, last: PassType, passes: dict[Pass, Interval]
) -> list[Interval]:
    """From the start of each pass of one type on a rank to the end of the other type's."""
    starts = [item for item in schedule.ranks[rank] if item.type is first]
    ends = [Pass(last, item.stage, item.microbatch) for item in starts]
    return [(passes[a][0], passes[b][1]) for a, b in zip(starts, ends, strict=True) if b in passes]


def _peak_activations(schedule: Schedule, passes: dict[Pass, Interval], rank: int) -> float:
    last = PassType.W if schedule.splits_w else PassType.B
    return _peak(_alive(schedule, rank, PassType.F, last, passes)) / schedule.chunks


def _peak_softmax_shards(schedule: Schedule, passes: dict[Pass, Interval], rank: int) -> int:
    return _peak(_alive(schedule, rank, PassType.S, PassType.T, passes))


def _peak_embedded_inputs(
    schedule: Schedule, passes: dict[Pass, Interval], comms: dict[Comm, Interval], rank: int
) -> int:
    alive = []
    for item in schedule.ranks[rank]:
        if item.type is PassType.IF:
            gone = comms[Comm(CommType.CI, rank, item.microbatch)][1]
            if rank == schedule.layout.first_rank:
                gone = passes[Pass(PassType.F, 0, item.microbatch)][1]
            alive.append((passes[item][0], gone))
    return _peak(alive)


def _peak_input_gradients(
    schedule: Schedule, passes: dict[Pass, Interval], comms: dict[Comm, Interval], rank: int
) -> int:
    alive = []
    for item in schedule.ranks[rank]:
        if item.type is PassType.IB:
            came = comms[Comm(CommType.CIB, rank, item.microbatch)][1]
            if rank == schedule.layout.first_rank:
                came = passes[Pass(PassType.B, 0, item.microbatch)][1]
            alive.append((came, passes[item][1]))
    return _peak(alive)
