"""The loss of a whole output layer on another rank than its last stage, as in a V: C0, L and CG.

The last stage's F computes the tokens' losses. C0 sends them to the loss function's rank, L runs it there,
and CG brings the gradient back for the last stage's B.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch

from megatron_vocabpar.pipeline.iteration import Iteration, LayerHandlers
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.runtime.comm import VocabGroups, broadcast
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class DistantLoss(LayerHandlers):
    """Handlers of C0, L and CG."""

    def __init__(self, iteration: Iteration) -> None:
        super().__init__(iteration)
        self._reports = LossReports(iteration)

    def send_losses(self, instruction: Comm) -> None:
        """C0: the tokens' losses ``[b * s]``, float32, from the last stage to the loss function's rank."""
        i, placement = instruction.microbatch, self.rank.placement
        losses: torch.Tensor | None = None
        if self.rank.is_last:
            losses = self.buffers.take(Pass(PassType.F, placement.last_stage, i), "token_losses")
        event = self._broadcast(losses, i, placement.last_rank)
        self._hand_on(instruction, event, taken=self.rank.has_loss)

    def gradient(self, instruction: Pass) -> None:
        """L: the loss function, and in training the gradient that it gives every token."""
        rank, i = instruction.stage, instruction.microbatch
        losses = self.wait(self.buffers.take(Comm(CommType.C0, rank, i), "event"))
        grads = self._reports.report(i, losses.view(self.microbatches.shapes[i]))
        if grads is not None:
            self.buffers.put(instruction, "gradient", grads[0].flatten())

    def send_gradient(self, instruction: Comm) -> None:
        """CG: the gradient of every token's loss, ``[b * s]`` float32, back to the last stage."""
        i, grad = instruction.microbatch, None
        if self.rank.has_loss:
            grad = self.buffers.take(Pass(PassType.L, instruction.stage, i), "gradient")
        event = self._broadcast(grad, i, self.rank.placement.p - 1)
        self._hand_on(instruction, event, taken=self.rank.is_last)

    def of_losses(self, i: int) -> torch.Tensor:
        """The gradient of the token losses of microbatch ``i``: ``[b, s]``, for the last stage's B."""
        event = self.buffers.take(Comm(CommType.CG, self.rank.pipeline_rank, i), "event")
        grad: torch.Tensor = self.wait(event)
        return grad.view(self.microbatches.shapes[i][1:])

    def finish(self) -> None:
        """Have losses checked when everything is queued."""
        self._reports.finish()

    def _broadcast(self, values: torch.Tensor | None, i: int, stage: int) -> Event[torch.Tensor]:
        """What the first tensor-parallel rank of a pipeline rank has of every token."""
        groups = self.groups
        source = groups.members_of(stage)[0]
        if values is None or groups.member != source:
            values = torch.empty(prod(self.microbatches.shapes[i]), device=self.rank.device)
        return self.rank.output_stream.submit(partial(_sent, groups, values, source))

    def _hand_on(self, instruction: Comm, event: Event[torch.Tensor], *, taken: bool) -> None:
        if taken:
            self.buffers.put(instruction, "event", event)
        else:
            self.iteration.unclaim(event)


def _sent(groups: VocabGroups, values: torch.Tensor, source: int) -> torch.Tensor:
    broadcast(groups, groups.output, [values], [source])
    return values
