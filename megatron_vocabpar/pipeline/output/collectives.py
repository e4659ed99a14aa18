"""The output layer's collectives, each on the side stream: C0, C1, C2 and C3.

    naive       C0(hidden states)  C1(maximum)      C2(statistics)        C3(input gradient)
    vocab-1     C0(hidden states)  C1(statistics)   C2(input gradient)
    vocab-2     C0(hidden states)  C1(statistics, input gradient)

A collective carries the result of the pass before it. An evaluation has those up to the statistics, and to
rank its targets one more that sums counts. The input gradient is reduced before the loss function has run,
its rows unscaled; CG (``loss.py``) brings the gradient that scales them, and dW. Only the last stage's ranks
get it, for their B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron_vocabpar.layers.extras.extra import Exchange, after_join, join, place_of
from megatron_vocabpar.layers.output.shard_state import Part, ShardState, total, with_place
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.slots import (
    ARRIVAL,
    COUNTS,
    GRADIENT,
    HIDDEN,
    HIDDEN_GRAD,
    JOINED,
    OFFSETS,
    PART,
    SENT,
    STATE,
    Joined,
    Sent,
)
from megatron_vocabpar.runtime.comm import all_gather, all_reduce, broadcast, reduce_rows
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class HiddenStates(LayerHandlers):
    """The handler of C0; S takes the hidden states from here, B their gradient."""

    def __init__(self, chain: OutputChain) -> None:
        super().__init__(chain.iteration)
        self.chain = chain
        parts = self.iteration.sequence_shards
        self._part = self.groups.tensor_rank % parts  # this rank's part of the sequence
        self._members = list(self.groups.members_of(self.rank.placement.last_rank))[:parts]
        self._dtype = chain.model.word_embeddings.weight.dtype

    def broadcast(self, instruction: Comm) -> None:
        """C0: the last stage's hidden states to every rank, the ``[n, H]`` of the tokens that count.

        With sequence parallelism each tensor-parallel rank of the last stage sends its part of the sequence.
        Example: t = 2, six rows, of which 0, 1 and 4 count. Rank 0 sends rows 0 and 1, rank 1 sends row 4,
        and every rank receives pieces of 2 rows and 1 row of one tensor.
        """
        microbatch, members = self.microbatches[instruction.microbatch], self._members
        source: torch.Tensor | None = None
        if self.rank.is_last:
            last_forward = Pass(PassType.F, self.rank.placement.last_stage, instruction.microbatch)
            hidden = self.buffers.take(last_forward, HIDDEN)
            source = hidden if self.groups.member in members else None

        counted = microbatch.counted_in(self._part)
        if source is not None and len(members) == 1 and counted is None:
            rows, source = source, None  # it sends them as they are, and copies none
        else:
            shape = microbatch.tokens, self.call.config.hidden_size
            rows = torch.empty(shape, dtype=self._dtype, device=self.rank.device)

        def run() -> torch.Tensor:
            pieces = rows.split(microbatch.counts) if len(members) > 1 else [rows]
            if source is not None and counted is not None:
                torch.index_select(source, 0, counted, out=pieces[self._part])
            elif source is not None:
                pieces[self._part].copy_(source)
            broadcast(self.groups, pieces, members)
            return rows

        self.buffers.put(instruction, ARRIVAL, self.rank.side_stream.submit(run))

    def of(self, instruction: Pass) -> torch.Tensor:
        """The hidden states ``[n, H]`` that C0 brought for a pass."""
        source = Comm(CommType.C0, instruction.stage, instruction.microbatch)
        return self.arrived(source, ARRIVAL)

    def gradient(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the last stage's output ``[(1 + D) s, b, H]``, for its B.

        The rows of this rank's part of the sequence, made for gradients of 1, are scaled by the true ones.
        """
        rows, scales = self._unscaled(i)
        counts, part = self.microbatches[i].counts, self._part
        if len(counts) > 1:
            rows, scales = rows.split(counts, -2)[part], scales.split(counts, -1)[part]
        scales = scales.reshape(*rows.shape[:-1], 1)
        if rows.dim() == 3:
            rows = rows.mul_(scales).sum(0).to(dtype)
        else:  # and rounded in the same pass
            place = rows if dtype == rows.dtype else rows.new_empty(rows.shape, dtype=dtype)
            rows = torch.mul(rows, scales, out=place)
        rows = self.microbatches[i].spread(rows, part)
        return rows.view(self.iteration.hidden_shape(i, self.rank.placement.last_stage))

    def _unscaled(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient [n, H], or [k, n, H], for gradients of 1, and the true gradients [k, n].

        They are those of every token's loss, and of extras on which the loss may depend.
        """
        rank = self.rank.pipeline_rank
        source = self.rank.method.waits_for[PassType.B][0]
        if isinstance(source, PassType):
            return self.buffers.take(Pass(source, rank, i), HIDDEN_GRAD)
        if self.chain.early:
            grad = self.arrived(Comm(source, rank, i), JOINED).hidden_grad
            assert grad is not None
        else:
            grad = self.arrived(Comm(source, rank, i), ARRIVAL)
        if self.rank.has_loss:
            return grad, self.buffers.take(Pass(PassType.L, rank, i), GRADIENT)
        return grad, self.arrived(Comm(CommType.CG, rank, i), ARRIVAL)


class OutputCollectives(LayerHandlers):
    """Handlers of the collectives."""

    def __init__(self, chain: OutputChain) -> None:
        super().__init__(chain.iteration)
        self.chain = chain
        self._exchange = Exchange(partial(all_gather, self.groups), partial(all_reduce, self.groups))

    def reduce_maximum(self, instruction: Comm) -> None:
        """naive's C1: the maximal offset of every token."""
        groups = self.groups
        offsets = self.buffers.take(_of(PassType.S, instruction), OFFSETS)
        event = self.rank.side_stream.submit(lambda: all_reduce(groups, offsets, dist.ReduceOp.MAX))
        self.hand_on(instruction, ARRIVAL, event)

    def gather_statistics(self, instruction: Comm) -> None:
        """C1, in naive C2: all ranks' statistics, joined in rank order; in vocab-2 dX of what S has left."""
        chain, i = self.chain, instruction.microbatch
        source = chain.softmax_pass(i)
        state = self.buffers.take(source, STATE) if chain.early or chain.looks_back else None
        self.hand_on(instruction, JOINED, self.joined(i, self.buffers.take(source, SENT), state))

    def joined(self, i: int, sent: Sent, state: ShardState | None) -> Event[Joined]:
        """The softmax of all shards, with dX if S has made it early, in memory of the main stream.

        Args:
            i: the microbatch.
            sent: this shard's statistics.
            state: this shard's; only for dX, and for extras that look back.
        """
        chain, extras = self.chain, sent.extras
        place, hidden_grad = place_of(sent.statistics, extras), None
        if chain.early and self.rank.is_last:
            assert state is not None
            parts = (1 + len(chain.gradients),) if chain.gradients else ()
            hidden_grad = state.x.new_empty((*parts, *state.x.shape), dtype=place.total.dtype)
        exchange, to_last = self._exchange, self._to_last(i)

        def run() -> Joined:
            softmax = join(exchange.gather(sent.statistics), extras, place)
            if state is not None and chain.looks_back:
                after_join(state.stored, softmax, extras, exchange)
            if state is not None and chain.early:
                total(chain.unscaled_input_gradient(state, softmax, hidden_grad), to_last)
            return Joined(softmax, extras, hidden_grad)

        return self.rank.side_stream.submit(run)

    def reduce_input_gradient(self, instruction: Comm) -> None:
        """C2 of vocab-1, C3 of naive: the sum of all ranks' parts of the input gradient, in float32."""
        part = self.buffers.take(_of(PassType.T, instruction), PART)
        self.hand_on(instruction, ARRIVAL, self.sum(instruction.microbatch, part))

    def sum(self, i: int, part: Part) -> Event[torch.Tensor]:
        """The sum of all ranks' parts of the input gradient, for the last stage's B; elsewhere anything."""
        return self.rank.side_stream.submit(partial(total, with_place(part), self._to_last(i)))

    def sum_counts(self, instruction: Comm) -> None:
        """C2 of an evaluation: every target's rank, from the counts of all shards."""
        counts = self.buffers.take(_of(PassType.R, instruction), COUNTS)
        event = self.rank.side_stream.submit(partial(self._exchange.total, counts))
        self.hand_on(instruction, ARRIVAL, event)

    def _to_last(self, i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """What sums rows over all ranks for the last stage's B."""
        counts = self.microbatches[i].counts if self.iteration.sequence_shards > 1 else None
        return partial(reduce_rows, self.groups, stage=self.rank.placement.last_rank, counts=counts)


def _of(type_: PassType, instruction: Comm) -> Pass:
    """The pass whose result this rank sends in a collective."""
    return Pass(type_, instruction.stage, instruction.microbatch)
