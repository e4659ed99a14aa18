"""S of interlaced: the whole output layer in one pass, with its collectives inside, all ranks in step."""

from __future__ import annotations

from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.output.collectives import OutputCollectives
from megatron_vocabpar.pipeline.output.hidden import scaled
from megatron_vocabpar.pipeline.output.passes import SoftmaxPasses
from megatron_vocabpar.pipeline.slots import HIDDEN_GRAD
from megatron_vocabpar.schedule.words.passes import Pass, PassType


class InStep(LayerHandlers):
    """The handler of such an S; the main stream waits for each of the collectives."""

    def __init__(self, passes: SoftmaxPasses, collectives: OutputCollectives) -> None:
        super().__init__(passes.iteration)
        self.passes, self.collectives = passes, collectives

    def output_layer(self, instruction: Pass) -> None:
        """Statistics, loss, dX, dW, one after the other."""
        rank, i, passes = self.rank, instruction.microbatch, self.passes
        chain, losses = passes.chain, passes.losses
        state, sent = passes.forward_pass(instruction)
        assert state is not None
        joined = self.wait(self.collectives.joined(sent, None))
        grads = losses.report(i, joined) if rank.has_loss else None
        grads = self.wait(losses.shared_gradient(i, grads))
        part = chain.unscaled_input_gradient(state, joined.softmax)
        hidden_grad = self.wait(self.collectives.sum(part))
        if rank.is_last:
            self.buffers.put(instruction, HIDDEN_GRAD, scaled(hidden_grad, grads))
        passes.add_weight_gradient(i, state, joined.softmax, grads)
        self.gradients.wrote(PassType.S)
