"""S of interlaced: the whole output layer in one pass, with its collectives inside, all ranks in step."""

from __future__ import annotations

from megatron_vocabpar.pipeline.gradients import Writer
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.output.collectives import OutputCollectives
from megatron_vocabpar.pipeline.output.hidden import HiddenStates
from megatron_vocabpar.pipeline.output.loss import Losses
from megatron_vocabpar.pipeline.output.passes import SoftmaxPasses
from megatron_vocabpar.pipeline.slots import HIDDEN_GRAD
from megatron_vocabpar.schedule.words.passes import Pass, PassType


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
