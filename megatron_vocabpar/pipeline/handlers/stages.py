"""The transformer layers of a stage, F, B and W; and their hidden states and gradients between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.gradients import Writer
from megatron_vocabpar.pipeline.iteration import Iteration, LayerHandlers
from megatron_vocabpar.pipeline.recording import ModelCall
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.slots import (
    GRAPH,
    HIDDEN,
    INPUT_GRAD,
    OUTPUT,
    RECEIVED,
    ROWS_GRAD,
    TOKEN_LOSSES,
    Graph,
)
from megatron_vocabpar.pipeline.split_w.weight_gradients import WeightGradients
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pair, Pass, PassType


class Stages(LayerHandlers):
    """Handlers of F, B and W.

    Args:
        iteration: the state of this call.
        weight_gradients: one for each chunk if the schedule splits W from B, else empty.
        embedded_rows: from a stage and a microbatch to the rows ``[k, b, s, H]`` that the stage embeds, or
            None if it embeds nothing. Without it, the vocabulary layers are not partitioned.
        output_gradient: from a microbatch and a dtype to the gradient of the last stage's output: of its
            hidden states if the vocabulary layers are partitioned, else of the tokens' losses. Without it,
            the loss function is on the last stage's rank.
    """

    def __init__(
        self,
        iteration: Iteration,
        weight_gradients: Sequence[WeightGradients] = (),
        embedded_rows: Callable[[int, int], torch.Tensor | None] | None = None,
        output_gradient: Callable[[int, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(iteration)
        self.weight_gradients = weight_gradients
        self.embedded_rows = embedded_rows
        self.output_gradient = output_gradient
        graphs = Facts(settings=iteration.call.config)
        # The next replayed graph may overwrite a stage's output; of Transformer Engine's graphs also the
        # input's gradient, of which autograd makes a copy with Megatron's own.
        self._kept: Callable[[torch.Tensor], torch.Tensor] = torch.clone if graphs.captures_layers else _same
        self._kept_gradient = torch.clone if graphs.graphs_by_engine else _same

    def forward(self, instruction: Pass) -> None:
        """F: one stage's transformer layers, and what Megatron computes around them."""
        stage, i = instruction.stage, instruction.microbatch
        call, placement = self.call, self.rank.placement
        chunk = placement.chunk_of(stage)
        is_last_stage = stage == placement.last_stage
        partitioned = self.embedded_rows is not None
        stage_input = self._stage_input(stage, i) if stage > 0 else None
        rows = self.embedded_rows(stage, i) if self.embedded_rows is not None else None
        model: Any = unwrap_model(call.chunks[chunk])
        with model.in_schedule(rows) if partitioned else self._losses_of_heads(model, stage, i):
            (output,), num_tokens = schedules.forward_step(
                self._forward_step(stage, i),
                call.data_iterators[chunk],
                call.chunks[chunk],
                call.num_microbatches,
                [stage_input],
                self.iteration.reported,
                call.config,
                call.cp_group_size,
                collect_non_loss_data=call.collect_non_loss_data,
                is_first_microbatch=call.first_microbatch_flag and i == 0,
                current_microbatch=i,
                vp_stage=getattr(call.chunks[chunk], "vp_stage", None),
                is_last_stage=is_last_stage and self.output_gradient is None,
            )
        if is_last_stage and self.output_gradient is None:
            self.iteration.num_tokens = self.iteration.num_tokens + num_tokens
        if not is_last_stage:
            self.buffers.put(instruction, OUTPUT, self._kept(output.detach()))
        elif partitioned:
            # An older Megatron's wrapper turns the last stage's output into float32: exact either way.
            hidden = self._kept(output.detach()).to(call.config.params_dtype)
            self.buffers.put(instruction, HIDDEN, hidden.flatten(0, 1))
        elif self.output_gradient is not None:
            # A copy: Megatron frees the storage of the output.
            self.buffers.put(instruction, TOKEN_LOSSES, output.detach().flatten().float().clone())
        if not call.forward_only:
            output = compat.released(output, call.config)
            self.buffers.put(instruction, GRAPH, Graph(stage_input, rows, output))

    def _forward_step(self, stage: int, i: int) -> Callable[..., Any]:
        """The training script's ``forward_step``, or a replay of the call that was recorded of it."""
        if stage not in self.iteration.recorded:
            return self.call.forward_step_func
        return _replay(self.iteration.recorded[stage][i])

    def _losses_of_heads(self, model: Any, stage: int, i: int) -> AbstractContextManager[None]:
        """A context in which a last stage returns the losses of all heads, for a loss function far away."""
        if not self.gives_losses_of_heads(stage):
            return nullcontext()
        return heads.returning_losses(model, self.microbatches.labels(i))

    def gives_losses_of_heads(self, stage: int) -> bool:
        """Whether a stage has whole layers and further heads, but not the loss function."""
        is_last = stage == self.rank.placement.last_stage
        apart = self.embedded_rows is None and self.output_gradient is not None
        return is_last and apart and heads.depths(self.call.config) > 0

    def _stage_input(self, stage: int, i: int) -> torch.Tensor:
        before = Pass(PassType.F, stage - 1, i)
        if self.rank.placement.rank_of(stage - 1) == self.rank.pipeline_rank:
            tensor = self.buffers.take(before, OUTPUT)
        else:
            tensor = self.arrived(Comm(CommType.RECV_F, stage, i), RECEIVED)
        return tensor.requires_grad_(not self.call.forward_only)

    def backward(self, instruction: Pass) -> None:
        """B: gradients of one stage's transformer layers and of its input."""
        stage, i = instruction.stage, instruction.microbatch
        placement = self.rank.placement
        stage_input, rows, output = self.buffers.take(Pass(PassType.F, stage, i), GRAPH)
        output_grad: torch.Tensor | None = None
        if stage == placement.last_stage:
            if self.output_gradient is not None:
                output_grad = self.output_gradient(i, output.dtype)
        elif placement.rank_of(stage + 1) == self.rank.pipeline_rank:
            output_grad = self.buffers.take(Pass(PassType.B, stage + 1, i), INPUT_GRAD)
        else:
            output_grad = self.arrived(Comm(CommType.RECV_B, stage, i), RECEIVED)
        chunk = placement.chunk_of(stage)
        self.gradients.before_backward(chunk)
        with self.weight_gradients[chunk].left_by(i) if self.weight_gradients else nullcontext():
            input_grad = self._backward_step(instruction, stage_input, output, output_grad)
        self.gradients.after_backward(chunk)
        if input_grad is not None:
            self.buffers.put(instruction, INPUT_GRAD, self._kept_gradient(input_grad))
        if rows is not None:
            # Tokens that detached heads embed get no gradient.
            grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
            self.buffers.put(instruction, ROWS_GRAD, self._kept_gradient(grad))

    def _backward_step(
        self,
        instruction: Pass,
        stage_input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        return compat.backward_step(stage_input, output, output_grad, self.call.config)

    def pair(self, instruction: Pair) -> None:
        """F of one microbatch and B of another, one after the other where nothing is to be hidden."""
        self.forward(instruction.forward)
        self.backward(instruction.backward)

    def weight_backward(self, instruction: Pass) -> None:
        """W: the weight gradients that B left out."""
        writer = Writer(PassType.W, self.rank.placement.chunk_of(instruction.stage))

        def after(share: float, complete: Sequence[torch.nn.Parameter]) -> None:
            for parameter in complete:
                self.gradients.added(writer, parameter)
            self.iteration.between.layer_ended(PassType.W, share)

        self.weight_gradients[writer.chunk].compute(instruction.microbatch, after)
        self.gradients.wrote(writer)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _replay(recorded: ModelCall) -> Callable[..., tuple[torch.Tensor, Callable[..., Any]]]:
    """A ``forward_step`` that calls the model as recorded."""

    def call_model(_: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        output = model(*recorded.args, **recorded.kwargs, **compat.in_half_precision(model))
        return output, recorded.loss_func

    return call_model


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
