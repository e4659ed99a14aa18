"""The output layer's collectives behind C0, each on the side stream: C1, C2 and C3.

    naive       C1(maximum)                      C2(statistics)        C3(input gradient)
    vocab-1     C1(statistics)                   C2(input gradient)
    vocab-2     C1(statistics, input gradient)

What a collective carries follows from who waits for it. An evaluation has those up to the statistics, and
to rank its targets a C2 that sums counts. The input gradient is reduced before the loss function has run, its
rows unscaled; CG (``loss.py``) brings the gradient that scales them, and dW.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.layers.head import Part, total, with_place
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.top import top_place, with_top
from megatron_vocabpar.pipeline.handlers.chain import OutputChain
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.runtime.comm import all_gather, all_reduce
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Comm, Pass, PassType


class Barriers(LayerHandlers):
    """Handlers of the collectives."""

    def __init__(self, chain: OutputChain) -> None:
        super().__init__(chain.iteration)
        self.chain = chain

    def reduce_maximum(self, instruction: Comm) -> None:
        """naive's C1: the maximal offset of every token."""
        groups = self.groups
        source = Pass(PassType.S, instruction.stage, instruction.microbatch)
        offsets = self.buffers.take(source, "statistics")
        event = self.rank.output_stream.submit(
            lambda: all_reduce(groups, groups.output, offsets, dist.ReduceOp.MAX)
        )
        self.hand_on(instruction, event)

    def gather_statistics(self, instruction: Comm) -> None:
        """C1 of vocab-1, C2 of naive: everyone's statistics, joined in rank order."""
        chain = self.chain
        source = chain.softmax_pass(instruction.microbatch)
        state = self.buffers.take(source, "state") if chain.looks_back else None
        self.hand_on(instruction, self.joined(self.buffers.take(source, "statistics"), state))

    def joined(self, statistics: torch.Tensor, state: Any = None) -> Event[Softmax]:
        """The softmax of all shards, in memory that the main stream has allocated."""
        out = self._place(statistics, state)
        return self.rank.output_stream.submit(partial(self._join, statistics, state, out))

    def _place(self, statistics: torch.Tensor, state: Any) -> Softmax:
        """Memory of this stream for what ``_join`` returns on another."""
        place, top = self.chain.head.place(statistics), self.chain.top
        if top:
            place = replace(place, top=top_place(place, top))
        if self.chain.terms.distillation is None:
            return place
        return replace(place, divergence=place.total.new_empty((state.teacher.width, len(statistics))))

    def _join(self, statistics: torch.Tensor, state: Any, out: Softmax) -> Softmax:
        """The softmax of all shards; with the divergence from a teacher, or a top k, if that is asked for."""
        gather = partial(all_gather, self.groups, self.groups.output)
        softmax = self.chain.head.join(gather(statistics), out)
        if out.top is not None:
            softmax = with_top(state.student, softmax, gather, out.top)
        if out.divergence is None:
            return softmax
        compared: Softmax = state.teacher.compare(
            state.student, softmax, gather, self._all_reduce, out.divergence
        )
        return compared

    def gather_statistics_and_input_gradient(self, instruction: Comm) -> None:
        """C1 of vocab-2: the statistics, then the input gradient from what S left."""
        chain = self.chain
        source = chain.softmax_pass(instruction.microbatch)
        statistics, state = self.buffers.take(source, "statistics"), self.buffers.take(source, "state")
        out = self._place(statistics, state)
        hidden_grad = None
        if self.rank.is_last:
            parts = (2,) if chain.entropy_gradient else ()
            hidden_grad = state.x.new_empty((*parts, *state.x.shape), dtype=out.total.dtype)

        def run() -> tuple[Softmax, torch.Tensor | None]:
            softmax = self._join(statistics, state, out)
            slopes = chain.row_slopes(softmax)
            total(chain.input_gradient(state, softmax, slopes, hidden_grad), self._all_reduce)
            return softmax, hidden_grad

        self.hand_on(instruction, self.rank.output_stream.submit(run))

    def reduce_input_gradient(self, instruction: Comm) -> None:
        """C2 of vocab-1, C3 of naive: the sum of all ranks' parts of the input gradient, in float32."""
        part = self.buffers.take(Pass(PassType.T, instruction.stage, instruction.microbatch), "hidden_grad")
        self.hand_on(instruction, self.sum(part))

    def sum(self, part: Part) -> Event[torch.Tensor]:
        """The sum of all ranks' parts of the input gradient."""
        return self.rank.output_stream.submit(partial(total, with_place(part), self._all_reduce))

    def sum_counts(self, instruction: Comm) -> None:
        """C2 of an evaluation: every target's rank, from the counts of all shards."""
        counts = self.buffers.take(Pass(PassType.T, instruction.stage, instruction.microbatch), "counts")
        self.hand_on(instruction, self.rank.output_stream.submit(partial(self._all_reduce, counts)))

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.groups, self.groups.output, tensor)
