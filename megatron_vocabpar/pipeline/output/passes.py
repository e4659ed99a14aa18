"""The passes that compute on a shard: S, S2, T, TW and R of every method.

    naive       S  | S2 | T | TW               vocab-2       S with A | T of the weight
    vocab-1     S  | T | TW                    interlaced    ``in_step.py``
    an evaluation that ranks the targets has R, which counts the ids that are likelier

The input gradient (T, or A) has rows unscaled, as the loss function has not run yet; B scales them. The
mathematics is in ``layers/output/plain.py``.
"""

from __future__ import annotations

import torch

from megatron_vocabpar.layers.extras.rivals import likelier_ids
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.output.naive import naive_maximum, naive_sum
from megatron_vocabpar.layers.output.shard_state import ShardState
from megatron_vocabpar.pipeline.gradients import main_grad
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.output.hidden import HiddenStates
from megatron_vocabpar.pipeline.output.loss import Losses
from megatron_vocabpar.pipeline.slots import (
    ARRIVAL,
    COUNTS,
    LOGITS,
    OFFSETS,
    PART,
    RANKED,
    SENT,
    STATE,
    Sent,
)
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class SoftmaxPasses(LayerHandlers):
    """Handlers of S, S2, T, TW and R."""

    def __init__(self, chain: OutputChain, hidden: HiddenStates, losses: Losses) -> None:
        super().__init__(chain.iteration)
        self.chain, self.hidden, self.losses = chain, hidden, losses

    def softmax(self, instruction: Pass) -> None:
        """S: logits of this rank's shard and their local statistics."""
        state, sent = self.forward_pass(instruction)
        self._leave(instruction, state, sent)

    def forward_pass(self, instruction: Pass) -> tuple[ShardState | None, Sent]:
        """S, as a call of the module: before such a call DDP gathers the parameters."""
        i, chain, model = instruction.microbatch, self.chain, self.chain.model
        x, microbatch, extras = self.hidden.of(instruction), self.microbatches[i], chain.extras(i)
        self.losses.look_at(i, x)
        state, statistics = model.vocab_output(
            x,
            model.output_weight,
            shard_pass=lambda x, weight: chain.forward(x, weight, microbatch, extras),
        )
        assert statistics is not None
        return state, Sent(statistics, extras)

    def _leave(self, producer: Pass, state: ShardState | None, sent: Sent) -> None:
        if uses := self.chain.state_uses:
            assert state is not None
            self.buffers.put(producer, STATE, state, uses=uses)
        self.buffers.put(producer, SENT, sent)

    def maximum(self, instruction: Pass) -> None:
        """S of naive: logits and their local maximum."""
        i, chain, model = instruction.microbatch, self.chain, self.chain.model
        x, microbatch = self.hidden.of(instruction), self.microbatches[i]
        self.losses.look_at(i, x)
        state, offsets = model.vocab_output(
            x,
            model.output_weight,
            shard_pass=lambda x, weight: naive_maximum(
                x,
                weight,
                microbatch.labels,
                model.shard.range,
                chain.options,
                owned=microbatch.owned_targets,
            ),
        )
        assert offsets is not None
        self.buffers.put(instruction, LOGITS, state)
        self.buffers.put(instruction, OFFSETS, offsets)

    def exponential_sum(self, instruction: Pass) -> None:
        """S2 of naive: exponentials relative to the global maximum, and their local sum."""
        i, rank = instruction.microbatch, instruction.stage
        offsets = self.arrived(Comm(CommType.C1, rank, i), ARRIVAL)
        state = self.buffers.take(Pass(PassType.S, rank, i), LOGITS)
        spare = self.chain.spare.take(self.microbatches[i].tokens)
        done, statistics = naive_sum(state, offsets, e=spare)
        self._leave(instruction, done, Sent(statistics, ()))

    def input_backward(self, instruction: Pass) -> None:
        """T of vocab-1 and naive: this rank's part of the input gradient, whose rows are not scaled yet."""
        softmax, state = self._softmax_and_state(instruction.microbatch)
        self.buffers.put(instruction, PART, self.chain.unscaled_input_gradient(state, softmax))

    def weight_backward(self, instruction: Pass) -> None:
        """T of vocab-2, and TW: the weight gradient."""
        i = instruction.microbatch
        softmax, state = self._softmax_and_state(i)
        grads = self.arrived(Comm(CommType.CG, instruction.stage, i), ARRIVAL)
        self.add_weight_gradient(i, state, softmax, grads)
        self.chain.spare.keep(state)
        self.gradients.wrote(instruction.type)

    def add_weight_gradient(self, i: int, state: ShardState, softmax: Softmax, grads: torch.Tensor) -> None:
        """Add what gradients [k, n] give: of the losses, and of extras on which the loss may depend.

        Rows of detached heads add nothing: their loss trains their own layers alone. Nor does a frozen weight
        get anything.
        """
        weight = self.chain.model.output_weight
        if not weight.requires_grad:
            return
        if self.chain.detached:
            grads = grads * self.microbatches.of_main_head(i)
        state.add_weight_gradient(softmax, self.chain.slopes(softmax, grads), main_grad(weight))

    def count_likelier(self, instruction: Pass) -> None:
        """R: how many ids of this shard are likelier than each target."""
        i, chain = instruction.microbatch, self.chain
        joined, state = chain.joined(i), self.buffers.take(chain.softmax_pass(i), STATE)
        self.buffers.put(instruction, COUNTS, likelier_ids(state.stored, joined.softmax))
        if self.rank.has_loss:
            self.buffers.put(instruction, RANKED, joined)
        chain.spare.keep(state)

    def _softmax_and_state(self, i: int) -> tuple[Softmax, ShardState]:
        """The softmax of all shards, and what the pass that computed this shard's part has kept of it."""
        softmax = self.chain.joined(i).softmax
        return softmax, self.buffers.take(self.chain.softmax_pass(i), STATE)
