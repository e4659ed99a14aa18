"""Divergences of two sharded distributions, without their full logits: KL and Jensen-Shannon.

There are two passes over logits: one for both log-sum-exps, one for the sums (``layers/divergence.py``). Of
a distribution that is stored as its top k, the other one needs k + 1 numbers per token, from one pass more:
the log-probabilities of the stored ids and of all others.

Next: ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_vocabpar.layers import fixed_point
from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.divergence import Divergence
from megatron_vocabpar.layers.exponents import power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.losses.arguments import Layout, leading_shape, prepare
from megatron_vocabpar.losses.reductions import reduce_tokens
from megatron_vocabpar.losses.sources import LazyLogits, Logits, Scratch, Source
from megatron_vocabpar.losses.summary import LossCall, Normaliser, first_derivative, normaliser_of
from megatron_vocabpar.losses.top_k import top_and_rest


def vocab_kl(
    p: Logits | TopLogprobs,
    q: Logits | TopLogprobs,
    *,
    mixture: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    **layout: Unpack[Layout],
) -> Tensor:
    """KL(p || q) of two distributions over one sharded vocabulary, in nats; or a Jensen-Shannon divergence.

    In distillation ``vocab_kl(teacher, student)`` is the forward KL and ``vocab_kl(student, teacher)`` the
    reverse one.

    Args:
        p: logits of the first distribution, as in ``vocab_logprobs``; gradients flow into them.
        q: logits of the second, with the same shards, ``softcap`` and ``temperature``; gradients flow into
            them if they require them. One of the two may be ``LazyLogits``. One may be ``TopLogprobs``, to
            which neither ``softcap`` nor ``temperature`` is applied: then the divergence is that of k + 1
            bins, the stored ids and one for all others, whose probability is at least 1e-8.
        mixture: b gives b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q, for 0 < b < 1.
        mask: [...] weights of the tokens.
        reduction: ``none``, ``sum`` or ``mean``.
        layout: see ``arguments.Layout``. ``invariant`` needs both to be logits, or both ``LazyLogits``.

    Returns:
        [...] fp32 (fp64 for fp64), or a scalar; at least 0 of logits, inf if q is 0 at an id where p is not.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    divergence = Divergence(mixture)
    if isinstance(p, TopLogprobs) or isinstance(q, TopLogprobs):
        values = _of_bins(divergence, p, q, layout)
    else:
        values = _of_logits(divergence, p, q, layout)
    return reduce_tokens(values, reduction, mask)


def _of_bins(
    divergence: Divergence, p: Logits | TopLogprobs, q: Logits | TopLogprobs, layout: Layout
) -> Tensor:
    """[...] where one of the two is stored."""
    if isinstance(p, TopLogprobs):
        if isinstance(q, TopLogprobs):
            raise ValueError("p and q are both stored log-probabilities: give the logits of one of them")
        return divergence.of_bins(*top_and_rest(q, p, layout))
    assert isinstance(q, TopLogprobs)
    bins_of_q, bins_of_p = top_and_rest(p, q, layout)
    return divergence.of_bins(bins_of_p, bins_of_q)


def _of_logits(divergence: Divergence, p: Logits, q: Logits, layout: Layout) -> Tensor:
    """[...] of two that have all logits."""
    if layout.get("invariant") and isinstance(p, LazyLogits) != isinstance(q, LazyLogits):
        raise ValueError(
            "invariant=True with logits on one side and hidden states on the other, whose shards are moved: "
            "give both as logits, or both as LazyLogits"
        )
    if leading_shape(p) != leading_shape(q):
        raise ValueError(
            f"p has tokens {tuple(leading_shape(p))}, q {tuple(leading_shape(q))}: give both the same"
        )
    call_p, tensors_p = prepare(p, layout)
    call_q, tensors_q = prepare(q, layout)
    if call_p.ranges != call_q.ranges:
        raise ValueError(f"p is sharded as {call_p.ranges}, q as {call_q.ranges}: shard them alike")
    values = _Sums.apply(divergence, (call_p, call_q), len(tensors_p), *tensors_p, *tensors_q)
    return values.view(leading_shape(p))


class _Sums(torch.autograd.Function):
    """``apply(divergence, (call_p, call_q), number of p's tensors, *tensors)``: [n]."""

    @staticmethod
    @exact
    def forward(
        ctx: Any, divergence: Divergence, calls: tuple[LossCall, LossCall], split: int, *tensors: Tensor
    ) -> Tensor:
        sources = calls[0].source(tensors[:split]), calls[1].source(tensors[split:])
        softmaxes = normaliser_of(calls[0], sources[0]), normaliser_of(calls[1], sources[1])
        parts, exchange = _Parts(calls, sources, softmaxes), calls[0].exchange
        if calls[0].invariant:
            zero = torch.zeros_like(softmaxes[0].offset)

            def digits(terms: Sequence[Tensor]) -> Tensor:
                return torch.stack([fixed_point.digits(term, zero[: len(term)]) for term in terms], 1)

            whole = exchange.gather(parts.per_token(divergence, digits)).unbind(2)
            totals = [fixed_point.total(each) for each in whole]
            sums = torch.stack(
                [(value * power_of_two(exponent)).to(zero.dtype) for value, exponent in totals]
            )
        else:
            sums = exchange.total(
                parts.per_token(divergence, lambda terms: torch.stack([term.sum(1) for term in terms], 1))
            ).t()
        if calls[0].keep:
            ctx.divergence, ctx.calls, ctx.split = divergence, calls, split
            ctx.save_for_backward(sums, *softmaxes[0], *softmaxes[1], *tensors)
        return divergence.value(sums)

    @staticmethod
    @first_derivative
    @exact
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums, offset_p, total_p, offset_q, total_q, *tensors = ctx.saved_tensors
        calls, split, divergence = ctx.calls, ctx.split, ctx.divergence
        sources = calls[0].source(tensors[:split]), calls[1].source(tensors[split:])
        # A token without a gradient gets a row of zeros, even if its divergence is inf: p and q become 0.
        unused = grad == 0
        sums = torch.where(unused, 0, sums)
        total_p, total_q = (torch.where(unused, torch.inf, total) for total in (total_p, total_q))
        softmaxes = Normaliser(offset_p, total_p), Normaliser(offset_q, total_q)
        needs = any(ctx.needs_input_grad[3 : 3 + split]), any(ctx.needs_input_grad[3 + split :])
        grad = grad * calls[0].terms.logit_scale
        bounds = [bound * grad.abs() for bound in divergence.bounds(sums)]
        sinks = [
            source.gradients(calls[0].exchange, bound if calls[0].invariant else None) if needed else None
            for source, bound, needed in zip(sources, bounds, needs, strict=True)
        ]
        parts = _Parts(calls, sources, softmaxes)
        for rows, shard in parts.chunks():
            logs, caps = parts.log_probabilities(shard, rows)
            slopes = divergence.slopes(*logs, sums[:, rows], needs)
            for sink, slope, cap, bound in zip(sinks, slopes, caps, bounds, strict=True):
                if sink is not None and slope is not None:
                    slope.mul_(grad[rows].unsqueeze(1))
                    sink.add(shard, rows, slope if cap is None else slope.mul_(cap), bound[rows])
        gradients: list[Tensor | None] = []
        for sink, count in zip(sinks, (split, len(tensors) - split), strict=True):
            gradients.extend([None] * count if sink is None else sink.finish())
        return (None, None, None, *gradients)


@dataclass(frozen=True)
class _Parts:
    """Both distributions, read in chunks that both sources can read."""

    calls: tuple[LossCall, LossCall]
    sources: tuple[Source, Source]
    softmaxes: tuple[Normaliser, Normaliser]
    places: tuple[Scratch, Scratch] = field(default_factory=lambda: (Scratch(), Scratch()))

    def chunks(self) -> Iterator[tuple[slice, int]]:
        """Slices of tokens, and for each all shards."""
        cuts = {0}
        for call, source in zip(self.calls, self.sources, strict=True):
            cuts.update(rows.stop for rows in source.slices(call.rows_per_chunk))
        # One empty chunk where there are no tokens.
        for start, stop in pairwise(sorted(cuts) if len(cuts) > 1 else (0, 0)):
            for shard in range(len(self.calls[0].ranges)):
                yield slice(start, stop), shard

    def log_probabilities(self, shard: int, rows: slice) -> tuple[list[Tensor], list[Tensor | None]]:
        """log p and log q [rows, P'] of a chunk, until the next call; and the caps' slopes."""
        logs, caps = [], []
        parts = zip(self.calls, self.sources, self.softmaxes, self.places, strict=True)
        for call, source, softmax, place in parts:
            y, cap = call.transformed(source, shard, rows, place)
            subtract_power_log_(y, softmax.offset[rows].unsqueeze(1))
            logs.append(y.sub_(torch.log(softmax.total[rows]).unsqueeze(1)))
            caps.append(cap)
        return logs, caps

    def per_token(self, divergence: Divergence, reduce: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor]:
        """[n, k, ...] for each shard: ``reduce`` of the terms [rows, P'] of each of the k sums."""
        parts: list[list[Tensor]] = [[] for _ in self.calls[0].ranges]
        for rows, shard in self.chunks():
            (log_p, log_q), _ = self.log_probabilities(shard, rows)
            parts[shard].append(reduce(divergence.terms(log_p, log_q)))
        return [torch.cat(chunks) for chunks in parts]
