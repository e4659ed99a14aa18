"""What the output layer's handlers share: how a shard computes, which numbers a token has, and what waits.

Next: ``shard_passes.py``, ``collectives.py``, ``loss.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from pkgutil import resolve_name

import torch
from torch import Tensor

from megatron_vocabpar.layers import extras as modules
from megatron_vocabpar.layers.extras.distillation import Comparison, check_teacher
from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.layers.extras.mean import Mean
from megatron_vocabpar.layers.extras.target_rank import TargetRank
from megatron_vocabpar.layers.extras.top import Top
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output import invariant, plain
from megatron_vocabpar.layers.output.shard_state import Part, ShardState
from megatron_vocabpar.layers.output.warm_up import warm_up
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.gradients import main_grad
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.microbatches import Microbatch
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.pipeline.options import METRICS
from megatron_vocabpar.pipeline.slots import JOINED, STATE, Joined
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType

Forward = Callable[[Tensor, Tensor, Microbatch, Sequence[Extra]], tuple[ShardState | None, Tensor]]
"""S of hidden states [n, H] and a weight [P, H]: what T needs (None in an evaluation), and the statistics."""


class OutputChain:
    """One call's output layer on this rank, for the shard that ``model`` holds.

    Attributes:
        training: whether the chain leads to B; that of an evaluation ends in L.
        early: whether S computes A = E W, as in vocab-2, so that dX travels with the statistics.
        terms: of the loss, in this call.
        weight: the output weight ``[P, H]``.
        metrics: the extras that the loss function may have.
        gradients: the names of those on which the loss may depend.
        detached: whether the loss of further heads leaves out the output weight (``--mtp-detach-heads``).
        spare: memory of microbatches that are done.
        options: how the shard computes.
        forward: S of vocab-1 and vocab-2.
    """

    def __init__(self, iteration: Iteration, model: PartitionedModel) -> None:
        method, options = iteration.rank.method, iteration.call.options
        self.iteration, self.model, self.method = iteration, model, method
        self.training = PassType.B in method.waits_for
        computes_t = PassType.T in method.passes
        self.early = computes_t and method.waits_for[PassType.B][0] is self.statistics
        terms = options.terms if self.training else replace(options.terms, distillation=None)
        self.terms: LossTerms = compat.with_mup_scale(terms, iteration.call.config)
        self.weight = model.output_weight
        self.metrics = [_metric(name) for name in options.metric_names]
        self.gradients = options.gradients if self.training else ()
        self.detached = bool(getattr(iteration.call.config, "mtp_detach_heads", False))
        self.spare = SpareExponentials()
        self._ones = torch.ones(0)
        self._constant = _extras_of(self)
        self.options = _shard_options(self)
        self.forward = _forward_of(self)

    def warm_up(self) -> None:
        """Compile the kernels of this rank's shards: before the first iteration, on all ranks at once."""
        iteration, weights = self.iteration, (self.weight, self.model.word_embeddings.weight)
        trained = self.training and all(weight.requires_grad for weight in weights)
        if trained and not iteration.call.options.invariant:
            grads = main_grad(weights[0]), main_grad(weights[1])
            n = max(map(prod, iteration.microbatches.shapes))
            shard, ranks = self.model.shard.range, len(iteration.rank.groups.ranks)
            weight, naive = weights[0].detach(), PassType.S2 in self.method.passes
            fp8_weight = Fp8Weight.of(weight, shard) if iteration.call.options.fp8_head else None
            options = replace(self.options, fp8_weight=fp8_weight)
            warm_up(weight, grads, shard, options, ranks, n, self._constant, naive=naive)

    @cached_property
    def statistics(self) -> CommType:
        """The collective that carries the statistics: T waits for it, in an evaluation R or L."""
        passes = self.method.passes
        first = next(type_ for type_ in (PassType.T, PassType.R, PassType.L) if type_ in passes)
        word = self.method.waits_for[first][0]
        assert isinstance(word, CommType)
        return word

    @cached_property
    def looks_back(self) -> bool:
        """Whether an extra reads the exponentials when the statistics have met."""
        top = self.training and self.iteration.call.options.top_logprobs > 0
        return self.terms.distillation is not None or top

    def extras(self, i: int) -> Sequence[Extra]:
        """The further numbers of a microbatch, in a distillation with what the teacher says of it.

        Raises:
            ValueError: if the teacher's tensors have another shape.
        """
        how, teacher = self.terms.distillation, self.iteration.call.teacher
        if how is None:
            return self._constant
        assert teacher is not None
        given, microbatch = teacher(i), self.iteration.microbatches[i]
        _, b, s = microbatch.shape
        shard = self.model.shard.range
        check_teacher(given, (s, b), shard)
        return (*self._constant, Comparison(how, given, microbatch.counted, shard.vocab_size))

    def softmax_pass(self, i: int) -> Pass:
        """The pass that left the exponentials and their statistics."""
        return Pass(self.method.producers[self.statistics], self.iteration.rank.pipeline_rank, i)

    @cached_property
    def state_uses(self) -> int:
        """How many passes and collectives take the state that ``softmax_pass`` has left.

        vocab-1 and naive: T and TW. vocab-2: C1, for the input gradient, and T. Where an extra looks back,
        C1 always. In an evaluation R alone does, where it counts.
        """
        passes = self.method.passes
        counts = PassType.T in passes or PassType.R in passes
        return counts + (self.early or PassType.TW in passes) + (self.looks_back and not self.early)

    def joined(self, i: int) -> Joined:
        """The softmax of all shards, when their statistics have arrived."""
        source = Comm(self.statistics, self.iteration.rank.pipeline_rank, i)
        return self.iteration.arrived(source, JOINED)

    def joined_and_state(self, i: int) -> tuple[Joined, ShardState]:
        """The joined softmax of a microbatch, and what this shard's S has kept of it."""
        return self.joined(i), self.iteration.buffers.take(self.softmax_pass(i), STATE)

    def slopes(self, softmax: Softmax, grads: Tensor) -> Slopes:
        """The slopes for gradients [k, n]: of the losses, and of each of ``gradients``."""
        of_losses, *more = grads.unbind()
        return loss_slopes(softmax, self.terms, of_losses, dict(zip(self.gradients, more, strict=True)))

    def unscaled_input_gradient(self, state: ShardState, softmax: Softmax, out: Tensor | None = None) -> Part:
        """This rank's part of dX, for gradients of 1, as the loss function has not run; B scales its rows.

        It is [n, H], or [k, n, H] if the loss may depend on extras: for a gradient of 1 of each.
        """
        if self._ones.shape != softmax.total.shape:
            self._ones = torch.ones_like(softmax.total)
        ones = self._ones
        of_losses = loss_slopes(softmax, self.terms, ones)
        if not self.gradients:
            return state.input_gradient(softmax, of_losses, out)
        nothing = torch.zeros_like(softmax.total)
        slopes = [of_losses, *(loss_slopes(softmax, self.terms, nothing, {n: ones}) for n in self.gradients)]
        parts = softmax.total.new_empty((len(slopes), *state.x.shape)) if out is None else out
        for part, one in zip(parts, slopes, strict=True):
            state.input_gradient(softmax, one, part)
        return parts


def _metric(name: str) -> Extra:
    """The extra of a metric, which is in its file alone: entropy in ``layers/extras/entropy.py``."""
    extra: Extra = resolve_name(f"{modules.__name__}.{METRICS[name].extra}")()
    return extra


def _extras_of(chain: OutputChain) -> tuple[Extra, ...]:
    """The further numbers of every microbatch."""
    call, options = chain.iteration.call, chain.iteration.call.options
    weight, shard = chain.weight.detach(), chain.model.shard.range
    found: list[Extra] = []
    if chain.terms.needs_mean:
        found.append(Mean(shard.vocab_size, weight, shard, chain.terms.logit_scale))
    found += chain.metrics
    logs = chain.training and heads.logs_acceptance(call.config) and options.keeps_exponentials
    ranks = PassType.R in chain.method.passes or (logs and PassType.S2 not in chain.method.passes)
    if ranks and TargetRank.name not in (extra.name for extra in found):
        found.append(TargetRank())
    if chain.training and options.top_logprobs:
        found.append(Top(options.top_logprobs))
    return tuple(found)


def _shard_options(chain: OutputChain) -> ShardOptions:
    options = chain.iteration.call.options
    early = chain.early or bool(chain.method.in_step)
    return ShardOptions(
        # A distillation's needs the softmax, so the product comes after the statistics.
        with_input_gradient=early and chain.terms.distillation is None,
        keep_state=chain.training or PassType.R in chain.method.passes,
        recompute=options.recompute,
        rows_per_chunk=options.rows_per_chunk,
        terms=chain.terms,
        gradients=chain.gradients,
    )


def _forward_of(chain: OutputChain) -> Forward:
    """How this rank computes S, chosen once for a call."""
    parameter, shard = chain.weight, chain.model.shard.range  # a function that holds the chain is a cycle
    options, spare = chain.options, chain.spare

    def with_blocks(
        x: Tensor, weight: Tensor, microbatch: Microbatch, _: Sequence[Extra]
    ) -> tuple[ShardState | None, Tensor]:
        return invariant.output_forward(x, weight, microbatch.targets, shard, options)

    in_8_bits = chain.iteration.call.options.fp8_head

    @cache
    def with_weight() -> ShardOptions:
        """The options, with the weight in 8 bits if asked for: once, when the first S has the weight."""
        weight = Fp8Weight.of(parameter.detach(), shard) if in_8_bits else None
        return replace(options, fp8_weight=weight)

    def forward(
        x: Tensor, weight: Tensor, microbatch: Microbatch, extras: Sequence[Extra]
    ) -> tuple[ShardState | None, Tensor]:
        return plain.output_forward(
            x,
            weight,
            microbatch.targets,
            shard,
            with_weight(),
            extras=extras,
            e=spare.take(microbatch.tokens),
        )

    return with_blocks if chain.iteration.call.options.invariant else forward


class SpareExponentials:
    """Memory [n, P] of finished microbatches, for the exponentials of the next ones."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tensors)

    def keep(self, state: ShardState) -> None:
        """Keep the memory of a state that is used up."""
        if (tensor := state.spare) is not None:
            self._tensors.append(tensor)

    def take(self, tokens: int) -> Tensor | None:
        """Memory for this number of tokens, or None; if no tensor fits, the oldest one is freed."""
        if not self._tensors:
            return None
        fitting = (k for k, tensor in enumerate(self._tensors) if len(tensor) == tokens)
        tensor = self._tensors.pop(next(fitting, 0))
        return tensor if len(tensor) == tokens else None
