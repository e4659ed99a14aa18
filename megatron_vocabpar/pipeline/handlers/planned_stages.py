"""Handlers of F, B and pairs that run through Megatron's plans of the layers.

The training script's ``forward_step`` calls the model as usual. During this call the model's ``forward``
builds the plan of its layers and runs it, alone or beside the B of a pair. So Megatron's own ``forward_step``
still handles loss scales, auxiliary losses, and counts of tokens and of microbatches. For a pair 0F5+2B1, F's
handler runs within B's:

    2B1 waits for its gradient
        0F5 waits for its input
        forward_step -> model.forward -> run(plan of 0F5, plan of 2B1)
        0F5 puts its output where SEND_F, or the next stage, takes it
    2B1 puts its input's gradient where SEND_B, or the stage before, takes it

Evaluation runs the model's own ``forward``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.chunk_plan import BackwardRun, ChunkPlan
from megatron_vocabpar.pipeline.handlers.stages import Stages
from megatron_vocabpar.schedule.words.passes import Pair, Pass


@dataclass
class _Planned:
    """The state that F leaves for its B.

    Attributes:
        plan: the plan of the chunk's layers.
        leaf: if this stage computes the loss, the input of the loss function: the plan's output, detached.
            Its gradient is the gradient of that output.
    """

    plan: ChunkPlan
    leaf: torch.Tensor | None = None


class PlannedStages(Stages):
    """Handlers of F, B, W and pairs in training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned: dict[tuple[int, int], _Planned] = {}  # by stage and microbatch
        self._forward: Pass | None = None  # the F of the pair whose B is under way
        self._beside: BackwardRun | None = None  # the B of the pair whose F is under way

    def pair(self, instruction: Pair) -> None:
        """Run F of one microbatch beside B of another."""
        self._forward = instruction.forward
        self.backward(instruction.backward)

    def forward(self, instruction: Pass) -> None:
        """Run F: the chunk builds and runs its plan when the training script calls it."""
        model: Any = unwrap_model(self.call.chunks[self.rank.placement.chunk_of(instruction.stage)])
        with self._plan_instead(model, instruction):
            super().forward(instruction)
        plan = self._planned[instruction.stage, instruction.microbatch].plan
        compat.released(plan.output, self.call.config)

    @contextmanager
    def _plan_instead(self, model: Any, instruction: Pass) -> Iterator[None]:
        """In this context ``model.forward`` builds and runs a plan."""
        stage, i = instruction.stage, instruction.microbatch
        with_loss = stage == self.rank.placement.last_stage and self.output_gradient is None
        computes_loss = with_loss or self.gives_losses_of_heads(stage)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            ended = self.iteration.between.layer_ended
            planned = _Planned(ChunkPlan(model, args, kwargs, bool(self.weight_gradients), ended))
            beside, self._beside = self._beside, None
            output = planned.plan.forward(beside)
            if computes_loss:
                output = planned.leaf = output.detach().requires_grad_()
            self._planned[stage, i] = planned
            return output

        model.forward = forward
        try:
            yield
        finally:
            del model.forward

    def _backward_step(
        self,
        instruction: Pass,
        stage_input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        planned = self._planned.pop((instruction.stage, instruction.microbatch))
        if planned.leaf is not None:
            output_grad = compat.backward_step(planned.leaf, output, output_grad, self.call.config)
        assert output_grad is not None
        grad = output_grad.to(planned.plan.output.dtype)
        forward, self._forward = self._forward, None
        if forward is None:
            planned.plan.backward(grad)
        else:
            self._beside = BackwardRun(planned.plan, grad)
            self.forward(forward)
        return None if stage_input is None else stage_input.grad
