"""The loss of a whole output layer on another rank than its last stage, as in a V: C0, L and CG.

The last stage's F computes the tokens' losses. C0 sends them to the loss function's rank, L runs it there,
and CG brings the gradient back for the last stage's B.
"""

from __future__ import annotations

from math import prod

import torch

from megatron_vocabpar.pipeline.iteration import Iteration, LayerHandlers
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.pipeline.slots import ARRIVAL, GRADIENT, TOKEN_LOSSES
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


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
