"""S of interlaced: the whole output layer in one pass, with its collectives inside, all ranks in step."""

from __future__ import annotations

from megatron_vocabpar.pipeline.handlers.barriers import Barriers
from megatron_vocabpar.pipeline.handlers.hidden import scaled
from megatron_vocabpar.pipeline.handlers.softmax import SoftmaxPasses
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.schedule.words.passes import Pass, PassType


class InStep(LayerHandlers):
    """The handler of such an S; the main stream waits for each of the collectives."""

    def __init__(self, passes: SoftmaxPasses, barriers: Barriers) -> None:
        super().__init__(passes.iteration)
        self.passes, self.barriers = passes, barriers

    def output_layer(self, instruction: Pass) -> None:
        """Statistics, loss, dX, dW, one after the other."""
        rank, i, passes = self.rank, instruction.microbatch, self.passes
        chain, losses = passes.chain, passes.losses
        state, statistics = passes.forward_pass(instruction)
        softmax = self.wait(self.barriers.joined(statistics))
        grads = losses.report(i, softmax) if rank.has_loss else None
        grads = self.wait(losses.shared_gradient(i, grads))
        part = chain.input_gradient(state, softmax, chain.row_slopes(softmax))
        hidden_grad = self.wait(self.barriers.sum(part))
        if rank.is_last:
            self.buffers.put(instruction, "hidden_grad", scaled(hidden_grad, grads))
        passes.add_weight_gradient(i, state, softmax, grads)
        self.gradients.wrote(PassType.S)
