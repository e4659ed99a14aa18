"""One forward-backward call on one rank: what the handlers of all layers share.

``Rank`` stays the same from one iteration to the next, ``Call`` holds the arguments of this one, and an
``Iteration`` is where handlers leave tensors for each other, keyed by the instruction that produced them.

Next: ``stages.py``, ``input_layer.py`` and ``output_layer.py``, whose methods are the handlers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_vocabpar.integration.gradients import GradientSync
from megatron_vocabpar.integration.microbatches import ForwardStep, Microbatches, ModelCall, no_microbatches
from megatron_vocabpar.layers.recipes import Fp8Recipe
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.runtime.buffers import Buffers
from megatron_vocabpar.runtime.comm import PointToPoint, Receive, VocabGroups
from megatron_vocabpar.runtime.streams import Event, Stream
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.placement import Placement


@dataclass(frozen=True)
class OutputOptions:
    """How the output layer is computed.

    All but ``terms``, ``fp8`` and ``drop_masked`` change its result by rounding alone.

    Attributes:
        recompute: keep no exponentials ``[n, P]`` from S to T; T computes them again.
        rows_per_chunk: tokens whose float32 logits exist at one time; None bounds them to about 32 MiB.
        invariant: the same bits for every sharding (``layers/invariant.py``), at a cost. Shards must end at
            multiples of ``fixed_point.BLOCK`` ids; naive is not offered.
        terms: what the loss of a token consists of, in training and in evaluation.
        fp8: products of 8-bit operands by this recipe (``layers/fp8.py``), at a loss of accuracy; naive is
            not offered. None: of the operands as they are.
        entropy: give the loss function every token's entropy too, ``entropy=[b, s]`` float32 in nats, from
            the kept exponentials (``layers/entropy.py``); ``loss_reports.py`` says what if it takes none.
        entropy_gradient: the loss may depend on them; one more product, twice the input gradient to reduce.
        accuracy: likewise ``correct=[b, s]``, 1 where no id is likelier than the target (``rivals.py``).
        target_rank: in forward-only calls likewise ``rank=[b, s]``, how many ids are likelier. The loss
            function is called at their end then, and three microbatches' exponentials are kept.
        drop_masked: in training, leave out the tokens whose losses the loss function masks, by the gradient
            that is sent ahead: it gets 0 for them, as for labels that are no ids.

    Raises:
        ValueError: for ``invariant`` with another option, which it has no use for, or label smoothing; for
            ``entropy``, ``accuracy`` and ``target_rank`` where no plain exponentials are kept; for the
            entropy's gradient without it.
    """

    recompute: bool = False
    rows_per_chunk: int | None = None
    invariant: bool = False
    terms: LossTerms = PLAIN
    fp8: Fp8Recipe | None = None
    entropy: bool = False
    entropy_gradient: bool = False
    accuracy: bool = False
    target_rank: bool = False
    drop_masked: bool = False

    def __post_init__(self) -> None:
        if self.invariant and self.fp8:
            raise ValueError(
                "no 8-bit products give results that don't depend on the sharding; leave one out"
            )
        if self.entropy_gradient and not self.entropy:
            raise ValueError("entropy_gradient without entropy: ask for both")
        if self.needs_exponentials and not self.keeps_exponentials:
            raise ValueError(
                "entropy, accuracy and target rank come from kept exponentials; leave them out, or "
                "recomputed logits, a softcap, 8-bit products, and results that don't depend on the sharding"
            )
        if self.invariant and (self.recompute or self.rows_per_chunk is not None):
            raise ValueError(
                "results that don't depend on the sharding, with recomputed or chunked logits: they are "
                "computed in blocks of their own; use one of the two"
            )
        if self.invariant and self.terms.label_smoothing:
            raise ValueError(
                f"label smoothing {self.terms.label_smoothing} depends on the sharding; leave it out, or the "
                "invariance"
            )

    @property
    def needs_exponentials(self) -> bool:
        """Whether more is wanted of every token than its loss."""
        return self.entropy or self.accuracy or self.target_rank

    @property
    def keeps_exponentials(self) -> bool:
        """Whether S leaves the plain exponentials of all logits, which entropies and the like are made of."""
        return not (self.recompute or self.invariant or self.fp8 or self.terms.softcap is not None)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What stays the same on this rank from one iteration to the next."""

    method: Method
    placement: Placement
    groups: VocabGroups
    device: torch.device
    output_stream: Stream
    input_stream: Stream
    point_to_point: PointToPoint
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    output_options: OutputOptions = OutputOptions()
    not_finite: Callable[[str], None] | None = None

    @property
    def pipeline_rank(self) -> int:
        return self.groups.stage

    @property
    def is_first(self) -> bool:
        return self.pipeline_rank == self.placement.first_rank

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.placement.last_rank

    @property
    def has_loss(self) -> bool:
        """Whether labels and loss function are here."""
        return self.pipeline_rank == self.placement.p - 1


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one forward-backward call that handlers need.

    ``fixed_shape`` is ``[s, b, H]`` between stages on this rank, where all microbatches have one length.
    """

    forward_step_func: ForwardStep
    data_iterators: Sequence[Iterator[Any] | None]
    chunks: Sequence[torch.nn.Module]
    config: Any
    num_microbatches: int
    fixed_shape: tuple[int, int, int]
    cp_group_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_microbatch_flag: bool


@dataclass
class Iteration:
    """The state of one forward-backward call on one rank.

    Attributes:
        microbatches: what every rank knows of each microbatch, by number; none where Megatron's own way does,
            for baseline and redis with the loss in the last stage.
        recorded: by stage and microbatch, the calls that ``forward_step`` makes on this rank, on the first
            stage and on that of the loss (``Placement.loss_stage``).
        buffers: tensors and events between instructions.
        reported: what the loss function reported, in order (Megatron's forward_data_store).
        num_tokens: tokens of the loss, where the loss is computed.
        checks: to be called when everything is queued, for they wait for the device; each may raise.
    """

    rank: Rank
    call: Call
    gradients: GradientSync
    microbatches: Microbatches = field(default_factory=no_microbatches)
    recorded: Mapping[int, Sequence[ModelCall]] = field(default_factory=dict)
    buffers: Buffers = field(default_factory=Buffers)
    reported: list[Any] = field(default_factory=list)
    num_tokens: torch.Tensor | int = 0
    checks: list[Callable[[], None]] = field(default_factory=list)
    _unclaimed: deque[Event[Any]] = field(default_factory=deque)

    def wait(self, event: Event[Any] | Receive) -> Any:
        """Wait for communication, seen as waiting in the timeline."""
        with self.rank.waiting():
            return event.wait()

    def unclaim(self, event: Event[Any]) -> None:
        """Hold an event that nobody consumes until it is done, so that its errors are raised here."""
        while self._unclaimed and self._unclaimed[0].done():
            self._unclaimed.popleft().wait()
        self._unclaimed.append(event)

    def finish(self) -> None:
        """Wait for what nobody claimed, and check that nothing is left.

        Raises:
            BufferError: naming the buffers that are left.
        """
        self.rank.point_to_point.drain()
        while self._unclaimed:
            self._unclaimed.popleft().wait()
        self.buffers.check_empty()

    @property
    def sequence_shards(self) -> int:
        """Parts into which sequence parallelism cuts the hidden states between layers."""
        return self.rank.groups.tensor if self.call.config.sequence_parallel else 1

    def hidden_shape(self, i: int) -> tuple[int, int, int]:
        """Shape ``[s, b, H]`` of microbatch ``i`` between stages, on this rank."""
        if not self.microbatches.shapes:
            return self.call.fixed_shape
        _, b, s = self.microbatches.shapes[i]
        return (s // self.sequence_shards, b, self.call.config.hidden_size)


class LayerHandlers:
    """What the handlers of every layer use of an iteration."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self.rank = iteration.rank
        self.groups = iteration.rank.groups
        self.call = iteration.call
        self.microbatches = iteration.microbatches
        self.gradients = iteration.gradients
        self.buffers = iteration.buffers
        self.wait = iteration.wait
