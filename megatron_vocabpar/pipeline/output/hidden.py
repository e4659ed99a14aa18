"""The last stage's hidden states to every rank (C0), and their gradient back to its B."""

from __future__ import annotations

import torch

from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.slots import ARRIVAL, GRADIENT, HIDDEN, HIDDEN_GRAD, JOINED
from megatron_vocabpar.runtime.comm import broadcast
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
