"""Handlers that sleep: the executor's table for a schedule whose passes cost time and no work.

A pass waits for what it needs and sleeps as long as the cost table says. Communication is real: the same
groups, the same calls in the same order, on small tensors that carry the microbatch's number, which is
checked where they arrive. Where the table gives communication a time, the side stream that runs it sleeps as
long: the passes of the rank go on meanwhile. A stream for each rank that sends to this one stands for the
link, on which transfers follow each other.

A pass that all ranks run in step (interlaced's S) sleeps a third of its time before, between and after its
two collectives, whose own time the cost table counts in the pass.

Next: ``emulation.py``, which runs it on processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_vocabpar.runtime.comm import (
    PointToPoint,
    VocabGroups,
    all_gather,
    all_reduce,
    broadcast,
    exchange_rows,
)
from megatron_vocabpar.runtime.executor import Observer, execute
from megatron_vocabpar.runtime.profile import INPUT, OUTPUT, Span, Timeline
from megatron_vocabpar.runtime.streams import Event, Stream, side_stream
from megatron_vocabpar.schedule.costs import PassTimes
from megatron_vocabpar.schedule.dependencies import prerequisites
from megatron_vocabpar.schedule.passes import (
    COLLECTIVES,
    INPUT_COLLECTIVES,
    RECEIVE_OF,
    Comm,
    CommType,
    Instruction,
    Pass,
    PassType,
)
from megatron_vocabpar.schedule.plan import Plan

_CPU = torch.device("cpu")
_SHAPE = (1, 8)  # of a message, which carries its microbatch's number in every element
_STEP_OF_RECEIVE = dict(RECEIVE_OF.values())


class EmulatedRank:
    """One rank of the emulation: its connections and side streams, for any number of plans.

    Args:
        groups: of this rank; their connections have been made (``comm.warm_up``).
        observers: context managers to hold around every instruction.
    """

    def __init__(self, groups: VocabGroups, observers: Sequence[Observer] = ()) -> None:
        self.groups = groups
        self.timeline = Timeline(_CPU)
        self.observers = (*observers, self.timeline.observe)
        self.point_to_point = PointToPoint(groups)
        self.output_stream = self.timeline.watch(side_stream(_CPU, "output-collectives"), OUTPUT)
        self.input_stream = self.timeline.watch(side_stream(_CPU, "input-collectives"), INPUT)
        peers = (rank for rank in range(groups.pipeline) if rank != groups.stage)
        self.links: dict[int, Stream] = {rank: side_stream(_CPU, f"link-{rank}") for rank in peers}

    def run(self, plan: Plan, times: PassTimes) -> list[Span]:
        """One iteration of ``plan``: what this rank did, seconds on the machine's clock.

        Raises:
            InstructionError: if an instruction fails, or brings another microbatch than its own.
        """
        iteration = _Iteration(self, plan, times)
        dist.barrier()
        self.timeline.start()
        execute(self.groups.stage, plan.program[self.groups.stage], iteration.handlers(), self.observers)
        self.point_to_point.drain()
        for event in iteration.events.values():
            event.wait()
        return self.timeline.stop()


class _Iteration:
    """The handlers of one iteration, and the events that they leave for each other."""

    def __init__(self, rank: EmulatedRank, plan: Plan, times: PassTimes) -> None:
        self.rank, self.groups, self.schedule, self.times = rank, rank.groups, plan.schedule, times
        self.events: dict[Instruction, Event[None]] = {}

    def handlers(self) -> dict[PassType | CommType, Callable[..., None]]:
        in_step = self.schedule.method.in_step
        return {
            **{type_: self._in_step if type_ in in_step else self._pass for type_ in PassType},
            **dict.fromkeys((CommType.SEND_F, CommType.SEND_B), self._send),
            **dict.fromkeys((CommType.RECV_F, CommType.RECV_B), self._receive),
            **dict.fromkeys(COLLECTIVES, self._collective),
        }

    def _pass(self, pass_: Pass) -> None:
        self._wait_for_needs(pass_)
        _sleep(self._ms(pass_))

    def _in_step(self, pass_: Pass) -> None:
        """All ranks run it together: two collectives within."""
        self._wait_for_needs(pass_)
        third = self._ms(pass_) / 3
        for exchange in (self._gather, self._sum):
            _sleep(third)
            event = self.rank.output_stream.submit(partial(self._carry, exchange, pass_, 0.0))
            with self.rank.timeline.waiting():
                event.wait()
        _sleep(third)

    def _ms(self, pass_: Pass) -> float:
        """Of F, B and W there is a time a stage, of the vocabulary's passes one a rank: both by ``stage``."""
        return self.times.passes[pass_.type][pass_.stage]

    def _wait_for_needs(self, pass_: Pass) -> None:
        for needed in prerequisites(pass_, self.schedule):
            if isinstance(needed, Comm):
                with self.rank.timeline.waiting():
                    self.events[needed].wait()

    def _send(self, instruction: Comm) -> None:
        step = RECEIVE_OF[instruction.type][1]
        peer = self.schedule.placement.rank_of(instruction.stage + step)
        self.rank.point_to_point.send(_message(instruction.microbatch), peer)

    def _receive(self, instruction: Comm) -> None:
        """The receive is posted now; the transfer takes its turn on the link."""
        peer = self.schedule.placement.rank_of(instruction.stage - _STEP_OF_RECEIVE[instruction.type])
        posted = self.rank.point_to_point.receive(_SHAPE, torch.float32, _CPU, peer)

        def transfer() -> None:
            received = posted.wait()
            _sleep(self.times.comms[instruction.type])
            _check(received, instruction.microbatch)

        self.events[instruction] = self.rank.links[peer].submit(transfer)

    def _collective(self, instruction: Comm) -> None:
        of_input = instruction.type in INPUT_COLLECTIVES
        stream = self.rank.input_stream if of_input else self.rank.output_stream
        ms = self.times.comms[instruction.type]
        work = partial(self._carry, self._exchange_of(instruction.type), instruction, ms)
        self.events[instruction] = stream.submit(work)

    def _carry(self, exchange: Callable[[int], torch.Tensor], instruction: Instruction, ms: float) -> None:
        _sleep(ms)
        _check(exchange(instruction.microbatch), instruction.microbatch)

    def _exchange_of(self, type_: CommType) -> Callable[[int], torch.Tensor]:
        """What a collective does follows from who waits for it, as in ``integration/handlers.py``."""
        if type_ in INPUT_COLLECTIVES:
            return partial(self._rows, to_first=type_ is CommType.CI)
        return {
            frozenset({PassType.S}): self._broadcast,
            frozenset({PassType.S2}): self._maximum,
            frozenset({PassType.T}): self._gather,
            frozenset({PassType.B}): self._sum,
            frozenset({PassType.B, PassType.T}): self._gather_and_sum,
        }[self.schedule.method.waiting_for(type_)]

    def _broadcast(self, microbatch: int) -> torch.Tensor:
        source = self.schedule.placement.last_rank
        message = _message(microbatch if self.groups.stage == source else -1)
        broadcast(self.groups, self.groups.output, [message], [source])
        return message

    def _maximum(self, microbatch: int) -> torch.Tensor:
        return all_reduce(self.groups, self.groups.output, _message(microbatch), dist.ReduceOp.MAX)

    def _gather(self, microbatch: int) -> torch.Tensor:
        return all_gather(self.groups, self.groups.output, _message(microbatch))

    def _sum(self, microbatch: int) -> torch.Tensor:
        return all_reduce(self.groups, self.groups.output, _message(microbatch)) / len(self.groups.ranks)

    def _gather_and_sum(self, microbatch: int) -> torch.Tensor:
        return torch.cat([self._gather(microbatch), self._sum(microbatch).unsqueeze(0)])

    def _rows(self, microbatch: int, to_first: bool) -> torch.Tensor:
        """A row of every rank to that of the first stage, or back."""
        members = range(len(self.groups.ranks))
        first = self.schedule.placement.first_rank
        ends = [int(member == first) for member in members]
        every = [int(self.groups.stage == first) for _ in members]
        send, receive = (ends, every) if to_first else (every, ends)
        received = torch.empty(sum(receive), _SHAPE[1])
        exchange_rows(self.groups, received, _message(microbatch).repeat(sum(send), 1), receive, send)
        return received


def _message(microbatch: int) -> torch.Tensor:
    return torch.full(_SHAPE, float(microbatch))


def _check(message: torch.Tensor, microbatch: int) -> None:
    """Refuse a message of another microbatch: ranks do not run the same program."""
    found = set(message.flatten().tolist()) - {float(microbatch)}
    if found:
        raise RuntimeError(f"a message of microbatch {found.pop():g} came for microbatch {microbatch}")


def _sleep(ms: float) -> None:
    """Never nothing: falling asleep and waking up are part of what an empty pass costs."""
    time.sleep(max(ms / 1e3, 1e-9))
