"""The kernels on [n] in plain PyTorch: the merge of all shards' statistics, and the factors of T.

This is their specification, as ``reference.py`` is that of the kernels on [n, P] and [n, H]: one call here is
one kernel there.

Source: section 4.3 (equations 1 to 6) of the paper, with powers of two in place of maxima.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import fraction_power, log_of_power, power_of_two, split_exponent
from megatron_vocabpar.layers.merged import STATS_WIDTH, MergedStats, empty_merged
from megatron_vocabpar.layers.terms import LossTerms


class Factors(NamedTuple):
    """What T multiplies with, fp32 (fp64 for fp64).

    Attributes:
        row: [n] of each token's exponentials.
        target: [m] of the owned targets: g (p_target - 1), with the loss's other terms.
        uniform: [n] of every true id's row, where labels are smoothed; else None.
    """

    row: Tensor
    target: Tensor
    uniform: Tensor | None


def merge(gathered: Tensor, terms: LossTerms, out: MergedStats | None = None) -> MergedStats:
    """Combine the statistics of all shards, in rank order.

    Args:
        gathered: [R, n, 4] packed statistics, fp32 or fp64; [R, n, 5] with label smoothing.
        terms: what the loss consists of.
        out: whose tensors of [n] are written; None allocates.

    Returns:
        As ``merge_stats``, in ``out`` where it is given.
    """
    out = empty_merged(gathered.shape[1], gathered.dtype, gathered.device) if out is None else out
    k, s_rest, target_logit, owner = gathered[..., :STATS_WIDTH].unbind(2)  # each [R, n]
    # 1. the target's logit: one shard owns it, so the sum does not round
    owned = owner != 0
    valid = owned.any(dim=0)
    target = torch.where(owned, target_logit, 0).sum(dim=0)
    target = target.masked_fill_(target == torch.inf, torch.nan)  # an overflow is no certain prediction
    target_q, target_r = split_exponent(target)
    # 2. the largest exponent, and all terms relative to it, added in rank order
    highest = k.amax(dim=0)
    offset = torch.where(valid, torch.maximum(highest, target_q), highest)
    rest = torch.zeros_like(target)
    for term in power_of_two(k - offset) * s_rest:
        rest = rest + term
    # fraction_power overwrites its argument; target_r is needed again below.
    own = torch.where(valid, power_of_two(target_q - offset) * fraction_power(target_r.clone()), 0)
    total = rest + own
    # 3. Both forms of the loss are log(S / own). The first is accurate for likely targets and can't be
    # negative; in the second own < S / 2, and own itself may have underflowed.
    likely = torch.log1p(rest / own)
    unlikely = torch.log(total) + (log_of_power(offset - target_q) - target_r)
    loss = torch.where((rest <= own) & (own != 0), likely, unlikely)
    loss = torch.where(total == 0, torch.inf, loss)
    deficit = torch.where(total == 0, 0, -rest / total)
    # 4. the loss's other terms
    mean_logit = torch.zeros_like(target)
    for part in gathered[..., STATS_WIDTH:].unbind(2):
        mean_logit = mean_logit + part.sum(dim=0)
    loss = terms.loss(loss, torch.log(total) + log_of_power(offset), mean_logit)
    out.loss.copy_(torch.where(valid, loss, 0))
    out.offset.copy_(offset)
    out.total.copy_(total)
    out.target_deficit.copy_(torch.where(valid, deficit, 0))
    out.valid.copy_(valid)
    return replace(out, terms=terms)


def factors(
    merged: MergedStats,
    k: Tensor,
    grad_loss: Tensor,
    tokens: Tensor,
    target_slope: Tensor | None = None,
    *,
    vocab_size: int,
) -> Factors:
    """The factors of one shard's exponentials, of its targets, and of the smoothed labels.

    Args:
        merged: the statistics of all shards.
        k: [n] the shard's offsets, perhaps a column of its statistics.
        grad_loss: [n] gradient of each token's loss.
        tokens: [m] int64, the tokens whose targets the shard owns.
        target_slope: [n] slope of the softcap at the targets; None without a softcap.
        vocab_size: V.
    """
    target = merged.target_scale(grad_loss)
    if target_slope is not None:
        target = target * target_slope
    uniform = merged.uniform_scale(grad_loss, vocab_size) if merged.terms.label_smoothing else None
    return Factors(merged.row_scale(k, grad_loss), target.index_select(0, tokens), uniform)
