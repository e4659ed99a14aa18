"""The passes that compute on a shard: S, S2, T and TW of every method.

    naive       S  | S2 | T | TW               vocab-2     S with A | T of the weight
    vocab-1     S  | T | TW                    interlaced  ``in_step.py``

The input gradient (T, or A) has rows unscaled, as the loss function has not run yet; B scales them. The T of
an evaluation counts ids (``loss.py``). The mathematics is in ``layers/output.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_vocabpar.layers.distillation import check_teacher, comparison
from megatron_vocabpar.layers.head import NaiveHead
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.pipeline.gradients import main_grad
from megatron_vocabpar.pipeline.handlers.chain import OutputChain
from megatron_vocabpar.pipeline.handlers.hidden import HiddenStates
from megatron_vocabpar.pipeline.handlers.loss import Losses
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class SoftmaxPasses(LayerHandlers):
    """Handlers of S, S2, T and TW."""

    def __init__(self, chain: OutputChain, hidden: HiddenStates, losses: Losses) -> None:
        super().__init__(chain.iteration)
        self.chain, self.hidden, self.losses = chain, hidden, losses

    def softmax(self, instruction: Pass) -> None:
        """S: logits of this rank's shard and their local statistics."""
        self._put(instruction, *self.forward_pass(instruction))

    def forward_pass(self, instruction: Pass) -> tuple[Any, torch.Tensor]:
        """S, as a call of the module: before such a call DDP gathers the parameters."""
        i, head, model = instruction.microbatch, self.chain.head, self.chain.model
        x, microbatch = self.hidden.of(instruction), self.microbatches[i]
        self.losses.look_at(i, x)
        spare = self.chain.spare.take(microbatch.tokens)
        run = partial(head.forward, targets=microbatch.labels, owned=microbatch.owned_targets, e=spare)
        state, statistics = model.vocab_output(x, model.output_weight, shard_pass=run)
        return self._beside_teacher(i, state), statistics

    def _beside_teacher(self, i: int, state: Any) -> Any:
        """The state that S has left of a microbatch, with its teacher in a distillation.

        Raises:
            ValueError: if the teacher's tensors have another shape.
        """
        how, teacher = self.chain.terms.distillation, self.call.teacher
        if how is None:
            return state
        assert teacher is not None
        given, microbatch = teacher(i), self.microbatches[i]
        _, b, s = microbatch.shape
        shard = self.chain.model.shard.range
        check_teacher(given, (s, b), shard)
        return replace(state, teacher=comparison(how, given, microbatch.counted, shard.vocab_size))

    def _put(self, producer: Pass, state: Any, statistics: torch.Tensor) -> None:
        if uses := self.chain.uses(producer):
            self.buffers.put(producer, "state", state, uses=uses)
        self.buffers.put(producer, "statistics", statistics)

    def exponential_sum(self, instruction: Pass) -> None:
        """S2 of naive: exponentials relative to the global maximum, and their local sum."""
        i, head = instruction.microbatch, self.chain.head
        assert isinstance(head, NaiveHead)
        offsets = self.wait(self.buffers.take(Comm(CommType.C1, instruction.stage, i), "event"))
        state = self.buffers.take(Pass(PassType.S, instruction.stage, i), "state")
        self._put(instruction, *head.exponential_sum(state, offsets))

    def input_backward(self, instruction: Pass) -> None:
        """T of vocab-1 and naive: this rank's part of the input gradient, whose rows are not scaled yet."""
        i = instruction.microbatch
        softmax, state = self.chain.softmax_and_state(i)
        part = self.chain.input_gradient(state, softmax, self.chain.row_slopes(softmax))
        self.buffers.put(instruction, "hidden_grad", part)

    def weight_backward(self, instruction: Pass) -> None:
        """T of vocab-2, and TW: the weight gradient."""
        i = instruction.microbatch
        softmax, state = self.chain.softmax_and_state(i)
        grads = self.wait(self.buffers.take(Comm(CommType.CG, instruction.stage, i), "event"))
        self.add_weight_gradient(i, state, softmax, grads)
        self.chain.spare.keep(state)
        self.gradients.wrote(instruction.type)

    def add_weight_gradient(self, i: int, state: Any, softmax: Softmax, grads: torch.Tensor) -> None:
        """Add what gradients [k, n] give: of the losses, and if k is 2, of the entropies.

        Rows of detached heads add nothing: their loss trains their own layers alone. Nor does a frozen weight
        get anything.
        """
        weight = self.chain.model.output_weight
        if not weight.requires_grad:
            return
        if self.chain.detached:
            grads = grads * self.microbatches.of_main_head(i)
        slopes = self.chain.slopes(softmax, grads)
        self.chain.head.add_weight_gradient(state, softmax, slopes, main_grad(weight))
