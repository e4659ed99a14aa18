"""The loss: L, each microbatch's report where Megatron looks for it, and the numbers of an evaluation."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from megatron_vocabpar.layers.columns import likelier_ids
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.token_loss import loss_of
from megatron_vocabpar.pipeline.handlers.chain import OutputChain
from megatron_vocabpar.pipeline.iteration import LayerHandlers
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.runtime.comm import all_reduce
from megatron_vocabpar.runtime.streams import Event
from megatron_vocabpar.schedule.words.passes import Pass


class Losses(LayerHandlers):
    """The handler of L; other handlers report a microbatch's softmax when it suits them."""

    def __init__(self, chain: OutputChain) -> None:
        super().__init__(chain.iteration)
        self.chain = chain
        self._reports = LossReports(chain.iteration)
        self.look_at = self._reports.hidden
        self._evaluations: deque[tuple[int, Event[Softmax]]] = deque()
        self._ranked: dict[int, tuple[Softmax, torch.Tensor]] = {}

    def gradient(self, instruction: Pass) -> None:
        """L: the loss function, and the gradient that it gives every token, and its entropy."""
        i = instruction.microbatch
        grads = self.report(i, self.chain.softmax(i))
        self.buffers.put(instruction, "gradient", grads, uses=1 + self.rank.is_last)

    def report(self, i: int, softmax: Softmax, ranks: torch.Tensor | None = None) -> torch.Tensor | None:
        """Call the loss function; returns the gradient [k, n] that it gives the tokens, in training."""
        microbatches, microbatch = self.microbatches, self.microbatches[i]
        entropy = softmax.entropy
        values = {
            "token_losses": loss_of(softmax, self.chain.terms),
            "entropy": None if entropy is None else torch.where(softmax.valid, entropy, 0),
            "wins": softmax.target_wins,
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

    def evaluate(self, i: int, event: Event[Softmax]) -> None:
        """In an evaluation, where no pass takes the softmax: report with a lag that hides the collective."""
        if not (self.rank.has_loss or self.chain.counts_ranks):
            self.iteration.unclaim(event)
            return
        self._evaluations.append((i, event))
        self._report_evaluations(keep=2)

    def _report_evaluations(self, keep: int) -> None:
        while len(self._evaluations) > keep:
            i, event = self._evaluations.popleft()
            softmax = event.wait()
            if self.chain.counts_ranks:
                self.count_likelier(i, softmax, self.buffers.take(self.chain.softmax_pass(i), "state"))
            else:
                self.report(i, softmax)

    def count_likelier(self, i: int, softmax: Softmax, state: Any) -> None:
        """Count this shard's ids that are likelier than the targets; all shards' counts meet at the end."""
        self._ranked[i] = softmax, likelier_ids(state, softmax)
        self.chain.spare.keep(state)

    def finish(self) -> None:
        """In evaluation: report the losses that are still on their way. Have gradients checked later."""
        self._report_evaluations(keep=0)
        if self._ranked:
            self._report_ranks()
        self._reports.finish()

    def _report_ranks(self) -> None:
        """One sum over all shards for all microbatches, and then their losses."""
        groups, order = self.groups, sorted(self._ranked)
        counts = [self._ranked[i][1] for i in order]
        flat = torch.cat(counts)
        total = self.wait(self.rank.output_stream.submit(lambda: all_reduce(groups, groups.output, flat)))
        for i, ranks in zip(order, total.split([len(count) for count in counts]), strict=True):
            if self.rank.has_loss:
                self.report(i, self._ranked[i][0], ranks)
