"""What the output layer's handlers share: the head, the method's chain as this rank sees it, and the slopes.

Next: ``hidden.py``, ``softmax.py``, ``barriers.py``, ``loss.py``: each owns one kind of data.
"""

from __future__ import annotations

from dataclasses import replace
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
        training: whether the chain leads to B; that of an evaluation ends in L.
        early: whether S computes A = E W, as in vocab-2, so that dX travels with the statistics.
        detached: whether the loss of further heads leaves out the output weight (``--mtp-detach-heads``).
        top: how many of the most likely ids of every token are wanted.
        ranks_targets: whether T of an evaluation counts the ids that are likelier than the target.
    """

    def __init__(self, iteration: Iteration, model: PartitionedModel) -> None:
        method, options = iteration.rank.method, iteration.rank.output_options
        self.iteration, self.model, self.method = iteration, model, method
        self.training = PassType.B in method.waits_for
        computes_t = PassType.T in method.passes
        self.early = self.training and computes_t and method.waits_for[PassType.B][0] is self.statistics
        self.ranks_targets = computes_t and not self.training
        self.detached = bool(getattr(iteration.call.config, "mtp_detach_heads", False))
        self.entropy_gradient = options.entropy_gradient
        self.top = options.top_logprobs if self.training else 0
        terms = options.terms if self.training else replace(options.terms, distillation=None)
        self.terms: LossTerms = compat.with_mup_scale(terms, iteration.call.config)
        self.head = head_of(self)
        self.spare = SpareExponentials()

    @property
    def looks_back(self) -> bool:
        """Whether the exponentials are read when the statistics have met."""
        return self.terms.distillation is not None or self.top > 0

    @property
    def weight(self) -> torch.Tensor:
        """This shard's rows, [P, H]."""
        return self.model.output_weight.detach()

    @property
    def statistics(self) -> CommType:
        """The collective that carries the statistics: T waits for it, or L where there is no T."""
        method = self.method
        word = method.waits_for[PassType.T if PassType.T in method.passes else PassType.L][0]
        assert isinstance(word, CommType)
        return word

    def softmax_pass(self, i: int) -> Pass:
        """The pass that left the exponentials and their statistics."""
        return Pass(self.method.producers[self.statistics], self.iteration.rank.pipeline_rank, i)

    def uses(self, producer: Pass) -> int:
        """How many passes and collectives take the state that a pass left.

        vocab-1 and naive: T and TW. vocab-2: C1, for the input gradient, and T. In a distillation, or for a
        top k, C1 always. In an evaluation nobody does, unless T counts.
        """
        if producer != self.softmax_pass(producer.microbatch):
            return 1  # naive's S, for S2
        passes = self.method.passes
        in_c1 = self.looks_back and not self.early
        return (PassType.T in passes) + (self.early or PassType.TW in passes) + in_c1

    def softmax(self, i: int) -> Softmax:
        """The softmax of all shards, when their statistics have arrived."""
        source = Comm(self.statistics, self.iteration.rank.pipeline_rank, i)
        arrived = self.iteration.wait(self.iteration.buffers.take(source, "event"))
        softmax: Softmax = arrived[0] if self.early else arrived
        return softmax

    def softmax_and_state(self, i: int) -> tuple[Softmax, Any]:
        """The softmax of all shards, and what the pass that computed this shard's part has kept of it."""
        return self.softmax(i), self.iteration.buffers.take(self.softmax_pass(i), "state")

    def row_slopes(self, softmax: Softmax) -> list[Slopes]:
        """The slopes of dX's rows for a gradient of 1 of each loss; B multiplies them by the true one.

        If the loss may depend on the entropies, dX has a second part, for a gradient of 1 of each entropy.
        """
        ones = torch.ones_like(softmax.total)
        slopes = [loss_slopes(softmax, self.terms, ones)]
        if self.entropy_gradient:
            slopes.append(loss_slopes(softmax, self.terms, torch.zeros_like(ones), ones))
        return slopes

    def slopes(self, softmax: Softmax, grads: torch.Tensor) -> Slopes:
        """The slopes for gradients [k, n]: of the losses, and if k is 2, of the entropies."""
        return loss_slopes(softmax, self.terms, *grads)

    def input_gradient(
        self, state: Any, softmax: Softmax, slopes: list[Slopes], out: torch.Tensor | None = None
    ) -> Any:
        """This rank's part of dX: [n, H], or [2, n, H] for two sets of slopes."""
        if len(slopes) == 1:
            return self.head.input_gradient(state, softmax, slopes[0], self.weight, out)
        if out is None:
            out = softmax.total.new_empty((len(slopes), *state.x.shape))
        for part, one in zip(out, slopes, strict=True):
            self.head.input_gradient(state, softmax, one, self.weight, part)
        return out


def head_of(chain: OutputChain) -> Head:
    """How this rank computes its shard in a call."""
    iteration, model, terms, training = chain.iteration, chain.model, chain.terms, chain.training
    options, method, shard = iteration.rank.output_options, chain.method, model.shard.range
    is_naive = PassType.S2 in method.passes
    columns: list[Column] = [mean_column(shard.vocab_size)] if terms.needs_mean else []
    if options.entropy:
        columns.append(ENTROPY)
    logs = training and heads.logs_acceptance(iteration.call.config)
    if options.accuracy or chain.ranks_targets or (logs and options.keeps_exponentials and not is_naive):
        columns.append(rival_column(model.output_weight.dtype))
    early = chain.early or bool(method.in_step)
    how = ShardOptions(
        # A distillation's needs the softmax, so the product comes after the statistics.
        with_input_gradient=early and terms.distillation is None,
        keep_state=training or any(column.of_shard is not None for column in columns),
        recompute=options.recompute,
        rows_per_chunk=options.rows_per_chunk,
        terms=terms,
        fused=options.kernels == "fused",
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
    """Memory [n, P] of finished microbatches, for the exponentials of the next ones."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._tensors)

    def keep(self, state: Any) -> None:
        """Keep the memory of a state that nobody needs any more."""
        if (tensor := spare_exponentials(state)) is not None:
            self._tensors.append(tensor)

    def take(self, tokens: int) -> torch.Tensor | None:
        """Memory for this number of tokens, or None; if no tensor fits, the oldest one is freed."""
        if not self._tensors:
            return None
        fitting = (k for k, tensor in enumerate(self._tensors) if len(tensor) == tokens)
        tensor = self._tensors.pop(next(fitting, 0))
        return tensor if len(tensor) == tokens else None
