"""The loss: L, CG, and each microbatch's report where Megatron looks for it."""

from __future__ import annotations

import torch

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.columns import likelier_ids
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.token_loss import loss_of
from megatron_vocabpar.pipeline.handlers.chain import OutputChain
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class Losses(LayerHandlers):
    """The handlers of L, CG and an evaluation's T; interlaced's S calls ``report`` itself."""

    def __init__(self, chain: OutputChain) -> None:
        super().__init__(chain.iteration)
        self.chain = chain
        self._reports = LossReports(chain.iteration)
        self.look_at = self._reports.hidden

    def gradient(self, instruction: Pass) -> None:
        """L: the loss function, and in training the gradient that it gives every token, and its entropy."""
        rank, i = instruction.stage, instruction.microbatch
        ranks = None
        if self.chain.ranks_targets:
            softmax = self.buffers.take(Pass(PassType.T, rank, i), "softmax")
            ranks = self.wait(self.buffers.take(Comm(CommType.C2, rank, i), "event"))
        else:
            softmax = self.chain.softmax(i)
        grads = self.report(i, softmax, ranks)
        if grads is not None:
            self.buffers.put(instruction, "gradient", grads, uses=1 + self.rank.is_last)

    def count_likelier(self, instruction: Pass) -> None:
        """T of an evaluation: how many ids of this shard are likelier than each target."""
        i, chain = instruction.microbatch, self.chain
        softmax, state = chain.softmax_and_state(i)
        self.buffers.put(instruction, "counts", likelier_ids(state, softmax))
        if self.rank.has_loss:
            self.buffers.put(instruction, "softmax", softmax)
        chain.spare.keep(state)

    def report(self, i: int, softmax: Softmax, ranks: torch.Tensor | None = None) -> torch.Tensor | None:
        """Call the loss function; in training, return the gradient [k, n] that it gives the tokens."""
        microbatches, microbatch = self.microbatches, self.microbatches[i]
        entropy, divergence = softmax.entropy, softmax.summary.divergence
        values = {
            "token_losses": loss_of(softmax, self.chain.terms),
            "entropy": None if entropy is None else torch.where(softmax.valid, entropy, 0),
            "wins": softmax.target_wins,
            "rank": ranks,
            "divergence": None if divergence is None else torch.where(softmax.valid, divergence, 0),
            "cross_entropy": None if divergence is None else softmax.nll,
        }
        spread = {
            name: microbatches.from_rows(i, microbatch.spread(value.float()))
            for name, value in values.items()
            if value is not None
        }
        if softmax.top is not None:
            self._hand_over(i, *softmax.top)
        grads = self._reports.report(i, **spread)
        if grads is None:
            return None
        return torch.stack([microbatch.take(microbatches.rows(i, grad)) for grad in grads])

    def _hand_over(self, i: int, logprobs: torch.Tensor, ids: torch.Tensor) -> None:
        """Give the call a microbatch's most likely ids: [n, k] in the order of its tokens [s, b].

        Raises:
            ValueError: if tokens have no target, and so are not in the output layer.
        """
        microbatch, keep_top = self.microbatches[i], self.call.keep_top
        assert keep_top is not None
        if microbatch.counted is not None:
            raise ValueError(
                f"microbatch {i}: top_logprobs are those of all tokens, but tokens whose label is no id are "
                "left out of the output layer; give them any id, and mask their losses"
            )
        _, b, s = microbatch.shape
        found = TopLogprobs(logprobs.float().view(s, b, -1), ids.long().view(s, b, -1))
        keep_top(i, found)

    def broadcast_gradient(self, instruction: Comm) -> None:
        """CG: the gradient of every token's loss, from the loss function's rank to every rank."""
        i, grads = instruction.microbatch, None
        if self.rank.has_loss:
            grads = self.buffers.take(Pass(PassType.L, instruction.stage, i), "gradient")
        self.hand_on(instruction, self.shared_gradient(i, grads))

    def shared_gradient(self, i: int, grads: torch.Tensor | None) -> Event[torch.Tensor]:
        """The gradients [k, n], float32, of the first tensor-parallel rank that has the loss function."""
        rows = 1 + self.chain.entropy_gradient
        return self.sent(grads, (rows, self.microbatches[i].tokens), self.rank.placement.p - 1)

    def finish(self) -> None:
        """Have losses and gradients checked when everything is queued."""
        self._reports.finish()
