"""Kullback-Leibler divergence of two sharded distributions, without their full logits.

    KL(p || q) = sum_j p_j (log p_j - log q_j) = sum_j p_j (expm1(-d_j) + d_j),   d_j = log p_j - log q_j

The two sums are equal because p and q both add up to 1. Every term of the second is at least 0 and of
second order in d, so that nearly equal distributions (a policy and its reference) keep their digits. It
takes two passes: one for both log-sum-exps, one for the sum. Gradients, with D the divergence:

    dKL/dY^p_j = p_j (d_j - D)        dKL/dY^q_j = q_j - p_j

Next: ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_vocabpar.layers.exponents import log_of_power, split_exponent
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.call import Layout, leading_shape, prepare
from megatron_vocabpar.losses.reductions import reduce_tokens
from megatron_vocabpar.losses.sources import GradientSink, Logits, Source
from megatron_vocabpar.losses.summary import Call, scaled_logits, softmax_of, weighted_logs


def vocab_kl(
    p: Logits, q: Logits, *, mask: Tensor | None = None, reduction: str = "none", **layout: Unpack[Layout]
) -> Tensor:
    """KL(p || q) of two distributions over one sharded vocabulary, in nats.

    Args:
        p: logits of the first distribution, as in ``vocab_logprobs``; gradients flow into them.
        q: logits of the second, sharded alike; gradients flow into them where they require them. One may be
            ``LazyLogits`` and the other not. Both are divided by ``temperature``.
        mask: [...] weights of the tokens.
        reduction: ``none``, ``sum`` or ``mean``.
        layout: see ``call.Layout``; ``invariant`` is not offered here.

    Returns:
        [...] fp32 (fp64 for fp64), or a scalar; at least 0; inf where q gives 0 to an id that p doesn't.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if layout.get("invariant"):
        raise ValueError("invariant=True: the divergence has no invariant mode; leave it out")
    if leading_shape(p) != leading_shape(q):
        raise ValueError(f"p has tokens {tuple(leading_shape(p))}, q {tuple(leading_shape(q))}: same needed")
    call_p, tensors_p = prepare(p, layout)
    call_q, tensors_q = prepare(q, layout)
    if call_p.ranges != call_q.ranges:
        raise ValueError(f"p is sharded as {call_p.ranges}, q as {call_q.ranges}: shard them alike")
    divergence = _Divergence.apply((call_p, call_q), len(tensors_p), *tensors_p, *tensors_q)
    return reduce_tokens(divergence.view(leading_shape(p)), reduction, mask)


class _Softmax(NamedTuple):
    """The normaliser of each token, [n]: ``sum_j exp(Y_j) = total * 2^offset``."""

    offset: Tensor
    total: Tensor


class _Divergence(torch.autograd.Function):
    """``apply((call_p, call_q), number of p's tensors, *tensors)``: [n]."""

    @staticmethod
    def forward(ctx: Any, calls: tuple[Call, Call], split: int, *tensors: Tensor) -> Tensor:
        sources = calls[0].source(tensors[:split]), calls[1].source(tensors[split:])
        softmaxes = _Softmax(*softmax_of(calls[0], sources[0])), _Softmax(*softmax_of(calls[1], sources[1]))
        sums: list[list[Tensor]] = [[] for _ in calls[0].ranges]
        for rows, shard, vocab_range in _chunks(calls, sources):
            log_p, log_q = _log_probabilities(calls, sources, softmaxes, shard, rows, vocab_range)
            p = log_p.exp()
            d = torch.where(p == 0, 0, log_p - log_q)
            terms = torch.where(p == 0, log_q.exp(), p * (torch.expm1(-d) + d))
            sums[shard].append(terms.sum(dim=1))
        empty = softmaxes[0].total.new_empty(0)
        divergence = calls[0].exchange.total([torch.cat([empty, *chunks]) for chunks in sums])
        if calls[0].keep:
            ctx.calls, ctx.split = calls, split
            saved = [t for softmax in softmaxes for t in (softmax.offset, softmax.total)]
            ctx.save_for_backward(divergence, *saved, *tensors)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        divergence, offset_p, total_p, offset_q, total_q, *tensors = ctx.saved_tensors
        calls, split = ctx.calls, ctx.split
        sources = calls[0].source(tensors[:split]), calls[1].source(tensors[split:])
        softmaxes = _Softmax(offset_p, total_p), _Softmax(offset_q, total_q)
        needs = any(ctx.needs_input_grad[2 : 2 + split]), any(ctx.needs_input_grad[2 + split :])
        sinks = [
            source.gradients(calls[0].exchange, None) if needed else None
            for source, needed in zip(sources, needs, strict=True)
        ]
        grad = grad / calls[0].temperature
        for rows, shard, vocab_range in _chunks(calls, sources):
            log_p, log_q = _log_probabilities(calls, sources, softmaxes, shard, rows, vocab_range)
            p, g = log_p.exp(), grad[rows].unsqueeze(1)
            if sinks[0] is not None:
                slope = weighted_logs(p, log_p - log_q - divergence[rows].unsqueeze(1))
                _add(sinks[0], shard, rows, slope * g, vocab_range)
            if sinks[1] is not None:
                _add(sinks[1], shard, rows, (log_q.exp() - p) * g, vocab_range)
        found: list[Tensor | None] = []
        for sink, count in zip(sinks, (split, len(tensors) - split), strict=True):
            found.extend([None] * count if sink is None else sink.finish())
        return (None, None, *found)


def _chunks(
    calls: tuple[Call, Call], sources: tuple[Source, Source]
) -> Iterator[tuple[slice, int, VocabRange]]:
    """Tokens and shards, in chunks that both sources can read."""
    cuts = {0}
    for call, source in zip(calls, sources, strict=True):
        cuts.update(rows.stop for rows in source.slices(call.rows_per_chunk))
    edges = sorted(cuts)
    for start, stop in pairwise(edges):
        for shard, vocab_range in enumerate(calls[0].ranges):
            yield slice(start, stop), shard, vocab_range


def _log_probabilities(
    calls: tuple[Call, Call],
    sources: tuple[Source, Source],
    softmaxes: tuple[_Softmax, _Softmax],
    shard: int,
    rows: slice,
    vocab_range: VocabRange,
) -> tuple[Tensor, Tensor]:
    """log p and log q of the shard's true ids, [rows, valid]."""
    found = []
    for call, source, softmax in zip(calls, sources, softmaxes, strict=True):
        y = scaled_logits(source, shard, rows, call.temperature)[:, : vocab_range.valid_rows]
        q, r = split_exponent(y)
        log_total = torch.log(softmax.total[rows]).unsqueeze(1)
        found.append(log_of_power(q.sub_(softmax.offset[rows].unsqueeze(1))).add_(r).sub_(log_total))
    return found[0], found[1]


def _add(sink: GradientSink, shard: int, rows: slice, grad: Tensor, vocab_range: VocabRange) -> None:
    """Hand over the gradient of the true ids, with zeros for the padding."""
    padding = grad.new_zeros(grad.shape[0], vocab_range.rows - grad.shape[1])
    bound = grad.abs().sum(dim=1)
    sink.add(shard, rows, torch.cat((grad, padding), dim=1) if padding.numel() else grad, bound)
