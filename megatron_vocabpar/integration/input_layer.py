"""The partitioned input layer: IF, CI, CIB and IB."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from megatron_vocabpar.integration.gradients import main_grad
from megatron_vocabpar.integration.iteration import Iteration, LayerHandlers
from megatron_vocabpar.integration.model import VocabParallelGPTModel
from megatron_vocabpar.layers.embedding import assemble, embedding_backward, split_gradient
from megatron_vocabpar.runtime.comm import exchange_rows
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.dependencies import EMBEDDED_INPUTS
from megatron_vocabpar.schedule.passes import Comm, CommType, Pass, PassType


class InputLayer(LayerHandlers):
    """Handlers of IF, CI, CIB and IB for the shard that ``model`` holds."""

    def __init__(self, iteration: Iteration, model: VocabParallelGPTModel) -> None:
        super().__init__(iteration)
        self.model = model
        self._departures: deque[Event[torch.Tensor]] = deque()

    def finish(self) -> None:
        """Wait until this rank's last rows have left."""
        while self._departures:
            self._departures.popleft().wait()

    def input_forward(self, instruction: Pass) -> None:
        """IF: look up the rows that this rank owns, once those of microbatch i - 2 have left."""
        while len(self._departures) >= EMBEDDED_INPUTS:
            self.wait(self._departures.popleft())
        tokens = self.microbatches[instruction.microbatch].owned_tokens
        rows = self.model.word_embeddings(tokens)
        self.buffers.put(instruction, "rows", rows)

    def gather_rows(self, instruction: Comm) -> None:
        """CI: every rank's rows to the first stage, once for each of its tensor-parallel ranks."""
        groups, i = self.groups, instruction.microbatch
        rows = self.buffers.take(Pass(PassType.IF, instruction.stage, i), "rows")
        first = groups.members_of(self.rank.placement.first_rank)
        counts = self.microbatches[i].plan.counts
        send = [len(rows) if member in first else 0 for member in range(len(groups.ranks))]
        receive = counts if self.rank.is_first else [0] * len(counts)
        copies = rows.repeat(len(first), 1) if len(first) > 1 else rows
        event = self._exchange(copies, send, receive)
        if self.rank.is_first:
            self.buffers.put(instruction, "event", event)
        else:
            self._departures.append(event)

    def _exchange(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Event[torch.Tensor]:
        """Rows to and from every member; the event gives what came, ``[sum(receive), H]``."""
        groups = self.groups
        received = rows.new_empty((sum(receive), rows.shape[1]))

        def run() -> torch.Tensor:
            exchange_rows(groups, received, rows, receive, send)
            return received

        return self.rank.input_stream.submit(run)

    def embedded_rows(self, i: int) -> torch.Tensor:
        microbatch = self.microbatches[i]
        rows = self.wait(self.buffers.take(Comm(CommType.CI, self.rank.pipeline_rank, i), "event"))
        embedded = assemble(microbatch.plan, rows).view(*microbatch.shape, -1)
        return embedded.requires_grad_(not self.call.forward_only)

    def scatter_gradient(self, instruction: Comm) -> None:
        """CIB: the gradient of every embedded token from the first stage to the rank that owns its row.

        Tensor-parallel ranks of the first stage hold the same gradient; each serves the owners of its own
        tensor rank.
        """
        groups, i = self.groups, instruction.microbatch
        counts = self.microbatches[i].plan.counts
        members = range(len(counts))
        send = [0] * len(counts)
        hidden = self.call.config.hidden_size
        weight = self.model.word_embeddings.weight
        rows = weight.new_empty((0, hidden))
        if self.rank.is_first:
            grad = self.buffers.take(Pass(PassType.B, 0, i), "input_grad")
            mine = [member % groups.tensor == groups.tensor_rank for member in members]
            send = [count if m else 0 for count, m in zip(counts, mine, strict=True)]
            split = split_gradient(self.microbatches[i].plan, grad.flatten(0, 1)).split(list(counts))
            rows = torch.cat([part for part, m in zip(split, mine, strict=True) if m]).to(weight.dtype)
        source = groups.members_of(self.rank.placement.first_rank)[groups.tensor_rank]
        receive = [counts[groups.member] if member == source else 0 for member in members]
        self.buffers.put(instruction, "event", self._exchange(rows, send, receive))

    def input_backward(self, instruction: Pass) -> None:
        """IB: add the received gradients into this rank's rows of the embedding gradient."""
        i = instruction.microbatch
        rows = self.wait(self.buffers.take(Comm(CommType.CIB, instruction.stage, i), "event"))
        weight_grad = main_grad(self.model.word_embeddings.weight)
        embedding_backward(rows, self.microbatches[i].owned_tokens, self.model.shard.range, weight_grad)
        self.gradients.wrote(PassType.IB)
