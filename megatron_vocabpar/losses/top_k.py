"""The k most likely ids of sharded logits, and the bins of ``layers/bins.py`` as a function of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_vocabpar.layers.bins import BinSlopes, TopLogprobs, shard_bins
from megatron_vocabpar.layers.exponents import subtract_power_log_
from megatron_vocabpar.layers.extras.top import joined_top, shard_top
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.arguments import Layout, leading_shape, prepare
from megatron_vocabpar.losses.sources import Logits, Scratch
from megatron_vocabpar.losses.summary import LossCall, first_derivative, normaliser_of, of_chunks


def vocab_top(logits: Logits, k: int, **layout: Unpack[Layout]) -> TopLogprobs:
    """The k most likely ids of every token and their log-probabilities, most likely first; no gradient.

    Args:
        logits, layout: as in ``vocab_logprobs``; ``softcap`` and ``temperature`` are applied.
        k: 1 up to the size of the vocabulary.

    Returns:
        logprobs [..., k] fp32 (fp64 for fp64) and ids [..., k] int64, the same on every rank.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    call, tensors = prepare(logits, {**layout, "inference_only": True, "invariant": False})
    if not 1 <= k <= call.vocab_size:
        raise ValueError(f"the {k} most likely ids of {call.vocab_size}: give 1 up to {call.vocab_size}")
    source = call.source(tensors)
    softmax = normaliser_of(call, source)

    def largest(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        return shard_top(y, k, shard)

    top, ids = joined_top(call.exchange.gather(of_chunks(call, source, largest)))
    logs = subtract_power_log_(top.to(softmax.total.dtype), softmax.offset.unsqueeze(1))
    logs = logs.sub_(softmax.total.log().unsqueeze(1))
    shape = (*leading_shape(logits), k)
    return TopLogprobs(logs.view(shape), ids.long().view(shape))


def top_and_rest(logits: Logits, stored: TopLogprobs, layout: Layout) -> tuple[Tensor, Tensor]:
    """[..., k + 1] log-probabilities of the stored ids and of all others: the stored ones, and the logits'.

    Gradients flow into the logits.

    Raises:
        ValueError: if the tokens differ, or with ``invariant``.
    """
    if leading_shape(logits) != stored.ids.shape[:-1]:
        raise ValueError(
            f"logits of tokens {tuple(leading_shape(logits))}, stored log-probabilities of "
            f"{tuple(stored.ids.shape[:-1])}: give both the same"
        )
    if layout.get("invariant"):
        raise ValueError(
            "invariant=True with stored log-probabilities: their bins are plain sums; leave it out"
        )
    call, tensors = prepare(logits, layout)
    stored = stored.within(call.vocab_size)
    ids = stored.known_ids.flatten(0, -2)
    top, rest = _Bins.apply(replace(call, keep_exponentials=False), ids, *tensors)
    bins = stored.bins_of(top.view(stored.ids.shape), rest.view(stored.ids.shape[:-1]))
    return stored.bins(bins.dtype), bins


class _Bins(torch.autograd.Function):
    """``apply(call, ids, *tensors)``: log-probabilities [n, k] of ids, 0 for -1, and [n] of all others."""

    @staticmethod
    @exact
    def forward(ctx: Any, call: LossCall, ids: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        source = call.source(tensors)
        offset, total = normaliser_of(call, source)

        def sums(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
            subtract_power_log_(y, offset[rows].unsqueeze(1))
            logs = y.sub_(total[rows].log().unsqueeze(1))
            return shard_bins(logs, ids[rows], shard)

        bins = call.exchange.total(of_chunks(call, source, sums))
        top, rest = bins[:, :-1], bins[:, -1].log()
        if call.keep:
            ctx.call = call
            ctx.save_for_backward(ids, offset, total, rest, *tensors)
        return top, rest

    @staticmethod
    @first_derivative
    @exact
    def backward(ctx: Any, grad_top: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
        ids, offset, total, rest, *tensors = ctx.saved_tensors
        call = ctx.call
        source, scratch = call.source(tensors), Scratch()
        scale = call.terms.logit_scale
        slopes = BinSlopes.of(torch.where(ids >= 0, grad_top, 0) * scale, grad_rest * scale, rest)
        bound, sink = slopes.bound(), source.gradients(call.exchange, None)
        for rows in source.slices(call.rows_per_chunk):
            for shard, held in enumerate(call.ranges):
                y, cap = call.transformed(source, shard, rows, scratch)
                subtract_power_log_(y, offset[rows].unsqueeze(1))
                p = y.sub_(total[rows].log().unsqueeze(1)).exp_()
                grad = BinSlopes(*(each[rows] for each in slopes)).apply_(p, ids[rows], held)
                sink.add(shard, rows, grad if cap is None else grad.mul_(cap), bound[rows])
        return (None, None, *sink.finish())
