"""One forward-backward call on one rank: what the handlers of all layers share.

``Rank`` stays the same from one iteration to the next, ``Call`` holds the arguments of this one, and an
``Iteration`` is where handlers leave tensors for each other, keyed by the instruction that produced them.

Next: ``handlers/``, whose classes' methods are the handlers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.pipeline.gradients import GradientSync
from megatron_vocabpar.pipeline.microbatches import Microbatches, no_microbatches
from megatron_vocabpar.pipeline.recording import ModelCall
from megatron_vocabpar.runtime.between_layers import BetweenLayers
from megatron_vocabpar.runtime.buffers import Buffers, Slot
from megatron_vocabpar.runtime.comm import PointToPoint, VocabGroups, broadcast
from megatron_vocabpar.runtime.streams import Event, Stream, Waitable
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.passes import Comm, CommType, PassType
from megatron_vocabpar.schedule.words.placement import Placement

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This rank's part in the pipeline.

    From call to call only ``method`` changes: an evaluation's ends in the loss.
    """

    method: Method
    placement: Placement
    groups: VocabGroups
    device: torch.device
    side_stream: Stream
    point_to_point: PointToPoint
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    not_finite: Callable[[str], None] | None = None

    @property
    def pipeline_rank(self) -> int:
        return self.groups.stage

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.placement.last_rank

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the labels and the loss function."""
        return self.pipeline_rank == self.placement.p - 1

    @cached_property
    def takers(self) -> Mapping[CommType, int]:
        """How many of this rank's passes take what a collective carries."""
        takers = {}
        for type_ in self.method.collectives:
            # L runs on one rank, as does the B that waits. On the same rank B takes L's gradient, not CG's.
            last_backward = self.is_last and not (type_ is CommType.CG and self.has_loss)
            runs_here = {PassType.L: self.has_loss, PassType.B: last_backward}
            takers[type_] = sum(runs_here.get(pass_, True) for pass_ in self.method.waiting_for(type_))
        return takers


@dataclass
class Iteration:
    """The state of one forward-backward call on one rank.

    Attributes:
        microbatches: the ids and plans of every microbatch, by number. Empty for baseline and redis with
            the loss in the last stage: there Megatron's own code needs none.
        recorded: by stage and microbatch, the calls of ``forward_step`` that stages of this rank replay; for
            other stages F calls it.
        with_loss: by microbatch, the calls with labels and loss function, where this rank has them.
        buffers: tensors and events between instructions.
        reported: what the loss function reported, in order (Megatron's forward_data_store).
        num_tokens: tokens of the loss, on the rank that computes it.
        between: launches inside passes.
        checks: called when everything is queued, because they wait for the device; each may raise.
    """

    rank: Rank
    call: Call
    gradients: GradientSync
    between: BetweenLayers = field(default_factory=BetweenLayers)
    microbatches: Microbatches = field(default_factory=no_microbatches)
    recorded: Mapping[int, Sequence[ModelCall]] = field(default_factory=dict)
    with_loss: Sequence[ModelCall] = ()
    buffers: Buffers = field(default_factory=Buffers)
    reported: list[Any] = field(default_factory=list)
    num_tokens: torch.Tensor | int = 0
    checks: list[Callable[[], None]] = field(default_factory=list)
    _unclaimed: deque[Event[Any]] = field(default_factory=deque)

    def wait(self, event: Waitable[T]) -> T:
        """Wait for communication; the timeline shows it as waiting."""
        with self.rank.waiting():
            return event.wait()

    def arrived(self, producer: Comm, slot: Slot[Waitable[T]]) -> T:
        """What communication brings, when it is there."""
        return self.wait(self.buffers.take(producer, slot))

    def hand_on(self, instruction: Comm, slot: Slot[Waitable[T]], event: Event[T]) -> None:
        """Keep what a collective brings for this rank's passes that wait for it.

        Where none does, hold the event until it is done, so that its errors are raised here.
        """
        if uses := self.rank.takers[instruction.type]:
            self.buffers.put(instruction, slot, event, uses=uses)
            return
        while self._unclaimed and self._unclaimed[0].done():
            self._unclaimed.popleft().wait()
        self._unclaimed.append(event)

    def finish(self) -> None:
        """Wait for the events that no pass took, and check that no buffer is left.

        Raises:
            BufferError: naming the buffers that are left.
        """
        self.rank.point_to_point.drain()
        while self._unclaimed:
            self._unclaimed.popleft().wait()
        self.buffers.check_empty()

    @property
    def divisor(self) -> torch.Tensor | None:
        """The number of the loss's tokens, if Megatron divides the gradients by it."""
        if not self.call.config.calculate_per_token_loss:
            return None
        return torch.as_tensor(self.num_tokens, dtype=torch.int, device=self.rank.device)

    @property
    def sequence_shards(self) -> int:
        """Parts into which sequence parallelism cuts the hidden states between layers."""
        return self.rank.groups.tensor if self.call.config.sequence_parallel else 1

    def hidden_shape(self, i: int, stage: int) -> tuple[int, int, int]:
        """Shape of the output of ``stage`` for microbatch ``i`` on this rank.

        It is ``[s, b, H]``, and ``[(1 + D) s, b, H]`` from the stage of D further heads on.
        """
        s, b, hidden = self.call.fixed_shape
        if self.microbatches.shapes:
            _, b, s = self.microbatches.shapes[i]
            s //= self.sequence_shards
        return ((1 + self._heads_in(stage)) * s, b, hidden)

    def _heads_in(self, stage: int) -> int:
        """How many further heads the output of ``stage`` has."""
        return heads.depths(self.call.config) if stage >= self.rank.placement.mtp_stage else 0


class LayerHandlers:
    """The base of all handlers: what they use of an iteration."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self.rank = iteration.rank
        self.groups = iteration.rank.groups
        self.call = iteration.call
        self.microbatches = iteration.microbatches
        self.gradients = iteration.gradients
        self.buffers = iteration.buffers
        self.wait = iteration.wait
        self.arrived = iteration.arrived
        self.hand_on = iteration.hand_on

    def sent(self, values: torch.Tensor | None, shape: tuple[int, ...], stage: int) -> Event[torch.Tensor]:
        """float32 ``values`` of the first tensor-parallel rank of pipeline rank ``stage``, on every rank."""
        groups = self.groups
        source = groups.members_of(stage)[0]
        if values is None or groups.member != source:
            values = torch.empty(shape, device=self.rank.device)
        tensor = values

        def run() -> torch.Tensor:
            broadcast(groups, [tensor], [source])
            return tensor

        return self.rank.side_stream.submit(run)
