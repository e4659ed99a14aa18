"""What each instruction does on a rank that holds one or more GPTModel chunks.

One :class:`Iteration` lives for one forward-backward call. Its table maps every type of instruction to a
method; the methods hand tensors to each other through buffers keyed by the producing instruction, launch
communication on side streams, and wait for what they consume. They never decide an order.

    IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] -> T -> [C2|C3] -> B(last) ... B(first) -> CIB -> IB

Read ``schedule/dependencies.py`` for the rules, ``layers/output.py`` for the mathematics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_vocabpar.integration import compat
from megatron_vocabpar.integration.gradients import GradientSync, main_grad
from megatron_vocabpar.integration.microbatches import ForwardStep, Microbatch, ModelCall
from megatron_vocabpar.integration.model import VocabParallelGPTModel
from megatron_vocabpar.layers.embedding import assemble, embedding_backward, split_gradient
from megatron_vocabpar.layers.output import input_gradient, naive_sum, weight_gradient
from megatron_vocabpar.layers.softmax_stats import MergedStats, merge_stats
from megatron_vocabpar.runtime.buffers import Buffers
from megatron_vocabpar.runtime.comm import (
    PointToPoint,
    Receive,
    VocabGroups,
    all_gather,
    all_reduce,
    broadcast,
    exchange_rows,
)
from megatron_vocabpar.runtime.executor import Handlers
from megatron_vocabpar.runtime.streams import Event, Stream
from megatron_vocabpar.schedule.dependencies import EMBEDDED_INPUTS
from megatron_vocabpar.schedule.passes import Comm, CommType, Pass, PassType
from megatron_vocabpar.schedule.placement import Placement

T = TypeVar("T")

# Which collective carries the merged statistics, and which the input gradient, in each algorithm.
STATISTICS = {"vocab-1": CommType.C1, "vocab-2": CommType.C1, "naive": CommType.C2}
INPUT_GRADIENT = {"vocab-1": CommType.C2, "vocab-2": CommType.C1, "naive": CommType.C3}


@dataclass(frozen=True)
class Rank:
    """What stays the same on this rank from one iteration to the next."""

    algorithm: str
    placement: Placement
    groups: VocabGroups
    device: torch.device
    output_stream: Stream
    input_stream: Stream
    point_to_point: PointToPoint
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def pipeline_rank(self) -> int:
        return self.groups.stage

    @property
    def is_first(self) -> bool:
        return self.pipeline_rank == self.placement.first_rank

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.placement.last_rank


@dataclass(frozen=True)
class Call:
    """The arguments of one forward-backward call that handlers need."""

    forward_step_func: ForwardStep
    data_iterators: Sequence[Iterator[Any] | None]
    chunks: Sequence[torch.nn.Module]
    config: Any
    num_microbatches: int
    hidden_shape: tuple[int, int, int]
    cp_group_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_microbatch_flag: bool


@dataclass
class Iteration:
    """The state and the handlers of one forward-backward call on one rank.

    Attributes:
        model: the chunk that holds the vocabulary shards, unwrapped; None for baseline and redis.
        microbatches: what every rank knows of each microbatch; empty for baseline and redis.
        recorded: the calls that ``forward_step`` makes on the first stage and on the last, by microbatch.
        reported: what the loss function reported, in order (Megatron's forward_data_store).
    """

    rank: Rank
    call: Call
    gradients: GradientSync
    model: VocabParallelGPTModel | None = None
    microbatches: Sequence[Microbatch] = ()
    recorded_first: Sequence[ModelCall] = ()
    recorded_last: Sequence[ModelCall] = ()
    buffers: Buffers = field(default_factory=Buffers)
    reported: list[Any] = field(default_factory=list)
    num_tokens: torch.Tensor | int = 0
    _departures: deque[Event[torch.Tensor]] = field(default_factory=deque)
    _unclaimed: deque[Event[Any]] = field(default_factory=deque)
    _evaluations: deque[tuple[int, Event[MergedStats]]] = field(default_factory=deque)

    # ------------------------------------------------------------------ the table

    def handlers(self) -> Handlers:
        """Instruction type -> handler, for this rank's algorithm."""
        table: dict[PassType | CommType, Callable[[Any], None]] = {
            PassType.F: self.forward,
            PassType.B: self.backward,
            CommType.SEND_F: self.send_forward,
            CommType.RECV_F: self.receive_forward,
            CommType.SEND_B: self.send_backward,
            CommType.RECV_B: self.receive_backward,
        }
        if self.rank.algorithm == "none":
            return table
        table |= {
            PassType.IF: self.input_forward,
            CommType.CI: self.gather_rows,
            CommType.CIB: self.scatter_gradient,
            PassType.IB: self.input_backward,
            CommType.C0: self.broadcast_hidden,
            PassType.S: self.output_forward,
            PassType.T: self.output_backward,
        }
        if self.rank.algorithm == "naive":
            table |= {
                CommType.C1: self.reduce_maximum,
                PassType.S2: self.exponential_sum,
                CommType.C2: self.gather_statistics,
                CommType.C3: self.reduce_input_gradient,
            }
        elif self.rank.algorithm == "vocab-1":
            table |= {CommType.C1: self.gather_statistics, CommType.C2: self.reduce_input_gradient}
        elif self.rank.algorithm == "vocab-2":
            table |= {CommType.C1: self.gather_statistics_and_input_gradient}
        else:
            table |= {PassType.S: self.synchronous_output}
        return table

    def finish(self) -> None:
        """Wait for what nobody claimed, and check that nothing is left.

        Raises:
            BufferError: naming the buffers that are left.
        """
        self._report_evaluations(keep=0)
        self.rank.point_to_point.drain()
        for events in (self._departures, self._unclaimed):
            while events:
                events.popleft().wait()
        self.buffers.check_empty()

    def _wait(self, event: Event[T] | Receive) -> Any:
        with self.rank.waiting():
            return event.wait()

    # ------------------------------------------------------------------ stages

    def forward(self, instruction: Pass) -> None:
        """F: one stage's transformer layers, and what Megatron computes around them."""
        stage, i = instruction.stage, instruction.microbatch
        call, placement = self.call, self.rank.placement
        chunk = placement.chunk_of(stage)
        is_last_stage = stage == placement.last_stage
        parallel = self.rank.algorithm != "none"
        stage_input: torch.Tensor | None = None
        call_model: Callable[..., Any] = call.forward_step_func
        if stage == 0 and parallel:
            stage_input = self._embedded_rows(i)
            call_model = _replay(self.recorded_first[i].replace_input_ids(stage_input))
        elif stage > 0:
            stage_input = self._stage_input(stage, i)
            if is_last_stage and parallel:
                call_model = _replay(self.recorded_last[i])
        output, num_tokens = compat.forward_step(
            call_model,
            call.data_iterators[chunk],
            call.chunks[chunk],
            call.num_microbatches,
            None if stage == 0 else stage_input,
            self.reported,
            call.config,
            call.cp_group_size,
            call.collect_non_loss_data,
            call.first_microbatch_flag and i == 0,
            i,
            is_last_stage and not parallel,
            getattr(call.chunks[chunk], "vp_stage", None),
        )
        self.num_tokens = self.num_tokens + num_tokens
        if is_last_stage and parallel:
            assert self.model is not None
            hidden = output.detach().to(self.model.output_layer.weight.dtype)
            self.buffers.put(instruction, "hidden", hidden.flatten(0, 1))
        elif not is_last_stage:
            self.buffers.put(instruction, "output", output.detach())
        if not call.forward_only:
            compat.release_output(output, call.config)
            self.buffers.put(instruction, "graph", (stage_input, output))

    def _stage_input(self, stage: int, i: int) -> torch.Tensor:
        before = Pass(PassType.F, stage - 1, i)
        if self.rank.placement.rank_of(stage - 1) == self.rank.pipeline_rank:
            tensor = self.buffers.take(before, "output")
        else:
            tensor = self._wait(self.buffers.take(Comm(CommType.RECV_F, stage, i), "received"))
        return tensor.requires_grad_(not self.call.forward_only)

    def backward(self, instruction: Pass) -> None:
        """B: gradients of one stage's transformer layers and of its input."""
        stage, i = instruction.stage, instruction.microbatch
        placement = self.rank.placement
        stage_input, output = self.buffers.take(Pass(PassType.F, stage, i), "graph")
        output_grad: torch.Tensor | None = None
        if stage == placement.last_stage:
            if self.rank.algorithm != "none":
                output_grad = self._hidden_gradient(i).to(output.dtype)
        elif placement.rank_of(stage + 1) == self.rank.pipeline_rank:
            output_grad = self.buffers.take(Pass(PassType.B, stage + 1, i), "input_grad")
        else:
            output_grad = self._wait(self.buffers.take(Comm(CommType.RECV_B, stage, i), "received"))
        self.gradients.before_backward(placement.chunk_of(stage))
        input_grad = compat.backward_step(stage_input, output, output_grad, self.call.config)
        self.gradients.after_backward(placement.chunk_of(stage))
        if stage > 0 or self.rank.algorithm != "none":
            self.buffers.put(instruction, "input_grad", input_grad)

    def send_forward(self, instruction: Comm) -> None:
        """SEND_F: a stage's output to the rank of the next stage."""
        output = self.buffers.take(Pass(PassType.F, instruction.stage, instruction.microbatch), "output")
        expected = self._hidden_shape(instruction.microbatch)
        if tuple(output.shape) != expected:
            raise ValueError(
                f"the stage's output has shape {tuple(output.shape)}, the next stage expects {expected}; "
                "check seq_length and micro_batch_size of the call"
            )
        self._send(output, instruction.stage + 1)

    def send_backward(self, instruction: Comm) -> None:
        """SEND_B: a stage's input gradient to the rank of the previous stage."""
        grad = self.buffers.take(Pass(PassType.B, instruction.stage, instruction.microbatch), "input_grad")
        self._send(grad, instruction.stage - 1)

    def _send(self, tensor: torch.Tensor, stage: int) -> None:
        dtype = self._transfer_dtype()
        self.rank.point_to_point.send(tensor.to(dtype).contiguous(), self.rank.placement.rank_of(stage))

    def receive_forward(self, instruction: Comm) -> None:
        """RECV_F: post the receive of a stage's input."""
        self._receive(instruction, instruction.stage - 1)

    def receive_backward(self, instruction: Comm) -> None:
        """RECV_B: post the receive of the gradient of a stage's output."""
        self._receive(instruction, instruction.stage + 1)

    def _receive(self, instruction: Comm, from_stage: int) -> None:
        posted = self.rank.point_to_point.receive(
            self._hidden_shape(instruction.microbatch),
            self._transfer_dtype(),
            self.rank.device,
            self.rank.placement.rank_of(from_stage),
        )
        self.buffers.put(instruction, "received", posted)

    def _transfer_dtype(self) -> torch.dtype:
        return self.call.config.pipeline_dtype or self.call.config.params_dtype

    def _hidden_shape(self, i: int) -> tuple[int, int, int]:
        if not self.microbatches:
            return self.call.hidden_shape
        b, s = self.microbatches[i].shape
        return (s // self._sequence_shards(), b, self.call.hidden_shape[2])

    def _sequence_shards(self) -> int:
        return self.rank.groups.tensor if self.call.config.sequence_parallel else 1

    # ------------------------------------------------------------------ input layer

    def _vocab_model(self) -> VocabParallelGPTModel:
        assert self.model is not None
        return self.model

    def input_forward(self, instruction: Pass) -> None:
        """IF: look up the rows that this rank owns, once the tokens of microbatch i - 2 have left."""
        while len(self._departures) >= EMBEDDED_INPUTS:
            self._wait(self._departures.popleft())
        tokens = self.microbatches[instruction.microbatch].owned_tokens
        rows = self._vocab_model().embedding.word_embeddings(tokens)
        self.buffers.put(instruction, "rows", rows)

    def gather_rows(self, instruction: Comm) -> None:
        """CI: every rank's rows to the first stage, once for each of its tensor-parallel ranks."""
        groups, i = self.rank.groups, instruction.microbatch
        rows = self.buffers.take(Pass(PassType.IF, instruction.stage, i), "rows")
        first = groups.members_of(self.rank.placement.first_rank)
        counts = self.microbatches[i].plan.counts
        send = [len(rows) if member in first else 0 for member in range(len(groups.ranks))]
        receive = counts if self.rank.is_first else [0] * len(counts)
        event = self.rank.input_stream.submit(
            lambda: exchange_rows(groups, rows.repeat(len(first), 1), send, receive)
        )
        if self.rank.is_first:
            self.buffers.put(instruction, "event", event)
        else:
            self._departures.append(event)

    def _embedded_rows(self, i: int) -> torch.Tensor:
        microbatch = self.microbatches[i]
        rows = self._wait(self.buffers.take(Comm(CommType.CI, self.rank.pipeline_rank, i), "event"))
        embedded = assemble(microbatch.plan, rows).view(*microbatch.shape, -1)
        return embedded.requires_grad_(not self.call.forward_only)

    def scatter_gradient(self, instruction: Comm) -> None:
        """CIB: the gradient of every embedded token from the first stage to the rank that owns its row.

        Tensor-parallel ranks of the first stage hold the same gradient; each serves the owners of its own
        tensor rank.
        """
        groups, i = self.rank.groups, instruction.microbatch
        counts = self.microbatches[i].plan.counts
        members = range(len(counts))
        send = [0] * len(counts)
        hidden = self.call.hidden_shape[2]
        weight = self._vocab_model().embedding.word_embeddings.weight
        rows = weight.new_empty((0, hidden))
        if self.rank.is_first:
            grad = self.buffers.take(Pass(PassType.B, 0, i), "input_grad")
            mine = [member % groups.tensor == groups.tensor_rank for member in members]
            send = [count if m else 0 for count, m in zip(counts, mine, strict=True)]
            split = split_gradient(self.microbatches[i].plan, grad.flatten(0, 1)).split(list(counts))
            rows = torch.cat([part for part, m in zip(split, mine, strict=True) if m]).to(weight.dtype)
        source = groups.members_of(self.rank.placement.first_rank)[groups.tensor_rank]
        receive = [counts[groups.member] if member == source else 0 for member in members]
        event = self.rank.input_stream.submit(lambda: exchange_rows(groups, rows, send, receive))
        self.buffers.put(instruction, "event", event)

    def input_backward(self, instruction: Pass) -> None:
        """IB: add the received gradients into this rank's rows of the embedding gradient."""
        i = instruction.microbatch
        rows = self._wait(self.buffers.take(Comm(CommType.CIB, instruction.stage, i), "event"))
        model = self._vocab_model()
        weight = model.embedding.word_embeddings.weight
        embedding_backward(rows, self.microbatches[i].owned_tokens, model.shard.range, main_grad(weight))
        self.gradients.wrote(PassType.IB)

    # ------------------------------------------------------------------ output layer

    def broadcast_hidden(self, instruction: Comm) -> None:
        """C0: the last stage's hidden states ``[n, H]`` to every rank.

        With sequence parallelism each tensor-parallel rank of the last stage sends its part of the
        sequence.
        """
        rank, i = self.rank, instruction.microbatch
        groups = rank.groups
        parts = self._sequence_shards()
        members = list(groups.members_of(rank.placement.last_rank))[:parts]
        dtype = self._vocab_model().output_layer.weight.dtype
        shape = (self.microbatches[i].tokens, self.call.hidden_shape[2])
        mine: torch.Tensor | None = None
        if rank.is_last:
            mine = self.buffers.take(Pass(PassType.F, rank.placement.last_stage, i), "hidden")

        def run() -> torch.Tensor:
            if mine is not None and parts == 1 and groups.member in members:
                broadcast(groups, groups.output, [mine], members)
                return mine
            full = torch.empty(shape, dtype=dtype, device=rank.device)
            pieces = full.chunk(parts)
            if mine is not None and groups.member in members:
                pieces[groups.tensor_rank].copy_(mine)
            broadcast(groups, groups.output, pieces, members)
            return full

        self.buffers.put(instruction, "event", rank.output_stream.submit(run))

    def output_forward(self, instruction: Pass) -> None:
        """S: logits of this rank's shard and their local statistics."""
        i, algorithm = instruction.microbatch, self.rank.algorithm
        x = self._wait(self.buffers.take(Comm(CommType.C0, instruction.stage, i), "event"))
        options: dict[str, bool] = {"maximum_only": True}
        if algorithm != "naive":
            training = not self.call.forward_only
            options = {"with_input_gradient": algorithm == "vocab-2" and training, "keep_state": training}
        state, statistics = self._vocab_model().output_layer(x, self.microbatches[i].labels, **options)
        self._put_state(instruction, state, statistics)

    def _put_state(self, producer: Pass, state: Any, statistics: torch.Tensor) -> None:
        if state is not None:
            # vocab-2 reads the state twice: in C1 for the input gradient and in T.
            self.buffers.put(producer, "state", state, uses=2 if self.rank.algorithm == "vocab-2" else 1)
        self.buffers.put(producer, "statistics", statistics)

    def reduce_maximum(self, instruction: Comm) -> None:
        """naive's C1: the maximal offset of every token."""
        groups = self.rank.groups
        source = Pass(PassType.S, instruction.stage, instruction.microbatch)
        offsets = self.buffers.take(source, "statistics")
        event = self.rank.output_stream.submit(
            lambda: all_reduce(groups, groups.output, offsets, dist.ReduceOp.MAX)
        )
        self.buffers.put(instruction, "event", event)

    def exponential_sum(self, instruction: Pass) -> None:
        """S2, naive: exponentials against the global offset, and their local sum."""
        i = instruction.microbatch
        offsets = self._wait(self.buffers.take(Comm(CommType.C1, instruction.stage, i), "event"))
        state = self.buffers.take(Pass(PassType.S, instruction.stage, i), "state")
        state, statistics = naive_sum(state, offsets)
        self._put_state(instruction, None if self.call.forward_only else state, statistics)

    def _softmax_pass(self, i: int) -> Pass:
        last = PassType.S2 if self.rank.algorithm == "naive" else PassType.S
        return Pass(last, self.rank.pipeline_rank, i)

    def gather_statistics(self, instruction: Comm) -> None:
        """C1 of vocab-1, C2 of naive: everyone's statistics, merged in rank order."""
        groups = self.rank.groups
        statistics = self.buffers.take(self._softmax_pass(instruction.microbatch), "statistics")
        event = self.rank.output_stream.submit(
            lambda: merge_stats(all_gather(groups, groups.output, statistics))
        )
        self._put_statistics(instruction, event)

    def _put_statistics(self, instruction: Comm, event: Event[MergedStats]) -> None:
        if not self.call.forward_only:
            self.buffers.put(instruction, "event", event)
        elif not self.rank.is_last:
            self._unclaim(event)
        else:
            # In evaluation no pass consumes the statistics: report with a lag that hides the collective.
            self._evaluations.append((instruction.microbatch, event))
            self._report_evaluations(keep=2)

    def _report_evaluations(self, keep: int) -> None:
        while len(self._evaluations) > keep:
            i, event = self._evaluations.popleft()
            self._report_loss(i, event.wait())

    def gather_statistics_and_input_gradient(self, instruction: Comm) -> None:
        """C1 of vocab-2: the statistics, then the input gradient from what S left."""
        if self.call.forward_only:
            self.gather_statistics(instruction)
            return
        groups, i = self.rank.groups, instruction.microbatch
        source = self._softmax_pass(i)
        statistics = self.buffers.take(source, "statistics")
        state = self.buffers.take(source, "state")
        grad_loss = self.microbatches[i].grad_loss
        weight = self._vocab_model().output_layer.weight.detach()
        is_last = self.rank.is_last

        def run() -> tuple[MergedStats, torch.Tensor | None]:
            merged = merge_stats(all_gather(groups, groups.output, statistics))
            part = input_gradient(state, merged, grad_loss, weight)
            hidden_grad = all_reduce(groups, groups.output, part)
            return merged, hidden_grad if is_last else None

        # Taken by T everywhere, and by B of the last stage.
        event = self.rank.output_stream.submit(run)
        self.buffers.put(instruction, "event", event, uses=2 if is_last else 1)

    def output_backward(self, instruction: Pass) -> None:
        """T: the weight gradient and, but for vocab-2, this rank's part of the input gradient."""
        i, algorithm = instruction.microbatch, self.rank.algorithm
        event = self.buffers.take(Comm(STATISTICS[algorithm], instruction.stage, i), "event")
        state = self.buffers.take(self._softmax_pass(i), "state")
        weight = self._vocab_model().output_layer.weight
        grad_loss = self.microbatches[i].grad_loss
        if algorithm == "vocab-2":
            merged, _ = self._wait(event)
        else:
            merged = self._wait(event)
            part = input_gradient(state, merged, grad_loss, weight.detach())
            self.buffers.put(instruction, "hidden_grad", part)
            if self.rank.is_last:
                self._report_loss(i, merged)
        weight_gradient(state, merged, grad_loss, main_grad(weight))
        self.gradients.wrote(PassType.T)

    def reduce_input_gradient(self, instruction: Comm) -> None:
        """C2 of vocab-1, C3 of naive: the sum of all ranks' parts of the input gradient, in float32."""
        groups = self.rank.groups
        part = self.buffers.take(Pass(PassType.T, instruction.stage, instruction.microbatch), "hidden_grad")
        event = self.rank.output_stream.submit(lambda: all_reduce(groups, groups.output, part))
        if self.rank.is_last:
            self.buffers.put(instruction, "event", event)
        else:
            self._unclaim(event)

    def synchronous_output(self, instruction: Pass) -> None:
        """S of interlaced: the whole output layer, all ranks in step."""
        rank, i = self.rank, instruction.microbatch
        groups = rank.groups
        x = self._wait(self.buffers.take(Comm(CommType.C0, instruction.stage, i), "event"))
        layer = self._vocab_model().output_layer
        training = not self.call.forward_only
        state, statistics = layer(
            x, self.microbatches[i].labels, with_input_gradient=training, keep_state=training
        )
        merged = self._wait(
            rank.output_stream.submit(lambda: merge_stats(all_gather(groups, groups.output, statistics)))
        )
        if rank.is_last:
            self._report_loss(i, merged)
        if not training:
            return
        grad_loss = self.microbatches[i].grad_loss
        part = input_gradient(state, merged, grad_loss, layer.weight.detach())
        hidden_grad = self._wait(rank.output_stream.submit(lambda: all_reduce(groups, groups.output, part)))
        if rank.is_last:
            self.buffers.put(instruction, "hidden_grad", hidden_grad)
        weight_gradient(state, merged, grad_loss, main_grad(layer.weight))
        self.gradients.wrote(PassType.S)

    def _hidden_gradient(self, i: int) -> torch.Tensor:
        """The gradient of the last stage's output ``[s, b, H]``; reports the loss if nobody has yet."""
        rank = self.rank.pipeline_rank
        if self.rank.algorithm == "interlaced":
            grad = self.buffers.take(Pass(PassType.S, rank, i), "hidden_grad")
        else:
            source = Comm(INPUT_GRADIENT[self.rank.algorithm], rank, i)
            grad = self._wait(self.buffers.take(source, "event"))
            if self.rank.algorithm == "vocab-2":
                merged, grad = grad
                self._report_loss(i, merged)
        part = grad.chunk(self._sequence_shards())[self.rank.groups.tensor_rank % self._sequence_shards()]
        return part.view(self._hidden_shape(i))

    # ------------------------------------------------------------------ loss

    def _report_loss(self, i: int, merged: MergedStats) -> None:
        """Megatron's loss function on the true token losses; its gradient must be what was announced."""
        call, microbatch = self.call, self.microbatches[i]
        b, s = microbatch.shape
        reported, num_tokens, grad = compat.loss_and_gradient(
            call.chunks[-1],
            merged.loss.float().view(s, b).t().contiguous(),
            self.recorded_last[i].loss_func,
            call.config,
            call.num_microbatches,
            call.cp_group_size,
            call.collect_non_loss_data,
            with_gradient=not call.forward_only,
        )
        self.reported.extend(reported)
        self.num_tokens = self.num_tokens + num_tokens
        if grad is not None:
            self._check_gradient(grad.t().reshape(-1), microbatch.grad_loss)

    @staticmethod
    def _check_gradient(true: torch.Tensor, announced: torch.Tensor | None) -> None:
        if announced is None or not torch.allclose(true, announced, rtol=1e-4, atol=0.0, equal_nan=True):
            raise ValueError(
                "the loss function is not linear in the per-token losses: its gradient depends on their "
                "values. Vocabulary parallelism sends the gradient ahead; use a (masked, weighted) sum or mean"
            )

    def _unclaim(self, event: Event[Any]) -> None:
        """Hold an event that nobody consumes until it is done, so that its errors are raised here."""
        while self._unclaimed and self._unclaimed[0].done():
            self._unclaimed.popleft().wait()
        self._unclaimed.append(event)


def _replay(recorded: ModelCall) -> Callable[..., tuple[torch.Tensor, Callable[..., Any]]]:
    """A ``forward_step`` that calls the model as recorded."""

    def call_model(_: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        return model(*recorded.args, **recorded.kwargs), recorded.loss_func

    return call_model
