"""The loss: L, CG, and the report of every microbatch where Megatron looks for it.

``Losses`` is behind a partitioned output layer. ``DistantLoss`` is behind a whole layer whose last stage is
on another rank than the loss function, as in a V: that stage's F computes the tokens' losses, C0 sends them
to the loss function's rank, L runs it there, and CG brings the gradient back for the last stage's B.
"""

from __future__ import annotations

from math import prod

import torch

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.extras.distillation import Comparison
from megatron_vocabpar.layers.extras.top import Top
from megatron_vocabpar.layers.token_loss import loss_of
from megatron_vocabpar.pipeline.iteration import Iteration, LayerHandlers
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.slots import ARRIVAL, GRADIENT, RANKED, TOKEN_LOSSES, Joined
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class Losses(LayerHandlers):
    """The handlers of L and CG; interlaced's S calls ``report`` itself."""

    def __init__(self, chain: OutputChain) -> None:
        super().__init__(chain.iteration)
        self.chain = chain
        self._reports = LossReports(chain.iteration, _reports_of(chain), chain.gradients)
        self.look_at = self._reports.hidden

    def gradient(self, instruction: Pass) -> None:
        """L: the loss function, and in training the gradients that it gives every token."""
        rank, i = instruction.stage, instruction.microbatch
        ranks = None
        if PassType.R in self.rank.method.passes:
            joined = self.buffers.take(Pass(PassType.R, rank, i), RANKED)
            counts = self.rank.method.waits_for[PassType.L][0]
            assert isinstance(counts, CommType)
            ranks = self.arrived(Comm(counts, rank, i), ARRIVAL)
        else:
            joined = self.chain.joined(i)
        grads = self.report(i, joined, ranks)
        if grads is not None:
            self.buffers.put(instruction, GRADIENT, grads, uses=1 + self.rank.is_last)

    def report(self, i: int, joined: Joined, ranks: torch.Tensor | None = None) -> torch.Tensor | None:
        """Call the loss function; in training, return the gradients [k, n] that it gives the tokens."""
        microbatches, microbatch, softmax = self.microbatches, self.microbatches[i], joined.softmax
        values = {} if ranks is None else {"rank": ranks}
        for extra in joined.extras:
            values |= extra.deliver(softmax)
        values["token_losses"] = loss_of(softmax, self.chain.terms, joined.extras)
        spread = {
            name: microbatches.from_rows(i, microbatch.spread(value.float()))
            for name, value in values.items()
        }
        if Top.name in softmax.extras:
            self._hand_over(i, *softmax.extras[Top.name])
        grads = self._reports.report(i, spread.pop("token_losses"), spread)
        if grads is None:
            return None
        rows = [microbatch.take(microbatches.rows(i, grad)) for grad in grads]
        return torch.stack(rows) if len(rows) > 1 else rows[0].view(1, -1)

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
        top = TopLogprobs(logprobs.float().view(s, b, -1), ids.long().view(s, b, -1))
        keep_top(i, top)

    def broadcast_gradient(self, instruction: Comm) -> None:
        """CG: the gradient of every token's loss, from the loss function's rank to every rank."""
        i, grads = instruction.microbatch, None
        if self.rank.has_loss:
            grads = self.buffers.take(Pass(PassType.L, instruction.stage, i), GRADIENT)
        self.hand_on(instruction, ARRIVAL, self.shared_gradient(i, grads))

    def shared_gradient(self, i: int, grads: torch.Tensor | None) -> Event[torch.Tensor]:
        """The gradients [k, n], float32, of the first tensor-parallel rank that has the loss function."""
        rows = 1 + len(self.chain.gradients)
        return self.sent(grads, (rows, self.microbatches[i].tokens), self.rank.placement.p - 1)

    def finish(self) -> None:
        """Have losses and gradients checked when everything is queued."""
        self._reports.finish()


def _reports_of(chain: OutputChain) -> dict[str, str]:
    """By the parameters that the loss function may have, what their means are called."""
    reports = {name: mean for extra in chain.metrics for name, mean in extra.reports.items()}
    if PassType.R in chain.method.passes:
        reports["rank"] = "target rank"
    return reports | ({} if chain.terms.distillation is None else dict(Comparison.reports))


class DistantLoss(LayerHandlers):
    """Handlers of C0, L and CG."""

    def __init__(self, iteration: Iteration) -> None:
        super().__init__(iteration)
        self._reports = LossReports(iteration)

    def send_losses(self, instruction: Comm) -> None:
        """C0: the tokens' losses ``[(1 + D) b s]``, float32, from the last stage to the loss's rank."""
        i, placement = instruction.microbatch, self.rank.placement
        losses: torch.Tensor | None = None
        if self.rank.is_last:
            losses = self.buffers.take(Pass(PassType.F, placement.last_stage, i), TOKEN_LOSSES)
        self.hand_on(instruction, ARRIVAL, self.sent(losses, self._tokens(i), placement.last_rank))

    def gradient(self, instruction: Pass) -> None:
        """L: the loss function, and in training the gradient that it gives every token."""
        rank, i = instruction.stage, instruction.microbatch
        losses = self.arrived(Comm(CommType.C0, rank, i), ARRIVAL)
        grads = self._reports.report(i, losses.view(self.microbatches.shapes[i]))
        if grads is not None:
            self.buffers.put(instruction, GRADIENT, grads[0].flatten())

    def send_gradient(self, instruction: Comm) -> None:
        """CG: the gradient of every token's losses, ``[(1 + D) b s]`` float32, back to the last stage."""
        i, grad = instruction.microbatch, None
        if self.rank.has_loss:
            grad = self.buffers.take(Pass(PassType.L, instruction.stage, i), GRADIENT)
        self.hand_on(instruction, ARRIVAL, self.sent(grad, self._tokens(i), self.rank.placement.p - 1))

    def of_losses(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the token losses of microbatch ``i``, for the last stage's B.

        ``[b, s]``, or ``[1 + D, b, s]`` with further heads.
        """
        grad = self.arrived(Comm(CommType.CG, self.rank.pipeline_rank, i), ARRIVAL).to(dtype)
        k, b, s = self.microbatches.shapes[i]
        return grad.view(k, b, s) if k > 1 else grad.view(b, s)

    def finish(self) -> None:
        """Have losses checked when everything is queued."""
        self._reports.finish()

    def _tokens(self, i: int) -> tuple[int]:
        return (prod(self.microbatches.shapes[i]),)
