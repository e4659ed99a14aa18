"""The partitioned input layer: IF, CI, CIB and IB."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import torch

from megatron_vocabpar.layers.embedding import assemble, embedding_backward, split_gradient
from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.gradients import Writer, main_grad
from megatron_vocabpar.pipeline.iteration import Iteration, LayerHandlers
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.pipeline.slots import ARRIVAL, ROWS, ROWS_GRAD
from megatron_vocabpar.runtime.comm import exchange_rows
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.dependencies import EMBEDDED_INPUTS
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class InputLayer(LayerHandlers):
    """Handlers of IF, CI, CIB and IB for the shard that ``model`` holds."""

    def __init__(self, iteration: Iteration, model: PartitionedModel) -> None:
        super().__init__(iteration)
        self._embedding = model.word_embeddings
        self._weight = self._embedding.weight
        self._departures: deque[Event[torch.Tensor]] = deque()

    def finish(self) -> None:
        """Wait until this rank's last rows have left."""
        while self._departures:
            self._departures.popleft().wait()

    def input_forward(self, instruction: Pass) -> None:
        """IF: look up the rows that this rank owns, after those of microbatch i - 2 have left."""
        while len(self._departures) >= EMBEDDED_INPUTS:
            self.wait(self._departures.popleft())
        rows = self._embedding(self.microbatches[instruction.microbatch].owned_rows)
        self.buffers.put(instruction, ROWS, rows)

    def gather_rows(self, instruction: Comm) -> None:
        """CI: every rank's rows to every tensor-parallel rank of the stages that embed."""
        groups, microbatch = self.groups, self.microbatches[instruction.microbatch]
        rows = self.buffers.take(Pass(PassType.IF, instruction.stage, instruction.microbatch), ROWS)
        send, receive = [0] * len(groups.ranks), [0] * len(groups.ranks)
        copies: list[torch.Tensor] = []
        owned = [tokens.plan.counts[groups.member] for tokens in microbatch.embedded]
        parts = rows.split(owned) if len(owned) > 1 else (rows,)
        for tokens, part in zip(microbatch.embedded, parts, strict=True):
            for member in groups.members_of(tokens.rank):
                send[member] = len(part)
                copies.append(part)
            if tokens.rank == self.rank.pipeline_rank:
                receive = list(tokens.plan.counts)
        event = self._exchange(torch.cat(copies) if len(copies) > 1 else rows, send, receive)
        if uses := len(self._embedding_stages):
            self.buffers.put(instruction, ARRIVAL, event, uses=uses)
        else:
            self._departures.append(event)

    def _exchange(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Event[torch.Tensor]:
        """Send rows to every member and receive theirs, ``[sum(receive), H]``."""
        groups = self.groups
        received = rows.new_empty((sum(receive), rows.shape[1]))

        def run() -> torch.Tensor:
            exchange_rows(groups, received, rows, receive, send)
            return received

        return self.rank.side_stream.submit(run)

    @cached_property
    def _embedding_stages(self) -> list[int]:
        """This rank's stages that embed tokens: the first, and that of multi-token prediction."""
        placement, rank = self.rank.placement, self.rank.pipeline_rank
        embed = [0] + [placement.mtp_stage] * bool(heads.depths(self.call.config))
        return [stage for stage in dict.fromkeys(embed) if placement.rank_of(stage) == rank]

    def embedded_rows(self, stage: int, i: int) -> torch.Tensor | None:
        """The rows ``[k, b, s, H]`` of the tokens that ``stage`` embeds; None where it embeds none."""
        if stage not in self._embedding_stages:
            return None
        received = self.arrived(Comm(CommType.CI, self.rank.pipeline_rank, i), ARRIVAL)
        (tokens,) = (t for t in self.microbatches[i].embedded if t.rank == self.rank.pipeline_rank)
        rows = assemble(tokens.plan, received).view(*tokens.shape, -1)
        if len(self._embedding_stages) > 1:
            rows = rows[:1] if stage == 0 else rows[1:]
        return rows.detach().requires_grad_(not self.call.forward_only)

    def scatter_gradient(self, instruction: Comm) -> None:
        """CIB: the gradient of every embedded token, from its stage to the rank that owns its row.

        The tensor-parallel ranks of a stage hold the same gradient, so each serves the owners with its own
        tensor rank. Example: p = 2, t = 2, so members 0 and 1 are the first stage. Member 0 sends to the
        owners 0 and 2, member 1 to 1 and 3; owner 3 receives from member 1 alone.
        """
        groups, i = self.groups, instruction.microbatch
        receive, send = [0] * len(groups.ranks), [0] * len(groups.ranks)
        rows = self._weight.new_empty((0, self._weight.shape[1]))
        for tokens in self.microbatches[i].embedded:
            counts = tokens.plan.counts
            receive[groups.members_of(tokens.rank)[groups.tensor_rank]] = counts[groups.member]
            if tokens.rank != self.rank.pipeline_rank:
                continue
            grads = [self.buffers.take(Pass(PassType.B, s, i), ROWS_GRAD) for s in self._embedding_stages]
            grad = (torch.cat(grads) if len(grads) > 1 else grads[0]).flatten(0, 2)
            rows, mine = split_gradient(tokens.plan, grad), slice(groups.tensor_rank, None, groups.tensor)
            send[mine] = counts[mine]
            if groups.tensor > 1:
                rows = torch.cat(rows.split(counts)[mine])
            rows = rows.to(self._weight.dtype)
        self.buffers.put(instruction, ARRIVAL, self._exchange(rows, send, receive))

    def input_backward(self, instruction: Pass) -> None:
        """IB: add the received gradients into this rank's rows of the embedding gradient, unless frozen."""
        i = instruction.microbatch
        rows = self.arrived(Comm(CommType.CIB, instruction.stage, i), ARRIVAL)
        if self._weight.requires_grad:
            microbatch = self.microbatches[i]
            embedding_backward(rows, microbatch.owned_rows, main_grad(self._weight), order=microbatch.by_row)
        self.gradients.wrote(Writer(PassType.IB))
