"""What the output layer's handlers share: the head, the method's chain as this rank sees it, the slopes.

Next: ``hidden.py``, ``softmax.py``, ``barriers.py``, ``loss.py``: each owns one kind of data.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from megatron_vocabpar.layers.columns import ENTROPY, Column, mean_column, rival_column
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.head import FixedPointHead, Head, NaiveHead, spare_exponentials
from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType


class OutputChain:
    """One call's output layer on this rank, for the shard that ``model`` holds.

    Attributes:
        training: whether gradients are wanted.
        late: whether the loss's gradient is known after the loss alone, so that rows of dX come unscaled.
        early: vocab-2: S has computed A = E W, so the input gradient travels with the statistics.
        counts_ranks: whether an evaluation counts ids that are likelier than the target.
    """

    def __init__(self, iteration: Iteration, model: PartitionedModel) -> None:
        method, options = iteration.rank.method, iteration.rank.output_options
        self.iteration, self.model, self.method = iteration, model, method
        self.training = not iteration.call.forward_only
        self.late = method.late_gradient
        waits = method.waits_for
        self.early = PassType.T in waits and waits[PassType.T][0] is waits[PassType.B][0]
        self.counts_ranks = options.target_rank and not self.training
        self.entropy_gradient = options.entropy_gradient
        self.terms: LossTerms = compat.with_mup_scale(options.terms, iteration.call.config)
        self.head = head_of(iteration, model, self.terms, self.early or bool(method.in_step))
        self.spare = SpareExponentials()

    @property
    def weight(self) -> torch.Tensor:
        """[P, H] of this shard."""
        return self.model.output_weight.detach()

    @property
    def statistics(self) -> CommType:
        """The collective that carries the statistics: T waits for it."""
        word = self.method.waits_for[PassType.T][0]
        assert isinstance(word, CommType)
        return word

    def softmax_pass(self, i: int) -> Pass:
        """The pass that left the exponentials and their statistics."""
        return Pass(self.method.producers[self.statistics], self.iteration.rank.pipeline_rank, i)

    def uses(self, producer: Pass) -> int:
        """How many take what a pass left: T, and besides it an early input gradient, or TW."""
        again = self.training and (self.early or PassType.TW in self.method.passes)
        return 1 + (again and producer == self.softmax_pass(producer.microbatch))

    def waiting(self, type_: CommType) -> int:
        """How many of this rank's passes take what a collective carries."""
        rank = self.iteration.rank
        # With the loss function here, B has its gradients without CG.
        last_backward = rank.is_last and not (type_ is CommType.CG and rank.has_loss)
        here = {PassType.L: rank.has_loss, PassType.B: last_backward}
        return sum(here.get(pass_, True) for pass_ in self.method.waiting_for(type_))

    def softmax(self, i: int) -> Softmax:
        """The softmax of all shards, when their statistics have arrived."""
        source = Comm(self.statistics, self.iteration.rank.pipeline_rank, i)
        arrived = self.iteration.wait(self.iteration.buffers.take(source, "event"))
        softmax: Softmax = arrived[0] if self.early else arrived
        return softmax

    def row_slopes(self, i: int, softmax: Softmax) -> list[Slopes]:
        """What scales the rows of dX: the announced gradient, or 1 where that is left to B.

        Where the loss may depend on the entropies, 1 for them too, in a second part of dX.
        """
        if not self.late:
            return [loss_slopes(softmax, self.terms, self.iteration.microbatches[i].gradient)]
        ones = torch.ones_like(softmax.total)
        slopes = [loss_slopes(softmax, self.terms, ones)]
        if self.entropy_gradient:
            slopes.append(loss_slopes(softmax, self.terms, torch.zeros_like(ones), ones))
        return slopes

    def slopes(self, softmax: Softmax, grads: torch.Tensor) -> Slopes:
        """Of the gradients [k, n] of the losses and, where k is 2, of the entropies."""
        return loss_slopes(softmax, self.terms, *grads)

    def input_gradient(
        self, state: Any, softmax: Softmax, slopes: list[Slopes], out: torch.Tensor | None = None
    ) -> Any:
        """This rank's part of dX, [n, H], or [2, n, H] for two sets of slopes."""
        if len(slopes) == 1:
            return self.head.input_gradient(state, softmax, slopes[0], self.weight, out)
        if out is None:
            out = softmax.total.new_empty((len(slopes), *state.x.shape))
        for part, one in zip(out, slopes, strict=True):
            self.head.input_gradient(state, softmax, one, self.weight, part)
        return out


def head_of(iteration: Iteration, model: PartitionedModel, terms: LossTerms, early: bool) -> Head:
    """How this rank computes its shard, in training or in an evaluation.

    Args:
        terms: what the loss consists of.
        early: whether S computes A = E W, in training.
    """
    options, method, shard = iteration.rank.output_options, iteration.rank.method, model.shard.range
    training, is_naive = not iteration.call.forward_only, PassType.S2 in method.passes
    columns: list[Column] = [mean_column(shard.vocab_size)] if terms.needs_mean else []
    if options.entropy:
        columns.append(ENTROPY)
    logs = training and heads.logs_acceptance(iteration.call.config)
    counts_ranks = options.target_rank and not training
    if options.accuracy or counts_ranks or (logs and options.keeps_exponentials and not is_naive):
        columns.append(rival_column(model.output_weight.dtype))
    early = early and training
    how = ShardOptions(
        with_input_gradient=early,
        keep_state=training or any(column.of_shard is not None for column in columns),
        recompute=options.recompute,
        rows_per_chunk=options.rows_per_chunk,
        terms=terms,
    )
    if options.invariant:
        return FixedPointHead(shard=shard, options=how)
    if is_naive:
        return NaiveHead(shard=shard, options=how)
    fp8 = None
    if recipe := options.fp8:
        # Once an iteration, when the first S has the weight.
        fp8 = cache(lambda: Fp8Weight.of(model.output_weight.detach(), shard, recipe))
    log_product = early and options.entropy_gradient
    return Head(shard=shard, options=how, columns=tuple(columns), log_product=log_product, fp8=fp8)


class SpareExponentials:
    """Memory [n, P] of microbatches that are done, for those to come."""

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._spare)

    def keep(self, state: Any) -> None:
        """That of a state that nobody needs any more."""
        if (e := spare_exponentials(state)) is not None:
            self._spare.append(e)

    def take(self, tokens: int) -> torch.Tensor | None:
        """Some for so many tokens; if none fits, the oldest is freed."""
        if not self._spare:
            return None
        fitting = (k for k, e in enumerate(self._spare) if len(e) == tokens)
        e = self._spare.pop(next(fitting, 0))
        return e if len(e) == tokens else None
