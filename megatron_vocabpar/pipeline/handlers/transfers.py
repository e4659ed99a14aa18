"""Hidden states to the next stage on another rank, and their gradients back."""

from __future__ import annotations

import torch

from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.slots import INPUT_GRAD, OUTPUT, RECEIVED
from megatron_vocabpar.schedule.words.passes import Comm, Pass, PassType


class Transfers(LayerHandlers):
    """Handlers of SEND and RECV."""

    def send_forward(self, instruction: Comm) -> None:
        """SEND_F: a stage's output to the rank of the next stage."""
        output = self.buffers.take(Pass(PassType.F, instruction.stage, instruction.microbatch), OUTPUT)
        expected = self.iteration.hidden_shape(instruction.microbatch, instruction.stage)
        if tuple(output.shape) != expected:
            raise ValueError(
                f"the stage's output has shape {tuple(output.shape)}, the next stage expects {expected}; "
                "check seq_length and micro_batch_size of the call"
            )
        self._send(output, instruction.stage + 1)

    def send_backward(self, instruction: Comm) -> None:
        """SEND_B: a stage's input gradient to the rank of the previous stage."""
        grad = self.buffers.take(Pass(PassType.B, instruction.stage, instruction.microbatch), INPUT_GRAD)
        self._send(grad, instruction.stage - 1)

    def _send(self, tensor: torch.Tensor, stage: int) -> None:
        dtype = self._transfer_dtype()
        self.rank.point_to_point.send(tensor.to(dtype).contiguous(), self.rank.placement.rank_of(stage))

    def receive_forward(self, instruction: Comm) -> None:
        """RECV_F: post the receive of a stage's input."""
        before = instruction.stage - 1
        self._receive(instruction, before, of=before)

    def receive_backward(self, instruction: Comm) -> None:
        """RECV_B: post the receive of the gradient of a stage's output."""
        self._receive(instruction, instruction.stage + 1, of=instruction.stage)

    def _receive(self, instruction: Comm, from_stage: int, of: int) -> None:
        """Post the receive of the output of stage ``of``, or of its gradient."""
        posted = self.rank.point_to_point.receive(
            self.iteration.hidden_shape(instruction.microbatch, of),
            self._transfer_dtype(),
            self.rank.device,
            self.rank.placement.rank_of(from_stage),
        )
        self.buffers.put(instruction, RECEIVED, posted)

    def _transfer_dtype(self) -> torch.dtype:
        return self.call.config.pipeline_dtype or self.call.config.params_dtype
