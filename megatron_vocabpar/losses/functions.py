"""The public losses on a sharded vocabulary.

    vocab_logprobs        log p_target                     -loss of equation 1, section 4.1 of the paper
    vocab_entropy         -sum_j p_j log p_j
    vocab_cross_entropy   -log p_target, label smoothing, z-loss
    vocab_argmax          the most likely id               vocab_target_rank: how many ids are likelier
    vocab_top             the k most likely ids, and their log-probabilities

``kl.py`` has the divergence of two distributions. Each takes ``logits``: this rank's shard [..., P], a list
of all shards (in one process), or ``LazyLogits(hidden, weight)``. ``arguments.Layout`` has the keyword
arguments that they share. Nothing writes into an argument. Next: ``summary.py``, which computes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.exponents import subtract_power_log_
from megatron_vocabpar.layers.extras.top import joined_top, shard_top
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.kernels.reference import take_target_
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import target_rows
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.token_loss import token_loss
from megatron_vocabpar.losses.arguments import Layout, check_targets, leading_shape, prepare, summarise
from megatron_vocabpar.losses.reductions import reduce_tokens
from megatron_vocabpar.losses.sources import Logits
from megatron_vocabpar.losses.summary import normaliser_of, of_chunks

_SEGMENT = 256
"""Columns of one step of ``_first_largest``."""


def vocab_logprobs(
    logits: Logits,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "none",
    **layout: Unpack[Layout],
) -> Tensor:
    """Log-probability of each target over the whole vocabulary.

    Source: equation 1, section 4.1 of the paper.

    Args:
        logits: [..., P] this rank's shard (fp16, bf16, fp32, fp64), a list of shards, or ``LazyLogits``.
        targets: [...] integer ids in [0, V), the same on every rank.
        ignore_index: target of tokens whose result is 0, without gradient.
        mask: [...] weights of the tokens; 0 leaves a token out.
        reduction: ``none``, ``sum``, or ``mean`` over the mask's sum (without one, over counted targets).
        layout: see ``arguments.Layout``.

    Returns:
        [...] fp32 (fp64 for fp64), or a scalar; the same on every rank.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    summary, counted = summarise(logits, targets, layout, ignore_index=ignore_index)
    return reduce_tokens(summary.logprob, reduction, _weights(mask, counted, reduction))


def vocab_entropy(
    logits: Logits, *, mask: Tensor | None = None, reduction: str = "none", **layout: Unpack[Layout]
) -> Tensor:
    """Entropy in nats of each token's distribution over the whole vocabulary.

    Args:
        logits, mask, reduction, layout: as in ``vocab_logprobs``; without a mask the mean is over all tokens.

    Returns:
        [...] fp32 (fp64 for fp64), or a scalar.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    summary, _ = summarise(logits, None, layout, entropy=True)
    return reduce_tokens(summary.extras["entropy"], reduction, mask)


def vocab_logprobs_and_entropy(
    logits: Logits, targets: Tensor, *, ignore_index: int = -100, **layout: Unpack[Layout]
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, [...] each, from one pass over the logits and one collective.

    Source: sections 4.3 and 4.4 of the paper for the one pass.
    """
    summary, _ = summarise(logits, targets, layout, ignore_index=ignore_index, entropy=True)
    return summary.logprob, summary.extras["entropy"]


def vocab_cross_entropy(
    logits: Logits,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    **layout: Unpack[Layout],
) -> Tensor:
    """Cross entropy with the terms of the output layer (``layers.terms.LossTerms``).

    Source: equation 1 of the paper; label smoothing as PyTorch's; z-loss: PaLM (arXiv 2204.02311), section 5.

    Args:
        logits, targets, ignore_index, mask, reduction, layout: as in ``vocab_logprobs``.
        label_smoothing: s in [0, 1), defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of the squared log-sum-exp, 0 or more.

    Returns:
        A scalar, or [...] for ``none``; fp32 (fp64 for fp64). Smoothing a -inf logit gives inf.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    terms = LossTerms(label_smoothing=label_smoothing, z_loss=z_loss)
    summary, counted = summarise(logits, targets, layout, ignore_index=ignore_index, mean=terms.needs_mean)
    loss = token_loss(summary, terms)
    if counted is not None:
        loss = torch.where(counted, loss, 0)
    return reduce_tokens(loss, reduction, _weights(mask, counted, reduction))


@exact
def vocab_argmax(logits: Logits, **layout: Unpack[Layout]) -> Tensor:
    """The id with the largest logit of the whole vocabulary; the smallest of equal ones.

    Neither a softcap nor a temperature changes it.

    Returns:
        [...] int64, the same on every rank; without gradient. For rows of NaN, any id.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    call, tensors = prepare(logits, layout)
    source = call.source(tensors)

    def best(i: int, rows: slice) -> Tensor:
        y = source.logits(i, rows, None)
        if y.shape[1] == 0:
            return y.new_full((len(y), 2), -torch.inf, dtype=torch.float64)
        value, column = _first_largest(y)
        return torch.stack((value.double(), column.double() + call.ranges[i].start), dim=1)

    slices = source.slices(call.rows_per_chunk) or [slice(0, 0)]
    bests = [torch.cat([best(i, rows) for rows in slices]) for i in range(len(call.ranges))]
    gathered = call.exchange.gather(bests)  # [R, n, 2]
    winner = gathered[..., 0].argmax(dim=0, keepdim=True)  # the first of equal shards
    ids = gathered[..., 1].gather(0, winner).squeeze(0)
    return ids.clamp(min=0).long().view(leading_shape(logits))


@exact
def vocab_target_rank(
    logits: Logits, targets: Tensor, *, ignore_index: int = -100, **layout: Unpack[Layout]
) -> Tensor:
    """How many ids have a larger logit than the target: 0 where the target is the most likely.

    Args:
        logits, targets, ignore_index, layout: as in ``vocab_logprobs``; neither a softcap nor a temperature
            changes it.

    Returns:
        [...] int64, the same on every rank, without gradient; -1 for ignored tokens, 0 if the target's logit
        is NaN.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    call, tensors = prepare(logits, layout)
    call = replace(call, terms=PLAIN)
    source = call.source(tensors)
    ids, counted = check_targets(targets, leading_shape(logits), ignore_index, call.ranges[0].vocab_size)

    def targets_of(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        return take_target_(y, target_rows(ids[rows], shard), shard.valid_rows)

    target_logit = call.exchange.total(of_chunks(call, source, targets_of))

    def larger(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        return (y > target_logit[rows, None]).sum(dim=1)

    rank = call.exchange.total(of_chunks(call, source, larger))
    return torch.where(counted, rank.view(counted.shape), -1)


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


def _first_largest(y: Tensor) -> tuple[Tensor, Tensor]:
    """[n] largest values and [n] their first columns in [n, P].

    On the CPU ``max`` with indices takes several times as long as ``amax``. So ``amax`` finds the maximum of
    each segment of 256 columns, and ``max`` the first best segment and then its first best column.
    """
    whole = y.shape[1] // _SEGMENT * _SEGMENT
    peaks = [y[:, :whole].unflatten(1, (-1, _SEGMENT)).amax(2)]
    if whole < y.shape[1]:
        peaks.append(y[:, whole:].amax(1, keepdim=True))
    start = torch.cat(peaks, dim=1).max(dim=1, keepdim=True).indices * _SEGMENT
    columns = start + torch.arange(_SEGMENT, device=y.device)
    best = y.gather(1, columns.clamp_(max=y.shape[1] - 1)).max(dim=1)
    return best.values, start.squeeze(1) + best.indices


def _weights(mask: Tensor | None, counted: Tensor | None, reduction: str) -> Tensor | None:
    """The mask of a reduction: the caller's, with 0 for ignored tokens."""
    if counted is None or (mask is None and reduction == "none"):
        return mask
    if mask is None:
        return counted
    if mask.shape != counted.shape:
        raise ValueError(f"mask of shape {tuple(mask.shape)} for targets of {tuple(counted.shape)}")
    return torch.where(counted, mask, torch.zeros_like(mask))
