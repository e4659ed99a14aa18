"""The partitioned output layer: C0, S, C1, S2, C2, T and C3 of every algorithm, the loss, L, CG and TW.

    naive       C0  S  C1(maximum)     S2  C2(statistics)  T  C3(input gradient)
    vocab-1     C0  S  C1(statistics)                      T  C2(input gradient)
    vocab-2     C0  S  C1(statistics, input gradient)      T
    interlaced  C0  S(everything, all ranks in step)

With a late gradient the input gradient is reduced before the loss function has run, its rows unscaled, and B
scales them: a row is linear in the gradient of its token's loss. The mathematics is in ``layers/output.py``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.integration import compat, heads
from megatron_vocabpar.integration.gradients import main_grad
from megatron_vocabpar.integration.iteration import Iteration, LayerHandlers
from megatron_vocabpar.integration.loss_reports import LossReports
from megatron_vocabpar.integration.model import PartitionedModel
from megatron_vocabpar.layers import invariant, output
from megatron_vocabpar.layers.entropy import (
    entropy_input_gradient,
    entropy_part,
    entropy_weight_gradient,
    merged_entropy,
)
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.invariant import FixedPoint
from megatron_vocabpar.layers.output import OutputState, naive_sum
from megatron_vocabpar.layers.rivals import likelier_ids, merged_rivals, rival_part
from megatron_vocabpar.layers.softmax_stats import MergedStats, merge_stats, merged_place
from megatron_vocabpar.runtime.comm import all_gather, all_reduce, broadcast
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class OutputLayer(LayerHandlers):
    """Handlers of the output layer's passes and collectives for the shard that ``model`` holds."""

    def __init__(self, iteration: Iteration, model: PartitionedModel) -> None:
        super().__init__(iteration)
        self.model = model
        self._evaluations: deque[tuple[int, Event[MergedStats]]] = deque()
        self._reports = LossReports(iteration)
        self._spare: list[torch.Tensor] = []
        self._terms = compat.with_mup_scale(iteration.rank.output_options.terms, iteration.call.config)
        # The weight in 8 bits, once an iteration, when the first S has it.
        recipe = iteration.rank.output_options.fp8
        self._fp8 = recipe and cache(
            lambda: Fp8Weight.of(model.output_weight.detach(), model.shard.range, recipe)
        )
        self._passes: Any = invariant if iteration.rank.output_options.invariant else output
        method = iteration.rank.method
        # Whether the input gradient comes with the statistics, from what S left, and T has the rest.
        waits = method.waits_for
        self.early_gradient = PassType.T in waits and waits[PassType.T][0] is waits[PassType.B][0]
        self.late_gradient = method.late_gradient
        options, training = iteration.rank.output_options, not iteration.call.forward_only
        can_count = options.keeps_exponentials and PassType.S2 not in method.passes
        logs = training and can_count and heads.logs_acceptance(iteration.call.config)
        self._counts_ranks = options.target_rank and not training
        self._counts_wins = options.accuracy or self._counts_ranks or logs
        self._ranked: dict[int, tuple[MergedStats, torch.Tensor]] = {}

    def finish(self) -> None:
        """In evaluation: report the losses that are still on their way. Have gradients checked later."""
        self._report_evaluations(keep=0)
        self._report_ranks()
        self._reports.finish()

    def broadcast_hidden(self, instruction: Comm) -> None:
        """C0: the last stage's hidden states ``[n, H]`` to every rank, of the rows that count.

        With sequence parallelism each tensor-parallel rank of the last stage sends its part of the
        sequence.
        """
        rank, i = self.rank, instruction.microbatch
        groups, microbatch = rank.groups, self.microbatches[i]
        parts = self.iteration.sequence_shards
        members = list(groups.members_of(rank.placement.last_rank))[:parts]
        dtype = self.model.word_embeddings.weight.dtype
        shape = (microbatch.tokens, self.call.config.hidden_size)
        mine: torch.Tensor | None = None
        if rank.is_last:
            mine = self.buffers.take(Pass(PassType.F, rank.placement.last_stage, i), "hidden")

        part = groups.tensor_rank % parts
        counted = microbatch.counted_in(part)
        source = mine if groups.member in members else None
        whole = source is not None and parts == 1 and counted is None
        full = source if whole else torch.empty(shape, dtype=dtype, device=rank.device)
        assert full is not None

        def run() -> torch.Tensor:
            pieces = full.split(microbatch.counts)
            if source is not None and counted is not None:
                torch.index_select(source, 0, counted, out=pieces[part])
            elif source is not None and not whole:
                pieces[part].copy_(source)
            broadcast(groups, groups.output, pieces, members)
            return full

        self.buffers.put(instruction, "event", rank.output_stream.submit(run))

    def output_forward(self, instruction: Pass) -> None:
        """S: logits of this rank's shard and their local statistics."""
        i = instruction.microbatch
        x = self._hidden_states(instruction)
        if PassType.S2 in self.rank.method.passes:
            microbatch = self.microbatches[i]
            state, statistics = self.model.vocab_output(
                x,
                microbatch.labels,
                self.model.output_weight,
                maximum_only=True,
                rows_per_chunk=self.rank.output_options.rows_per_chunk,
                terms=self._terms,
                owned=microbatch.owned_targets,
            )
        else:
            state, statistics = self._softmax(i, x, with_input_gradient=self.early_gradient)
        self._put_state(instruction, state, statistics)

    def _hidden_states(self, instruction: Pass) -> torch.Tensor:
        """What C0 brought for S: ``[n, H]``."""
        i = instruction.microbatch
        x: torch.Tensor = self.wait(self.buffers.take(Comm(CommType.C0, instruction.stage, i), "event"))
        self._reports.hidden(i, x)
        return x

    def _softmax(self, i: int, x: torch.Tensor, with_input_gradient: bool) -> tuple[Any, Any]:
        """Pass S of ``layers/output.py``; in evaluation the statistics alone."""
        training, options = not self.call.forward_only, self.rank.output_options
        microbatch = self.microbatches[i]
        state, statistics = self.model.vocab_output(
            x,
            microbatch.labels,
            self.model.output_weight,
            with_input_gradient=with_input_gradient and training,
            keep_state=training or options.entropy or self._counts_wins,
            rows_per_chunk=options.rows_per_chunk,
            recompute=options.recompute,
            owned=microbatch.owned_targets,
            e=self._spare_exponentials(microbatch.tokens),
            fp8=self._fp8,
            invariant=options.invariant,
            terms=self._terms,
        )
        if options.entropy:
            early = options.entropy_gradient and with_input_gradient and training
            weight = self.model.output_weight.detach() if early else None
            state, statistics = entropy_part(state, statistics, weight)
        if self._counts_wins:
            statistics = rival_part(state, statistics)
        return state if training or self._counts_ranks else None, statistics

    def _spare_exponentials(self, tokens: int) -> torch.Tensor | None:
        """A tensor for E of this size that nobody needs any more; if none fits, the oldest is freed."""
        if not self._spare:
            return None
        fitting = (k for k, e in enumerate(self._spare) if len(e) == tokens)
        e = self._spare.pop(next(fitting, 0))
        return e if len(e) == tokens else None

    def _put_state(self, producer: Pass, state: Any, statistics: torch.Tensor) -> None:
        if state is not None:
            # Beside T, an early input gradient reads what the softmax left, and TW does.
            twice = self.early_gradient or PassType.TW in self.rank.method.passes
            twice = twice and not self.call.forward_only
            is_softmax = producer == self._softmax_pass(producer.microbatch)
            self.buffers.put(producer, "state", state, uses=1 + (twice and is_softmax))
        self.buffers.put(producer, "statistics", statistics)

    def reduce_maximum(self, instruction: Comm) -> None:
        """naive's C1: the maximal offset of every token."""
        groups = self.groups
        source = Pass(PassType.S, instruction.stage, instruction.microbatch)
        offsets = self.buffers.take(source, "statistics")
        event = self.rank.output_stream.submit(
            lambda: all_reduce(groups, groups.output, offsets, dist.ReduceOp.MAX)
        )
        self.buffers.put(instruction, "event", event)

    def exponential_sum(self, instruction: Pass) -> None:
        """S2, naive: exponentials against the global offset, and their local sum."""
        i = instruction.microbatch
        offsets = self.wait(self.buffers.take(Comm(CommType.C1, instruction.stage, i), "event"))
        state = self.buffers.take(Pass(PassType.S, instruction.stage, i), "state")
        state, statistics = naive_sum(state, offsets, rows_per_chunk=self.rank.output_options.rows_per_chunk)
        self._put_state(instruction, None if self.call.forward_only else state, statistics)

    def _softmax_pass(self, i: int) -> Pass:
        """The pass that left the exponentials and their statistics."""
        return Pass(self.rank.method.producers[self._statistics], self.rank.pipeline_rank, i)

    @property
    def _statistics(self) -> CommType:
        """The collective that carries the statistics: T waits for it."""
        word = self.rank.method.waits_for[PassType.T][0]
        assert isinstance(word, CommType)
        return word

    def gather_statistics(self, instruction: Comm) -> None:
        """C1 of vocab-1, C2 of naive: everyone's statistics, merged in rank order."""
        statistics = self.buffers.take(self._softmax_pass(instruction.microbatch), "statistics")
        self._put_statistics(instruction, self._merge(statistics))

    def _merge(self, statistics: torch.Tensor) -> Event[MergedStats]:
        """Everyone's statistics, merged, on the side stream."""
        groups, place = self.groups, self._place(statistics)
        return self.rank.output_stream.submit(
            lambda: self._joined(all_gather(groups, groups.output, statistics), place)
        )

    def _place(self, statistics: torch.Tensor) -> MergedStats:
        """Memory of this stream for what the other makes of everyone's statistics."""
        place = merged_place(statistics)
        if self.rank.output_options.entropy:
            entropy, log_probability = statistics.new_empty(2, len(statistics)).unbind()
            place = replace(place, entropy=entropy, log_probability=log_probability)
        return replace(place, rivals=statistics.new_empty(2, len(statistics))) if self._counts_wins else place

    def _joined(self, gathered: torch.Tensor, place: MergedStats) -> MergedStats:
        if place.rivals is not None:
            gathered, largest = gathered[..., :-1].contiguous(), gathered[..., -1]
            merged = self._joined(gathered, replace(place, rivals=None))
            rivals = merged_rivals(gathered, largest, merged.offset, self.model.output_weight.dtype)
            return replace(merged, rivals=place.rivals.copy_(rivals))
        if place.entropy is None or place.log_probability is None:
            return merge_stats(gathered, self._terms, out=place)
        gathered, parts = gathered[..., :-1].contiguous(), gathered[..., -1]
        merged = merge_stats(gathered, self._terms, out=place)
        entropy, log_probability = merged_entropy(gathered, parts, merged)
        log_probability = place.log_probability.copy_(log_probability)
        return replace(merged, entropy=place.entropy.copy_(entropy), log_probability=log_probability)

    def _put_statistics(self, instruction: Comm, event: Event[MergedStats]) -> None:
        if not self.call.forward_only:
            self.buffers.put(instruction, "event", event, uses=self._waiting(instruction.type))
        elif not (self.rank.has_loss or self._counts_ranks):
            self.iteration.unclaim(event)
        else:
            # In evaluation no pass consumes the statistics: report with a lag that hides the collective.
            self._evaluations.append((instruction.microbatch, event))
            self._report_evaluations(keep=2)

    def _waiting(self, type_: CommType) -> int:
        """How many of this rank's passes take what a collective carries."""
        rank = self.rank
        # With the loss function here, B has its gradients without CG.
        last_backward = rank.is_last and not (type_ is CommType.CG and rank.has_loss)
        here = {PassType.L: rank.has_loss, PassType.B: last_backward}
        return sum(here.get(pass_, True) for pass_ in rank.method.waiting_for(type_))

    def _merged(self, i: int) -> MergedStats:
        """The statistics of all ranks, when they have arrived."""
        merged = self.wait(self.buffers.take(Comm(self._statistics, self.rank.pipeline_rank, i), "event"))
        return merged[0] if self.early_gradient else merged

    def _report_evaluations(self, keep: int) -> None:
        while len(self._evaluations) > keep:
            i, event = self._evaluations.popleft()
            merged = event.wait()
            if self._counts_ranks:
                self._count_likelier(i, merged, self.buffers.take(self._softmax_pass(i), "state"))
            else:
                self._report_loss(i, merged)

    def _count_likelier(self, i: int, merged: MergedStats, state: OutputState) -> None:
        self._ranked[i] = merged, likelier_ids(state, merged)
        assert state.e is not None
        self._spare.append(state.e)

    def _report_ranks(self) -> None:
        """Where ranks are counted: one sum over all shards for all microbatches, and then their losses."""
        if not self._counts_ranks:
            return
        groups, order = self.groups, sorted(self._ranked)
        counts = [self._ranked[i][1] for i in order]
        flat = torch.cat(counts)
        total = self.wait(self.rank.output_stream.submit(lambda: all_reduce(groups, groups.output, flat)))
        for i, ranks in zip(order, total.split([len(count) for count in counts]), strict=True):
            if self.rank.has_loss:
                self._report_loss(i, self._ranked[i][0], ranks)

    def gather_statistics_and_input_gradient(self, instruction: Comm) -> None:
        """C1 of vocab-2: the statistics, then the input gradient from what S left."""
        if self.call.forward_only:
            self.gather_statistics(instruction)
            return
        groups, i = self.groups, instruction.microbatch
        source = self._softmax_pass(i)
        statistics = self.buffers.take(source, "statistics")
        state = self.buffers.take(source, "state")
        grad_loss = self._row_gradient(i)
        weight = self.model.output_weight.detach()
        is_last, place = self.rank.is_last, self._place(statistics)
        shape = self._input_gradient_shape(state)
        hidden_grad = state.x.new_empty(shape, dtype=place.total.dtype) if is_last else None

        def run() -> tuple[MergedStats, torch.Tensor | None]:
            merged = self._joined(all_gather(groups, groups.output, statistics), place)
            part = self._input_gradient(state, merged, grad_loss, weight, out=hidden_grad)
            self._total(part)
            return merged, hidden_grad

        event = self.rank.output_stream.submit(run)
        self.buffers.put(instruction, "event", event, uses=self._waiting(instruction.type))

    def output_backward(self, instruction: Pass) -> None:
        """T of vocab-1 and naive: the weight gradient and this rank's part of the input gradient."""
        i = instruction.microbatch
        merged, state = self._merged(i), self.buffers.take(self._softmax_pass(i), "state")
        weight, grad_loss = self.model.output_weight, self.microbatches[i].gradient
        part = self._passes.output_backward(state, merged, grad_loss, weight.detach(), main_grad(weight))
        self.buffers.put(instruction, "hidden_grad", part)
        self._wrote(instruction, merged, state)

    def input_backward(self, instruction: Pass) -> None:
        """T of vocab-1 and naive with a late gradient: the part of the input gradient, its rows unscaled."""
        i = instruction.microbatch
        merged, state = self._merged(i), self.buffers.take(self._softmax_pass(i), "state")
        weight = self.model.output_weight.detach()
        part = self._input_gradient(state, merged, self._row_gradient(i), weight)
        self.buffers.put(instruction, "hidden_grad", part)

    def _input_gradient_shape(self, state: OutputState) -> tuple[int, ...]:
        n, hidden = state.x.shape
        return (2, n, hidden) if self.rank.output_options.entropy_gradient else (n, hidden)

    def _input_gradient(
        self, state: Any, merged: MergedStats, grad: torch.Tensor, weight: torch.Tensor, out: Any = None
    ) -> Any:
        """This rank's part of the losses' input gradient, the entropies' beside it, both times ``grad``."""
        if not self.rank.output_options.entropy_gradient:
            return self._passes.input_gradient(state, merged, grad, weight, out=out)
        if out is None:
            out = merged.total.new_empty(self._input_gradient_shape(state))
        output.input_gradient(state, merged, grad, weight, out=out[0])
        entropy_input_gradient(state, merged, grad, weight, out=out[1])
        return out

    def weight_backward(self, instruction: Pass) -> None:
        """T of vocab-2, and TW: the weight gradient."""
        i = instruction.microbatch
        merged, state = self._merged(i), self.buffers.take(self._softmax_pass(i), "state")
        if self.late_gradient:
            source = Comm(CommType.CG, instruction.stage, i)
            grads = self.wait(self.buffers.take(source, "event"))
        else:
            grads = self.microbatches[i].gradient[None]
        self._weight_gradient(state, merged, grads)
        self._wrote(instruction, merged, state)

    def _weight_gradient(self, state: Any, merged: MergedStats, grads: torch.Tensor) -> None:
        """Add that of the losses, and of the entropies where there are two rows of ``grads`` ``[k, n]``."""
        grad = main_grad(self.model.output_weight)
        if len(grads) == 1:
            self._passes.weight_gradient(state, merged, grads[0], grad)
        else:
            entropy_weight_gradient(state, merged, grads[0], grads[1], grad)

    def _wrote(self, instruction: Pass, merged: MergedStats, state: Any) -> None:
        """Nobody needs the state any more; the loss function may take its time now."""
        if self.rank.has_loss and not self.late_gradient:
            self._report_loss(instruction.microbatch, merged)
        if isinstance(state, OutputState) and state.e is not None:
            self._spare.append(state.e)
        self.gradients.wrote(instruction.type)

    def _row_gradient(self, i: int) -> torch.Tensor:
        """[n] what the rows of the input gradient are scaled with: 1 where that is left to B."""
        microbatch = self.microbatches[i]
        return (
            torch.ones(microbatch.tokens, device=self.rank.device)
            if self.late_gradient
            else microbatch.gradient
        )

    def loss_gradient(self, instruction: Pass) -> None:
        """L: the loss function, and the gradient that it gives every token, and its entropy."""
        i = instruction.microbatch
        grad = self._report_loss(i, self._merged(i))
        self.buffers.put(instruction, "gradient", grad, uses=1 + self.rank.is_last)

    def broadcast_gradient(self, instruction: Comm) -> None:
        """CG: the gradient of every token's loss, from the rank of the loss function to every rank."""
        i, mine = instruction.microbatch, None
        if self.rank.has_loss:
            mine = self.buffers.take(Pass(PassType.L, instruction.stage, i), "gradient")
        event = self._shared_gradient(i, mine)
        self.buffers.put(instruction, "event", event, uses=self._waiting(instruction.type))

    def _shared_gradient(self, i: int, mine: torch.Tensor | None) -> Event[torch.Tensor]:
        """[k, n] float32, on the side stream; tensor-parallel ranks have the first one's."""
        groups = self.groups
        source = groups.members_of(self.rank.placement.p - 1)[0]
        if mine is None or groups.member != source:
            rows = 1 + self.rank.output_options.entropy_gradient
            mine = torch.empty(rows, self.microbatches[i].tokens, device=self.rank.device)
        grad = mine

        def run() -> torch.Tensor:
            broadcast(groups, groups.output, [grad], [source])
            return grad

        return self.rank.output_stream.submit(run)

    def _total(self, part: torch.Tensor | FixedPoint) -> torch.Tensor:
        """The sum of all ranks' parts of the input gradient."""
        groups = self.groups
        if isinstance(part, FixedPoint):
            return part.with_sum(all_reduce(groups, groups.output, part.whole)).value()
        return all_reduce(groups, groups.output, part)

    def reduce_input_gradient(self, instruction: Comm) -> None:
        """C2 of vocab-1, C3 of naive: the sum of all ranks' parts of the input gradient, in float32."""
        part = self.buffers.take(Pass(PassType.T, instruction.stage, instruction.microbatch), "hidden_grad")
        event = self._sum(part)
        if self.rank.is_last:
            self.buffers.put(instruction, "event", event)
        else:
            self.iteration.unclaim(event)

    def _sum(self, part: torch.Tensor | FixedPoint) -> Event[torch.Tensor]:
        """The sum of all ranks' parts of the input gradient, on the side stream: in place, if it can be."""
        if isinstance(part, FixedPoint):
            part = replace(part, out=part.whole.new_empty(part.whole.shape, dtype=part.dtype))
        return self.rank.output_stream.submit(partial(self._total, part))

    def synchronous_output(self, instruction: Pass) -> None:
        """S of interlaced: the whole output layer, all ranks in step."""
        rank, i = self.rank, instruction.microbatch
        x = self._hidden_states(instruction)
        weight = self.model.output_weight
        training = not self.call.forward_only
        state, statistics = self._softmax(i, x, with_input_gradient=True)
        merged = self.wait(self._merge(statistics))
        if self._counts_ranks:
            self._count_likelier(i, merged, state)
            return
        mine = self._report_loss(i, merged) if rank.has_loss else None
        if not training:
            return
        late = self.wait(self._shared_gradient(i, mine)) if self.late_gradient else None
        grads = self.microbatches[i].gradient[None] if late is None else late
        part = self._passes.input_gradient(state, merged, grads[0], weight.detach())
        if len(grads) == 2:
            part += entropy_input_gradient(state, merged, grads[1], weight.detach())
        hidden_grad = self.wait(self._sum(part))
        if rank.is_last:
            self.buffers.put(instruction, "hidden_grad", hidden_grad)
        self._weight_gradient(state, merged, grads)
        self.gradients.wrote(PassType.S)

    def hidden_gradient(self, i: int) -> torch.Tensor:
        """The gradient of the last stage's output ``[(1 + D) s, b, H]``."""
        rank = self.rank.pipeline_rank
        source, *more = self.rank.method.waits_for[PassType.B]
        if isinstance(source, PassType):
            grad = self.buffers.take(Pass(source, rank, i), "hidden_grad")
        else:
            grad = self.wait(self.buffers.take(Comm(source, rank, i), "event"))
            if self.early_gradient:
                _, grad = grad
        parts = self.iteration.sequence_shards
        if CommType.CG in more:
            grad.mul_(self._scales(i).view(*grad.shape[:-1], 1))
        if grad.dim() == 3:
            grad = grad.sum(0)
        part = self.microbatches[i].spread(grad).chunk(parts)[self.groups.tensor_rank % parts]
        _, b, hidden = self.iteration.hidden_shape(i)
        return part.view(-1, b, hidden)

    def _scales(self, i: int) -> torch.Tensor:
        """[k, n] the late gradient of every token's loss, and entropy, on the last stage."""
        rank = self.rank.pipeline_rank
        if self.rank.has_loss:
            return self.buffers.take(Pass(PassType.L, rank, i), "gradient")
        return self.wait(self.buffers.take(Comm(CommType.CG, rank, i), "event"))

    def _report_loss(
        self, i: int, merged: MergedStats, ranks: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Call the loss function; returns the gradient [k, n] that it gives the tokens, in training."""
        microbatches, microbatch = self.microbatches, self.microbatches[i]
        values = {
            "token_losses": merged.loss,
            "entropy": merged.entropy,
            "wins": merged.target_wins,
            "rank": ranks,
        }
        spread = {
            name: microbatches.from_rows(i, microbatch.spread(value.float()))
            for name, value in values.items()
            if value is not None
        }
        grads = self._reports.report(i, **spread)
        if grads is None:
            return None
        return torch.stack([microbatch.take(microbatches.rows(i, grad)) for grad in grads])
