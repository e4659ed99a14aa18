"""Handlers that sleep: the executor's table for a schedule whose passes cost time and no work.

A pass waits for its prerequisites and sleeps as long as the cost table says. Communication is real: the same
groups, the same calls in the same order, on small tensors. A message carries the number of its microbatch,
which the receiver checks, and the time at which each rank issued its part.

The side stream that runs an exchange then sleeps for the rest of its time. Example: C1 costs 5 ms, the last
rank issues its part at 100 ms, and the real exchange ends at 102 ms; the stream sleeps until 105 ms. The
rank's passes go on meanwhile. A stream for each rank that sends to this one stands for the link, on which
transfers follow each other.

A pass that all ranks run in step (interlaced's S) has two collectives inside, which its cost includes. It
sleeps a third of its time before each of them and after them, counted from the last rank's arrival.

Next: ``emulation.py``, which runs it on processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from megatron_vocabpar.runtime.between_layers import BetweenLayers
from megatron_vocabpar.runtime.comm import (
    PointToPoint,
    VocabGroups,
    all_gather,
    all_reduce,
    broadcast,
    exchange_rows,
)
from megatron_vocabpar.runtime.executor import execute
from megatron_vocabpar.runtime.streams import Event, Stream, side_stream
from megatron_vocabpar.runtime.timeline import COLLECTIVES as LANE
from megatron_vocabpar.runtime.timeline import Span, Timeline
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.dependencies import prerequisites
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    RECEIVE_OF,
    Comm,
    CommType,
    Instruction,
    InstructionType,
    Pair,
    PairType,
    Pass,
    PassType,
    parts_of,
)
from megatron_vocabpar.schedule.words.schedule import Schedule

Exchange = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's message to those that arrive, a row each."""

_CPU = torch.device("cpu")
_STEP_OF_RECEIVE = dict(RECEIVE_OF.values())


class EmulatedRank:
    """One rank of the emulation: its connections and its streams, for any number of plans.

    Args:
        groups: of this rank; their connections have been made (``comm.warm_up``).
    """

    def __init__(self, groups: VocabGroups) -> None:
        self.groups = groups
        self.timeline = Timeline(_CPU)
        self.observers = (self.timeline.observe,)
        self.point_to_point = PointToPoint(groups)
        self.side_stream = self.timeline.watch(side_stream(_CPU, LANE), LANE)
        peers = (rank for rank in range(groups.pipeline) if rank != groups.stage)
        self.links: dict[int, Stream] = {rank: side_stream(_CPU, f"link-{rank}") for rank in peers}
        self.free_s: dict[Stream, float] = {}  # when what a stream has run last ended

    def run(self, plan: Plan, times: PassTimes) -> list[Span]:
        """Run one iteration of ``plan``; returns this rank's spans, in seconds of the machine's clock.

        Raises:
            InstructionError: if an instruction fails, or brings another microbatch than its own.
        """
        iteration = _Iteration(self, plan, times)
        dist.barrier()
        self.timeline.start()
        program, between = plan.program[self.groups.stage], iteration.between
        execute(self.groups.stage, program, iteration.handlers(), self.observers, plan.late, between)
        self.point_to_point.drain()
        for event in iteration.events.values():
            event.wait()
        return self.timeline.stop()


class _Iteration:
    """The handlers of one iteration, and the events that they leave for each other."""

    def __init__(self, rank: EmulatedRank, plan: Plan, times: PassTimes) -> None:
        self.rank, self.groups, self.schedule, self.times = rank, rank.groups, plan.schedule, times
        self.events: dict[Instruction, Event[None]] = {}
        self.between = BetweenLayers(range(plan.schedule.placement.num_stages))

    def handlers(self) -> dict[InstructionType, Callable[..., None]]:
        in_step = self.schedule.method.in_step
        return {
            **{type_: self._in_step if type_ in in_step else self._pass for type_ in (*PassType, *PairType)},
            **dict.fromkeys((CommType.SEND_F, CommType.SEND_B), self._send),
            **dict.fromkeys((CommType.RECV_F, CommType.RECV_B), self._receive),
            **dict.fromkeys(COLLECTIVES, self._collective),
        }

    def _pass(self, item: Pass | Pair) -> None:
        """Sleep in parts: up to each launch inside the pass, and to its end."""
        self._wait_for_needs(item)
        ms, done = self._ms(item), 0.0
        for share in self.between.shares:
            _sleep((share - done) * ms)
            self.between.reached(share)
            done = share
        _sleep((1.0 - done) * ms)

    def _in_step(self, pass_: Pass) -> None:
        """A pass that all ranks run together, with two collectives inside."""
        self._wait_for_needs(pass_)
        third = self._ms(pass_) / 3
        _sleep(third)
        for exchange in (partial(_gather, self.groups), partial(_sum, self.groups)):
            message = self._message(pass_.microbatch)
            with self.rank.timeline.waiting():
                last_s = self.rank.side_stream.submit(partial(self._issued, exchange, message, pass_)).wait()
            _sleep_until(last_s, third)

    def _ms(self, instruction: Instruction) -> float:
        return self.times.of_instruction(instruction)

    def _wait_for_needs(self, item: Pass | Pair) -> None:
        for needed in chain.from_iterable(prerequisites(part, self.schedule) for part in parts_of(item)):
            if isinstance(needed, Comm):
                with self.rank.timeline.waiting():
                    self.events[needed].wait()

    def _send(self, instruction: Comm) -> None:
        step = RECEIVE_OF[instruction.type][1]
        peer = self.schedule.placement.rank_of(instruction.stage + step)
        self.rank.point_to_point.send(self._message(instruction.microbatch), peer)

    def _receive(self, instruction: Comm) -> None:
        """The receive is posted now; the transfer takes its turn on the link."""
        peer = self.schedule.placement.rank_of(instruction.stage - _STEP_OF_RECEIVE[instruction.type])
        message = self._message(instruction.microbatch)
        posted = self.rank.point_to_point.receive(message.shape, message.dtype, _CPU, peer)
        self._submit(self.rank.links[peer], lambda _: posted.wait(), instruction)

    def _collective(self, instruction: Comm) -> None:
        exchange = _exchange_of(instruction.type, self.groups, self.schedule)
        self._submit(self.rank.side_stream, exchange, instruction)

    def _submit(self, stream: Stream, exchange: Exchange, instruction: Comm) -> None:
        """Run ``exchange`` on ``stream``, for as long as the costs say."""
        message, ms = self._message(instruction.microbatch), self.times.comms[instruction.type]

        def work() -> None:
            last_s = self._issued(exchange, message, instruction)
            _sleep_until(max(last_s, self.rank.free_s.get(stream, 0.0)), ms)
            self.rank.free_s[stream] = time.monotonic()

        self.events[instruction] = stream.submit(work)

    def _message(self, microbatch: int) -> torch.Tensor:
        """``[1, 1 + p]``: the microbatch, then when each rank issued its part, so far only this one's."""
        message = torch.zeros((1, 1 + self.groups.pipeline), dtype=torch.float64)
        message[0, 0], message[0, 1 + self.groups.stage] = microbatch, time.monotonic()
        return message

    def _issued(self, exchange: Exchange, message: torch.Tensor, instruction: Instruction) -> float:
        """Exchange messages; returns when the last rank issued its part, in seconds of the machine's clock.

        Raises:
            RuntimeError: for a message of another microbatch: the ranks do not run the same program.
        """
        issued_s = float(message[0, 1:].max())
        messages = exchange(message)
        others = set(messages[:, 0].tolist()) - {float(instruction.microbatch)}
        if others:
            raise RuntimeError(
                f"a message of microbatch {others.pop():g} came for microbatch {instruction.microbatch}"
            )
        return max([issued_s, *messages[:, 1:].flatten().tolist()])


def _exchange_of(type_: CommType, groups: VocabGroups, schedule: Schedule) -> Exchange:
    """The exchange of a collective, chosen by the passes that wait for it, as in ``pipeline/handlers/``."""
    if type_ in (CommType.CI, CommType.CIB):
        return partial(_rows, groups, first=schedule.placement.first_rank, to_first=type_ is CommType.CI)
    sources = {CommType.C0: schedule.placement.last_rank, CommType.CG: schedule.p - 1}
    if type_ in sources:
        return partial(_broadcast, groups, source=sources[type_])
    exchanges: dict[frozenset[PassType], Callable[[VocabGroups, torch.Tensor], torch.Tensor]] = {
        frozenset({PassType.S2}): _maximum,
        frozenset({PassType.T}): _gather,
        frozenset({PassType.B}): _sum,
        frozenset({PassType.B, PassType.T}): _gather_and_sum,
    }
    waiting = schedule.method.waiting_for(type_) - {PassType.L, PassType.TW}
    return partial(exchanges[waiting], groups)


def _broadcast(groups: VocabGroups, message: torch.Tensor, *, source: int) -> torch.Tensor:
    broadcast(groups, [message], [source])
    return message


def _maximum(groups: VocabGroups, message: torch.Tensor) -> torch.Tensor:
    return all_reduce(groups, message, dist.ReduceOp.MAX)


def _gather(groups: VocabGroups, message: torch.Tensor) -> torch.Tensor:
    return all_gather(groups, message[0])


def _sum(groups: VocabGroups, message: torch.Tensor) -> torch.Tensor:
    total = all_reduce(groups, message)
    total[:, 0] /= len(groups.ranks)
    return total


def _gather_and_sum(groups: VocabGroups, message: torch.Tensor) -> torch.Tensor:
    return torch.cat([_gather(groups, message), _sum(groups, message)])


def _rows(groups: VocabGroups, message: torch.Tensor, *, first: int, to_first: bool) -> torch.Tensor:
    """A row of every rank to that of the first stage, or back."""
    members = range(len(groups.ranks))
    ends = [int(member == first) for member in members]
    every = [int(groups.stage == first) for _ in members]
    send, receive = (ends, every) if to_first else (every, ends)
    received = message.new_empty((sum(receive), message.shape[1]))
    exchange_rows(groups, received, message.repeat(sum(send), 1), receive, send)
    return received


def _sleep(ms: float) -> None:
    # At least a nanosecond: falling asleep and waking up are part of an empty pass's cost.
    time.sleep(max(ms / 1e3, 1e-9))


def _sleep_until(since_s: float, ms: float) -> None:
    """Sleep until ``ms`` have passed since ``since_s``."""
    time.sleep(max(since_s + ms / 1e3 - time.monotonic(), 0.0))
