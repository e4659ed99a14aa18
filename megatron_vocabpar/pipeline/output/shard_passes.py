"""The passes that compute on a shard: S, S2, T, TW and R of every method.

    vocab-1     S  | T | TW                    naive         S | S2 | T | TW: ``NaivePasses``
    vocab-2     S with A | T of the weight     interlaced    S with all others in it: ``InStep``
    an evaluation that ranks the targets has R, which counts the ids that are likelier

The input gradient (T, or A) has rows unscaled, as the loss function has not run yet; B scales them. The
mathematics is in ``layers/output/plain.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_vocabpar.layers.extras.target_rank import ids_above_target
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.output.naive import naive_maximum, naive_sum
from megatron_vocabpar.layers.output.shard_state import ShardState
from megatron_vocabpar.pipeline.gradients import Writer, main_grad
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.model.vocab_layers import ShardPass
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.output.collectives import HiddenStates, OutputCollectives
from megatron_vocabpar.pipeline.output.loss import Losses
from megatron_vocabpar.pipeline.slots import (
    ARRIVAL,
    COUNTS,
    HIDDEN_GRAD,
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
    """Handlers of S, T, TW and R."""

    def __init__(self, chain: OutputChain, hidden: HiddenStates, losses: Losses) -> None:
        super().__init__(chain.iteration)
        self.chain, self.hidden, self.losses = chain, hidden, losses
        self._layer = chain.model.vocab_output

    def table(self) -> dict[PassType, Callable[[Any], None]]:
        """The handlers. Each pass does what its name says; T of vocab-2 adds dW alone, as S has made dX."""
        return {
            PassType.S: self.softmax,
            PassType.T: self.weight_backward if self.chain.early else self.input_backward,
            PassType.TW: self.weight_backward,
            PassType.R: self.count_above_target,
        }

    def softmax(self, instruction: Pass) -> None:
        """S: logits of this rank's shard and their local statistics."""
        self.leave(instruction, *self.forward_pass(instruction))

    def forward_pass(self, instruction: Pass) -> tuple[ShardState | None, Sent]:
        """What S keeps and sends."""
        i, chain = instruction.microbatch, self.chain
        microbatch, extras = self.microbatches[i], chain.extras(i)
        state, statistics = self.on_shard(
            instruction, lambda x, weight: chain.forward(x, weight, microbatch, extras)
        )
        return state, Sent(statistics, extras)

    def on_shard(self, instruction: Pass, shard_pass: ShardPass) -> tuple[Any, torch.Tensor]:
        """Run it on the hidden states, in a call of the module: before one DDP gathers the parameters."""
        x = self.hidden.of(instruction)
        self.losses.look_at(instruction.microbatch, x)
        state, sent = self._layer(x, self.chain.weight, shard_pass=shard_pass)
        assert sent is not None
        return state, sent

    def leave(self, producer: Pass, state: ShardState | None, sent: Sent) -> None:
        if uses := self.chain.state_uses:
            assert state is not None
            self.buffers.put(producer, STATE, state, uses=uses)
        self.buffers.put(producer, SENT, sent)

    def input_backward(self, instruction: Pass) -> None:
        """T of vocab-1 and naive: this rank's part of the input gradient, whose rows are not scaled yet."""
        joined, state = self.chain.joined_and_state(instruction.microbatch)
        self.buffers.put(instruction, PART, self.chain.unscaled_input_gradient(state, joined.softmax))

    def weight_backward(self, instruction: Pass) -> None:
        """T of vocab-2, and TW: the weight gradient."""
        i = instruction.microbatch
        joined, state = self.chain.joined_and_state(i)
        grads = self.arrived(Comm(CommType.CG, instruction.stage, i), ARRIVAL)
        self.add_weight_gradient(i, state, joined.softmax, grads)
        self.chain.spare.keep(state)
        self.gradients.wrote(Writer(instruction.type))

    def add_weight_gradient(self, i: int, state: ShardState, softmax: Softmax, grads: torch.Tensor) -> None:
        """Add what gradients [k, n] give: of the losses, and of extras on which the loss may depend.

        Rows of detached heads add nothing: their loss trains their own layers alone. Nor does a frozen weight
        get anything.
        """
        weight = self.chain.weight
        if not weight.requires_grad:
            return
        if self.chain.detached:
            grads = grads * self.microbatches.of_main_head(i)
        state.add_weight_gradient(softmax, self.chain.slopes(softmax, grads), main_grad(weight))

    def count_above_target(self, instruction: Pass) -> None:
        """R: how many ids of this shard are likelier than each target."""
        joined, state = self.chain.joined_and_state(instruction.microbatch)
        self.buffers.put(instruction, COUNTS, ids_above_target(state.stored, joined.softmax))
        if self.rank.has_loss:
            self.buffers.put(instruction, RANKED, joined)
        self.chain.spare.keep(state)


class NaivePasses(SoftmaxPasses):
    """The passes of naive: S finds the maximum, and S2 does what S does in other methods."""

    def table(self) -> dict[PassType, Callable[[Any], None]]:
        return super().table() | {PassType.S2: self.exponential_sum}

    def softmax(self, instruction: Pass) -> None:
        """S: logits and their local maximum."""
        targets, shard = self.microbatches[instruction.microbatch].targets, self.chain.model.shard.range
        state, offsets = self.on_shard(
            instruction, lambda x, weight: naive_maximum(x, weight, targets, shard, self.chain.options)
        )
        self.buffers.put(instruction, LOGITS, state)
        self.buffers.put(instruction, OFFSETS, offsets)

    def exponential_sum(self, instruction: Pass) -> None:
        """S2: exponentials relative to the global maximum, and their local sum."""
        i, rank = instruction.microbatch, instruction.stage
        offsets = self.arrived(Comm(CommType.C1, rank, i), ARRIVAL)
        logits = self.buffers.take(Pass(PassType.S, rank, i), LOGITS)
        spare = self.chain.spare.take(self.microbatches[i].tokens)
        state, statistics = naive_sum(logits, offsets, e=spare)
        self.leave(instruction, state, Sent(statistics, ()))


class InStep(SoftmaxPasses):
    """The handler of such an S; the main stream waits for each of the collectives."""

    def __init__(self, chain: OutputChain, hidden: HiddenStates, losses: Losses) -> None:
        super().__init__(chain, hidden, losses)
        self.collectives = OutputCollectives(chain)

    def softmax(self, instruction: Pass) -> None:
        """Run the whole output layer: statistics, loss, dX and dW, one after the other."""
        i, chain, losses = instruction.microbatch, self.chain, self.losses
        state, sent = self.forward_pass(instruction)
        assert state is not None
        joined = self.wait(self.collectives.joined(i, sent, None))
        grads = losses.report(i, joined) if self.rank.has_loss else None
        grads = self.wait(losses.shared_gradient(i, grads))
        part = chain.unscaled_input_gradient(state, joined.softmax)
        hidden_grad = self.wait(self.collectives.sum(i, part))
        if self.rank.is_last:
            self.buffers.put(instruction, HIDDEN_GRAD, (hidden_grad, grads))
        self.add_weight_gradient(i, state, joined.softmax, grads)
        self.gradients.wrote(Writer(PassType.S))
