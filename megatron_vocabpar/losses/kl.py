"""Kullback-Leibler divergence of two sharded distributions, without their full logits.

    KL(p || q) = sum_j p_j (log p_j - log q_j) = sum_j p_j (expm1(-d_j) + d_j),   d_j = log p_j - log q_j

The two sums are equal as p and q both add up to 1. Every term of the second is at least 0 and of second order
in d, so nearly equal distributions (a policy and its reference) keep their digits. There are two passes: one
for both log-sum-exps, one for the sum. Gradients, with D the divergence:

    dKL/dY^p_j = p_j (d_j - D)        dKL/dY^q_j = q_j - p_j

Next: ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_vocabpar.layers import fixed_point
from megatron_vocabpar.layers.exponents import power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.losses.call import Layout, leading_shape, prepare
from megatron_vocabpar.losses.reductions import reduce_tokens
from megatron_vocabpar.losses.sources import LazyLogits, Logits, Scratch, Source
from megatron_vocabpar.losses.summary import (
    Call,
    Normaliser,
    first_derivative,
    normaliser_of,
    weighted_logs,
)


def vocab_kl(
    p: Logits, q: Logits, *, mask: Tensor | None = None, reduction: str = "none", **layout: Unpack[Layout]
) -> Tensor:
    """KL(p || q) of two distributions over one sharded vocabulary, in nats.

    Args:
        p: logits of the first distribution, as in ``vocab_logprobs``; gradients flow into them.
        q: logits of the second, with the same shards, ``softcap`` and ``temperature``; gradients flow into
            them if they require them. One of the two may be ``LazyLogits``.
        mask: [...] weights of the tokens.
        reduction: ``none``, ``sum`` or ``mean``.
        layout: see ``call.Layout``. ``invariant`` needs both to be logits, or both ``LazyLogits``.

    Returns:
        [...] fp32 (fp64 for fp64), or a scalar; at least 0, inf if q is 0 at an id where p is not.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if layout.get("invariant") and isinstance(p, LazyLogits) != isinstance(q, LazyLogits):
        raise ValueError(
            "invariant=True with logits on one side and hidden states on the other, whose shards are moved: "
            "give both as logits, or both as LazyLogits"
        )
    if leading_shape(p) != leading_shape(q):
        raise ValueError(f"p has tokens {tuple(leading_shape(p))}, q {tuple(leading_shape(q))}: same needed")
    call_p, tensors_p = prepare(p, layout)
    call_q, tensors_q = prepare(q, layout)
    if call_p.ranges != call_q.ranges:
        raise ValueError(f"p is sharded as {call_p.ranges}, q as {call_q.ranges}: shard them alike")
    divergence = _Divergence.apply((call_p, call_q), len(tensors_p), *tensors_p, *tensors_q)
    return reduce_tokens(divergence.view(leading_shape(p)), reduction, mask)


class _Divergence(torch.autograd.Function):
    """``apply((call_p, call_q), number of p's tensors, *tensors)``: [n]."""

    @staticmethod
    @exact()
    def forward(ctx: Any, calls: tuple[Call, Call], split: int, *tensors: Tensor) -> Tensor:
        sources = calls[0].source(tensors[:split]), calls[1].source(tensors[split:])
        softmaxes = normaliser_of(calls[0], sources[0]), normaliser_of(calls[1], sources[1])
        parts = _Parts(calls, sources, softmaxes)
        if calls[0].invariant:
            zero = torch.zeros_like(softmaxes[0].offset)
            terms = parts.per_token(lambda terms: fixed_point.digits(terms, zero[: len(terms)]))
            value, exponent = fixed_point.total(calls[0].exchange.gather(terms))
            divergence = (value * power_of_two(exponent)).to(zero.dtype)
        else:
            divergence = calls[0].exchange.total(parts.per_token(lambda terms: terms.sum(dim=1)))
        if calls[0].keep:
            ctx.calls, ctx.split = calls, split
            ctx.save_for_backward(divergence, *softmaxes[0], *softmaxes[1], *tensors)
        return divergence

    @staticmethod
    @first_derivative
    @exact()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        divergence, offset_p, total_p, offset_q, total_q, *tensors = ctx.saved_tensors
        calls, split = ctx.calls, ctx.split
        sources = calls[0].source(tensors[:split]), calls[1].source(tensors[split:])
        # A token without a gradient gets a row of zeros, even if its divergence is inf: p and q become 0.
        unused = grad == 0
        divergence = torch.where(unused, 0, divergence)
        total_p, total_q = (torch.where(unused, torch.inf, total) for total in (total_p, total_q))
        softmaxes = Normaliser(offset_p, total_p), Normaliser(offset_q, total_q)
        needs = any(ctx.needs_input_grad[2 : 2 + split]), any(ctx.needs_input_grad[2 + split :])
        grad = grad / calls[0].temperature
        # Bounds of sum_j |dY_j|: for d >= 0, p d is at most its term plus p; else p |d| is at most q - p. So
        # sum_j p |d| is at most D + 2. The factors leave room for rounding.
        bounds = (2.5 * divergence + 3) * grad.abs(), (3 + 0 * divergence) * grad.abs()
        sinks = [
            source.gradients(calls[0].exchange, bound if calls[0].invariant else None) if needed else None
            for source, bound, needed in zip(sources, bounds, needs, strict=True)
        ]
        parts = _Parts(calls, sources, softmaxes)
        for rows, shard in parts.chunks():
            (log_p, log_q), caps = parts.log_probabilities(shard, rows)
            p, g = log_p.exp(), grad[rows].unsqueeze(1)
            slopes = [g if cap is None else cap.mul_(g) for cap in caps]
            if sinks[0] is not None:
                slope = weighted_logs(p, log_p.sub_(log_q).sub_(divergence[rows].unsqueeze(1)))
                sinks[0].add(shard, rows, slope.mul_(slopes[0]), bounds[0][rows])
            if sinks[1] is not None:
                sinks[1].add(shard, rows, log_q.exp_().sub_(p).mul_(slopes[1]), bounds[1][rows])
        gradients: list[Tensor | None] = []
        for sink, count in zip(sinks, (split, len(tensors) - split), strict=True):
            gradients.extend([None] * count if sink is None else sink.finish())
        return (None, None, *gradients)


@dataclass(frozen=True)
class _Parts:
    """Both distributions, read in chunks that both sources can read."""

    calls: tuple[Call, Call]
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

    def per_token(self, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """[n, ...] for each shard: ``reduce`` of the terms [rows, P'] of the divergence."""
        parts: list[list[Tensor]] = [[] for _ in self.calls[0].ranges]
        for rows, shard in self.chunks():
            (log_p, log_q), _ = self.log_probabilities(shard, rows)
            p = log_p.exp()
            d = log_p.sub_(log_q)
            far = d < -1  # exp(-d) may overflow, and q - p has no cancellation
            d.masked_fill_(p == 0, 0)
            near = d.neg().expm1_().add_(d).mul_(p)
            terms = torch.where(far, d.mul_(p).sub_(p).add_(log_q.exp_()), near)
            parts[shard].append(reduce(terms))
        return [torch.cat(chunks) for chunks in parts]
